#include "transpose/permutation.h"

namespace jax_fastops {
namespace {

// A run of dimensions that move together, because they are adjacent in input and output.
struct Group {
  int64_t size;
  int64_t in_stride;  // of the group's minor dimension
};

}  // namespace

Permutation Normalize(const TransposeShape& shape) {
  const int rank = static_cast<int>(shape.dims.size());
  std::vector<int64_t> strides(rank);  // of the input, in elements
  int64_t count = 1;
  for (int i = rank - 1; i >= 0; --i) {
    strides[i] = count;
    count *= shape.dims[i];
  }

  std::vector<Group> groups;
  for (const int axis : shape.axes) {
    const int64_t size = shape.dims[axis];
    if (size == 1) continue;
    if (!groups.empty() && groups.back().in_stride == strides[axis] * size) {
      groups.back().size *= size;
      groups.back().in_stride = strides[axis];
    } else {
      groups.push_back({size, strides[axis]});
    }
  }

  // An element wider than the alignment becomes a row of narrower units.
  Permutation p;
  const bool keeps_minor = groups.empty() || groups.back().in_stride == 1;
  p.unit = shape.itemsize < shape.alignment ? shape.itemsize : shape.alignment;
  int64_t row = shape.itemsize;  // bytes
  if (keeps_minor && !groups.empty()) {
    row *= groups.back().size;
    groups.pop_back();
  }
  if (keeps_minor) {
    while (p.unit < shape.alignment && row % (2 * p.unit) == 0) p.unit *= 2;
  }
  const int64_t units = row / p.unit;  // per row, if rows stay rows
  for (Group& group : groups) group.in_stride = group.in_stride * shape.itemsize / p.unit;
  if (units > 1) groups.push_back({units, 1});

  p.count = count * shape.itemsize / p.unit;
  p.rank = static_cast<int>(groups.size());
  int64_t out_stride = 1;
  for (int i = p.rank - 1; i >= 0; --i) {
    p.size[i] = groups[i].size;
    p.in_stride[i] = groups[i].in_stride;
    p.out_stride[i] = out_stride;
    out_stride *= groups[i].size;
  }
  return p;
}

}  // namespace jax_fastops
