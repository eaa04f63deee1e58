// Property test of the launch plans for transpositions: every unit is moved once, from and to the
// place that the permutation says, for any rank, size, width and alignment.
#include "transpose/plan.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/integer.h"
#include "property.h"
#include "transpose/permutation.cc"  // the test is compiled with plan*.cc only

namespace jax_fastops {
namespace {

constexpr int64_t kInt = 0x7fffffff;
constexpr int kProcessors = 132;

std::string Text(const TransposeShape& shape) {
  std::string text = "dims";
  for (const int64_t dim : shape.dims) text += " " + std::to_string(dim);
  text += ", axes";
  for (const int axis : shape.axes) text += " " + std::to_string(axis);
  return text + ", " + std::to_string(shape.itemsize) + " bytes, alignment " +
         std::to_string(shape.alignment);
}

#define CHECK_SHAPE(condition) CHECK(condition, "%s", Text(shape).c_str())

int64_t Bytes(const TransposeShape& shape) {
  int64_t bytes = shape.itemsize;
  for (const int64_t dim : shape.dims) bytes *= dim;
  return bytes;
}

// An array of at most `most` elements.
TransposeShape RandomShape(Random& random, int64_t most) {
  TransposeShape shape;
  shape.dims.resize(1 + random.Below(8));
  shape.axes.resize(shape.dims.size());
  std::iota(shape.axes.begin(), shape.axes.end(), 0);
  std::mt19937 order(static_cast<uint32_t>(random.Below(kInt)));
  std::shuffle(shape.axes.begin(), shape.axes.end(), order);
  // Some shapes have one long dimension, others have many of about the same size.
  const bool even = random.Coin();
  const double share = 1.0 / static_cast<double>(shape.dims.size());
  const int64_t each = static_cast<int64_t>(std::pow(static_cast<double>(most), share)) + 1;
  for (int64_t& dim : shape.dims) {
    dim = std::min(random.Size(even ? std::min(2 * each, most) : most), most);
    most /= dim;
  }
  std::shuffle(shape.dims.begin(), shape.dims.end(), order);
  shape.itemsize = int64_t{1} << random.Below(5);
  shape.alignment = random.Coin() ? 16 : int64_t{1} << random.Below(5);
  return shape;
}

// -------------------------------------------------------------------------------------------------
// What the kernels compute from a plan

// The moves of a shape, in bytes.
class Moves {
 public:
  Moves(const TransposeShape& shape, int unit) : shape_(shape), unit_(unit) {
    const int rank = static_cast<int>(shape.dims.size());
    std::vector<int64_t> strides(rank);
    int64_t stride = shape.itemsize;
    for (int d = rank - 1; d >= 0; stride *= shape.dims[d--]) strides[d] = stride;
    for (int64_t byte = 0; byte < Bytes(shape); byte += unit) {
      int64_t n = byte / shape.itemsize, from = byte % shape.itemsize;
      for (int d = rank - 1; d >= 0; --d) {
        const int axis = shape.axes[d];
        from += n % shape.dims[axis] * strides[axis];
        n /= shape.dims[axis];
      }
      sources_.push_back(from);
    }
  }

  // Moves units from one place to another.
  void Move(int64_t from, int64_t to) {
    const TransposeShape& shape = shape_;
    CHECK_SHAPE(to % unit_ == 0 && to >= 0 && to / unit_ < static_cast<int64_t>(sources_.size()));
    CHECK_SHAPE(sources_[to / unit_] == from);  // not yet moved: then it is -1
    sources_[to / unit_] = -1;
    ++moved_;
  }

  bool Complete() const { return moved_ == static_cast<int64_t>(sources_.size()); }

