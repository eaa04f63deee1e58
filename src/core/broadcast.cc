#include "core/broadcast.h"

#include <cstddef>

#include "core/strided_index.h"

namespace jax_fastops {

int64_t BroadcastShape::elements() const {
  int64_t product = 1;
  for (int d = 0; d < rank; ++d) product *= size[d];
  return product;
}

bool BroadcastShape::IsFull(int array) const {
  int64_t step = 1;
  for (int d = rank; d-- > 0; step *= size[d]) {
    if (stride[array][d] != step) return false;
  }
  return true;
}

bool BroadcastShape::IsScalar(int array) const {
  for (int d = 0; d < rank; ++d) {
    if (stride[array][d] != 0) return false;
  }
  return true;
}

void BroadcastShape::DropMajor() {
  --rank;
  for (int d = 0; d < rank; ++d) {
    size[d] = size[d + 1];
    for (int a = 0; a < arrays; ++a) stride[a][d] = stride[a][d + 1];
  }
}

void RowMajorStrides(std::span<const int64_t> array, ArrayStrides* strides) {
  int64_t step = 1;
  for (size_t i = array.size(); i-- > 0; step *= array[i]) strides->at[i] = step;
}

void BroadcastStrides(std::span<const int64_t> result, std::span<const int64_t> array,
                      ArrayStrides* strides) {
  RowMajorStrides(array, strides);
  for (size_t i = 0; i < result.size(); ++i) {
    if (array[i] != result[i]) strides->at[i] = 0;
  }
}

bool Collapse(std::span<const int64_t> result, const ArrayStrides* strides, int arrays,
              BroadcastShape* shape) {
  *shape = BroadcastShape{};
  if (arrays > kMaxBroadcastArrays) return false;
  shape->arrays = arrays;
  for (const int64_t size : result) {
    if (size != 0) continue;
    shape->rank = 1;
    shape->size[0] = 0;
    for (int a = 0; a < arrays; ++a) shape->stride[a][0] = 1;
    return true;
  }
  for (size_t i = 0; i < result.size(); ++i) {
    if (result[i] == 1) continue;
    int64_t steps[kMaxBroadcastArrays];
    for (int a = 0; a < arrays; ++a) steps[a] = strides[a].at[i];
    if (!AppendDim(result[i], steps, arrays, &shape->rank, shape->size, shape->stride))
      return false;
  }
  return true;
}

bool WithRows(const BroadcastShape& shape, BroadcastShape* with_rows) {
  *with_rows = shape;
  bool steps = false;
  for (int a = 0; a < shape.arrays; ++a) steps = steps || shape.InnerStride(a) > 1;
  if (!steps) return true;
  if (shape.rank == kMaxBroadcastRank) return false;
  with_rows->size[with_rows->rank++] = 1;
  for (int a = 0; a < shape.arrays; ++a) {
    with_rows->stride[a][shape.rank] = shape.IsFull(a) ? 1 : 0;
  }
  return true;
}

}  // namespace jax_fastops