 private:
  const TransposeShape& shape_;
  int64_t unit_, moved_ = 0;
  std::vector<int64_t> sources_;  // of each unit of the output
};

template <typename Divisor>
int64_t Take(int64_t& n, const Divisor& divisor) {
  const int64_t d = static_cast<int64_t>(divisor.divisor), remainder = n % d;
  n /= d;
  return remainder;
}

template <typename Index>
void Follow(const TransposeShape&, const RowsPlan<Index>& p, int unit, Moves& moves) {
  const int64_t bytes = p.by_bytes ? 1 : unit;
  for (int64_t i = 0; i < static_cast<int64_t>(p.count); i += unit / bytes) {
    int64_t n = i, from = 0;
    for (int d = 0; d < p.rank - 1; ++d) from += Take(n, p.dims[d].size) * p.dims[d].in_stride;
    moves.Move(from + n * p.dims[p.rank - 1].in_stride, i * bytes);
  }
}

int64_t RunOffset(const MovedDim* dims, int count, int64_t index, int64_t MovedDim::* stride) {
  int64_t offset = 0;
  for (int d = 0; d < count - 1; ++d) offset += Take(index, dims[d].size) * (dims[d].*stride);
  return offset + index * (dims[count - 1].*stride);
}

void Follow(const TransposeShape& shape, const TilePlan& p, int unit, Moves& moves) {
  const int tile_rows = TileRows(unit), tile_columns = TileColumns(unit);
  const int more_rows = p.aligned_out ? 0 : kSector / unit;
  // The array begins at such an address, so that columns begin at any.
  const int64_t base = shape.alignment % kSector;
  for (int64_t block = 0; block < p.blocks; ++block) {
    int64_t n = block, index = Take(n, p.tiles);
    const int64_t band = index / p.band_tiles.divisor;
    index -= band * p.band_tiles.divisor;
    const int64_t row = Take(index, band == p.last_band_index ? p.last_band : p.band);
    const int64_t first_row = (band * p.band.divisor + row) * tile_rows;
    const int64_t first_column = index * tile_columns;
    int64_t in = 0, out = 0;
    for (int d = p.column_dims + p.row_dims; d < p.rank; ++d) {
      const int64_t i = Take(n, p.dims[d].size);
      in += i * p.dims[d].in_stride;
      out += i * p.dims[d].out_stride;
    }
    CHECK_SHAPE(first_row < p.rows && first_column < p.columns);
    const int64_t live_rows = std::min<int64_t>(p.rows - first_row, tile_rows + more_rows);
    const int64_t live_columns = std::min<int64_t>(p.columns - first_column, tile_columns);
    const MovedDim* row_dims = p.dims + p.column_dims;
    for (int64_t c = first_column; c < first_column + live_columns; ++c) {
      const int64_t column = out + RunOffset(p.dims, p.column_dims, c, &MovedDim::out_stride);
      if (p.aligned_out) CHECK_SHAPE(column % 16 == 0 && p.rows * unit % 16 == 0);
      // Unaligned columns are written in whole sectors.
      const int64_t address = base + column + first_row * unit;
      const int64_t skip = p.aligned_out ? 0 : (kSector - address % kSector) % kSector / unit;
      const int64_t end = std::min(live_rows, skip + tile_rows);
      for (int64_t r = first_row == 0 ? 0 : skip; r < end; ++r) {
        const int64_t line =
            in + RunOffset(row_dims, p.row_dims, first_row + r, &MovedDim::in_stride);
        if (p.aligned_in) CHECK_SHAPE(line % 16 == 0 && p.columns * unit % 16 == 0);
        moves.Move(line + c * unit, column + (first_row + r) * unit);
      }
    }
  }
}

// The offset in the array, and the place in shared memory, of element `within` of a segment.
struct Element {
  int64_t offset = 0, shared = 0;

  Element(const BoxSide& side, int unit, int64_t segment, int64_t within) : offset(within * unit) {
    for (int d = 0; d < side.run_dims + side.segment_dims; ++d) {
      const BoxDim& dim = side.dims[d];
      const int64_t i = Take(d < side.run_dims ? within : segment, dim.size);
      shared += i * dim.shared_stride;
      if (d >= side.run_dims) offset += i * dim.stride;
    }
  }
};

void Follow(const TransposeShape& shape, const BoxPlan& p, int unit, Moves& moves) {
  // The source of each byte in shared memory, relative to the box.
  std::vector<int64_t> shared(p.data_bytes, -1);
  for (int64_t n = 0; n < p.boxes; ++n) {
    int64_t index = n, in = 0, out = 0;
    int64_t in_length = p.in.length.divisor, in_count = p.in.count;
    int64_t out_length = p.out.length.divisor, out_count = p.out.count;
    for (int d = 0; d < p.rank; ++d) {
      const int64_t i = Take(index, p.dims[d].size);
      in += i * p.dims[d].in_stride;
      out += i * p.dims[d].out_stride;
      // Both sides lose the same part of a dimension.
      const auto cut = [&](const BoxPart& part, int64_t* length, int64_t* count, bool both) {
        if (d != part.dim || (i + 1) * part.size <= part.total) return;
        const int64_t left = part.total - i * part.size;
        *length = *length / part.size * left;
        if (!both) *count = *count / part.size * left;
      };
      const bool same = p.in_part.dim == p.out_part.dim;
      cut(p.in_part, &in_length, &out_count, same);
      cut(p.out_part, &out_length, &in_count, same);
    }
    CHECK_SHAPE(in_length * in_count == out_length * out_count);
    std::fill(shared.begin(), shared.end(), -1);
    for (int64_t i = 0; i < in_count * in_length; ++i) {
      const Element element(p.in, unit, i / in_length, i % in_length);
      const int64_t place =
          p.Place(static_cast<uint32_t>((i / in_length * p.in.pitch + i % in_length) * unit));
      CHECK_SHAPE(element.shared == i / in_length * p.in.pitch + i % in_length);
      CHECK_SHAPE(place + unit <= p.data_bytes && place < 1 << 16 && shared[place] == -1);
      shared[place] = in + element.offset;
      if (p.in.aligned && i % in_length == 0) CHECK_SHAPE(element.offset % 16 == 0);
    }
    for (int64_t i = 0; i < out_count * out_length; ++i) {
      const Element element(p.out, unit, i / out_length, i % out_length);
      const int64_t place = p.Place(static_cast<uint32_t>(element.shared * unit));
      CHECK_SHAPE(place < p.data_bytes && shared[place] >= 0);
      moves.Move(shared[place], out + element.offset);
      if (p.out.aligned && i % out_length == 0) CHECK_SHAPE(element.offset % 16 == 0);
    }
  }
}

void Follow(const TransposeShape&, const CopyPlan&, int unit, Moves& moves) {
  for (int64_t byte = 0; !moves.Complete(); byte += unit) moves.Move(byte, byte);
}

// -------------------------------------------------------------------------------------------------
// Limits, which hold for every shape

template <typename Index>
void CheckLimits(const TransposeShape& shape, const RowsPlan<Index>& p) {
  const int64_t per_block =
      p.by_bytes ? kRowsThreads * kChunksPerThread * 16 : kRowsThreads * kUnitsPerThread;
  const int64_t count = static_cast<int64_t>(p.count);
  CHECK_SHAPE(p.blocks * per_block >= count && (p.blocks - 2) * per_block < count);
  if (sizeof(Index) == 4) CHECK_SHAPE(p.blocks * per_block <= kInt + (p.by_bytes ? 1 << 14 : 0));
  CHECK_SHAPE(p.rank >= 2);
  CHECK_SHAPE(p.by_bytes ? p.dims[0].size.divisor >= 16 : true);
}

void CheckLimits(const TransposeShape& shape, const TilePlan& p) {
  CHECK_SHAPE(p.blocks > 0 && p.blocks <= kInt && p.columns > 0 && p.rows > 0);
  CHECK_SHAPE(p.column_dims > 0 && p.row_dims > 0 && p.column_dims + p.row_dims <= p.rank);
  if (p.column_dims > 1) CHECK_SHAPE(p.columns <= kInt);
  if (p.row_dims > 1) CHECK_SHAPE(p.rows <= kInt);
  CHECK_SHAPE(shape.alignment == 16 || !(p.aligned_in || p.aligned_out));
  CHECK_SHAPE(p.blocks % p.tiles.divisor == 0);
  CHECK_SHAPE(p.tiles.divisor % p.band_tiles.divisor == 0 || p.last_band_index > 0);
}

void CheckLimits(const TransposeShape& shape, const BoxPlan& p) {
  CHECK_SHAPE(shape.alignment == 16 || !(p.in.aligned || p.out.aligned));
  CHECK_SHAPE(p.boxes > 0 && p.boxes <= kInt);
  CHECK_SHAPE(p.shared_bytes <= 48 << 10);  // what every device grants
  CHECK_SHAPE(p.table_bytes % 16 == 0 && p.data_bytes % 16 == 0 && p.staged_bytes % 8 == 0);
  CHECK_SHAPE(p.in.run_dims + p.in.segment_dims <= kMaxBoxRank);
  CHECK_SHAPE(p.out.run_dims + p.out.segment_dims <= kMaxBoxRank);
  CHECK_SHAPE(p.in.count * p.in.length.divisor == p.out.count * p.out.length.divisor);
  CHECK_SHAPE(p.table_bytes >= 2 * p.out.count * p.out.pitch);
}

void CheckLimits(const TransposeShape&, const CopyPlan&) {}

void CheckShape(const TransposeShape& shape, bool follow) {
  const TransposePlan plan = PlanTranspose(shape, kProcessors);
  CHECK_SHAPE(plan.unit <= shape.alignment && Bytes(shape) % plan.unit == 0);
  std::visit([&](const auto& kernel) { CheckLimits(shape, kernel); }, plan.kernel);
  if (!follow) return;
  Moves moves(shape, plan.unit);
  std::visit([&](const auto& kernel) { Follow(shape, kernel, plan.unit, moves); }, plan.kernel);
  CHECK_SHAPE(moves.Complete());
}

}  // namespace
}  // namespace jax_fastops

int main() {
  using namespace jax_fastops;
  Random random(1);
  const int64_t sizes[] = {int64_t{1} << 12, int64_t{1} << 20, int64_t{1} << 28, int64_t{1} << 36};
  for (int i = 0; i < kShapes; ++i) CheckShape(RandomShape(random, sizes[i % 4]), false);
  for (int i = 0; i < kShapes / 10; ++i) {
    CheckShape(RandomShape(random, i % 500 == 0 ? 2000000 : i % 20 == 0 ? 50000 : 3000), true);
  }
}
