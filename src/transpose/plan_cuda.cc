#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/integer.h"
#include "transpose/plan.h"

namespace jax_fastops {
namespace {

constexpr int64_t kLimit = 0x7fffffff;
constexpr int kVector = 16;  // bytes of the widest access

using Dims = std::vector<int>;  // dimensions of a Permutation, minor to major

bool Has(const Dims& dims, int d) { return std::find(dims.begin(), dims.end(), d) != dims.end(); }

Dims OutputOrder(const Permutation& p) {
  Dims order(p.rank);
  for (int i = 0; i < p.rank; ++i) order[i] = p.rank - 1 - i;
  return order;
}

Dims InputOrder(const Permutation& p) {
  Dims order = OutputOrder(p);
  std::sort(order.begin(), order.end(),
            [&p](int a, int b) { return p.in_stride[a] < p.in_stride[b]; });
  return order;
}

FastDivisor Divisor(int64_t d) { return FastDivisor(static_cast<uint32_t>(d)); }

// -------------------------------------------------------------------------------------------------
// Rows

template <typename Index>
RowsPlan<Index> PlanRows(const Permutation& p) {
  RowsPlan<Index> rows;
  rows.by_bytes = p.unit < kVector;
  const int64_t size = rows.by_bytes ? p.unit : 1;  // of a unit, in what the plan counts
  const int64_t bytes = rows.by_bytes ? 1 : p.unit;
  rows.count = static_cast<Index>(p.count * size);
  rows.rank = p.rank;
  for (int d = 0; d < p.rank; ++d) {
    const int from = p.rank - 1 - d;
    using Divisor = decltype(rows.dims[d].size);
    // There is no division by the most major dimension, which may be too large for it.
    if (d == 0 || d < p.rank - 1) rows.dims[d].size = Divisor(p.size[from] * (d == 0 ? size : 1));
    rows.dims[d].in_stride = d == 0 ? bytes : p.in_stride[from] * p.unit;
  }
  // The chunks of the output are aligned, so the first and the last one may be in part.
  rows.blocks = rows.by_bytes
                    ? CeilDiv(p.count * size / kVector + 2, kRowsThreads * kChunksPerThread)
                    : CeilDiv(p.count, kRowsThreads * kUnitsPerThread);
  return rows;
}

// -------------------------------------------------------------------------------------------------
// Tiles

// One side of the matrix of tiles: elements that are contiguous in one of the arrays.
struct Run {
  const Dims& order;  // of the dimensions in that array
  int64_t tile;
  Dims dims = {};
  int64_t size = 1;

  // What partial tiles cost.
  double Waste() const {
    return static_cast<double>(RoundUp(size, tile)) / static_cast<double>(size);
  }
  // Takes the next dimension.
  void Grow(const Permutation& p) {
    dims.push_back(order[dims.size()]);
    size *= p.size[dims.back()];
  }
  bool CanGrow(const Permutation& p, const Run& other) const {
    if (dims.size() == order.size()) return false;
    const int next = order[dims.size()];
    return !Has(other.dims, next) && size * p.size[next] <= kLimit;
  }
};

// No plan if the runs need the same dimension.
std::optional<TilePlan> PlanTiles(const Permutation& p, int64_t alignment) {
  const int element = static_cast<int>(p.unit);
  const Dims in_order = InputOrder(p), out_order = OutputOrder(p);
  Run columns{in_order, TileColumns(element)}, rows{out_order, TileRows(element)};
  columns.Grow(p);
  rows.Grow(p);
  // A run is long enough if less than 5% of its tiles is wasted. The run that wastes more takes the
  // next dimension first.
  for (;;) {
    const double column_waste = columns.CanGrow(p, rows) ? columns.Waste() : 0;
    const double row_waste = rows.CanGrow(p, columns) ? rows.Waste() : 0;
    if (std::max(column_waste, row_waste) < 1.05) break;
    (column_waste >= row_waste ? columns : rows).Grow(p);
  }
  if (columns.Waste() * rows.Waste() > 1.34) return std::nullopt;

  TilePlan tile;
  tile.columns = columns.size;
  tile.rows = rows.size;
  tile.column_dims = static_cast<int>(columns.dims.size());
  tile.row_dims = static_cast<int>(rows.dims.size());
  Dims dims = columns.dims;
  dims.insert(dims.end(), rows.dims.begin(), rows.dims.end());
  int64_t matrices = 1;
  for (const int d : out_order) {
    if (Has(dims, d)) continue;
    dims.push_back(d);
    matrices *= p.size[d];
  }
  tile.rank = p.rank;
  // Wide accesses need every row, or column, to begin and end at a multiple of 16 bytes.
  const int64_t vector = kVector / element;
  tile.aligned_in = alignment == kVector && columns.size % vector == 0;
  tile.aligned_out = alignment == kVector && rows.size % vector == 0;
  for (int i = 0; i < p.rank; ++i) {
    const int d = dims[i];
    // There is no division by a dimension of 2^31 elements: a run that has it has no other.
    tile.dims[i] = {Divisor(std::min(p.size[d], kLimit)), p.in_stride[d] * p.unit,
                    p.out_stride[d] * p.unit};
    if (!Has(columns.dims, d) && p.in_stride[d] % vector != 0) tile.aligned_in = false;
    if (!Has(rows.dims, d) && p.out_stride[d] % vector != 0) tile.aligned_out = false;
  }

  const int64_t down = CeilDiv(rows.size, rows.tile), along = CeilDiv(columns.size, columns.tile);
  const int64_t band = std::min<int64_t>(down, 32), bands = CeilDiv(down, band);
  tile.blocks = matrices * down * along;
  if (tile.blocks > kLimit) return std::nullopt;
  tile.tiles = Divisor(down * along);
  tile.band_tiles = Divisor(band * along);
  tile.band = Divisor(band);
  tile.last_band = Divisor(down - (bands - 1) * band);
  tile.last_band_index = static_cast<uint32_t>(bands - 1);
  return tile;
}

// -------------------------------------------------------------------------------------------------
// Boxes

// The size of a dimension's parts: a multiple of 32 or a power of two.
int64_t RoundPart(int64_t part) {
  return part >= 32 ? part / 32 * 32
                    : static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(part)));
}

// The box's extent in every dimension, at most `most` elements in total: runs of equal length in
// the input and the output, as long as they fit.
std::vector<int64_t> BoxExtent(const Permutation& p, int64_t most) {
  std::vector<int64_t> extent(p.rank);
  for (int64_t target = most;; target /= 2) {
    std::fill(extent.begin(), extent.end(), 1);
    for (const Dims& order : {InputOrder(p), OutputOrder(p)}) {
      int64_t run = 1;
      for (const int d : order) {
        int64_t part = std::min(p.size[d], CeilDiv(target, run));
        if (part < p.size[d]) part = RoundPart(part);
        extent[d] = std::max(extent[d], part);
        run *= extent[d];
        if (extent[d] < p.size[d] || run >= target) break;
      }
    }
    int64_t volume = 1;
    for (const int64_t size : extent) volume = std::min(volume * size, int64_t{1} << 40);
    if (volume <= most) return extent;
  }
}

// The dimensions of a box in the order of one side: those of a segment, then those that number the
// segments.
struct Order {
  Dims dims;
  size_t run = 0;  // the number of dimensions of a segment
  int part = -1;   // the one of them that is in part

  Order(const Permutation& p, const Dims& all, const std::vector<int64_t>& extent) {
    for (size_t i = 0; i < all.size() && part < 0 && extent[all[i]] > 1; ++i) {
      dims.push_back(all[i]);
      if (extent[all[i]] < p.size[all[i]]) part = all[i];
    }
    run = dims.size();
  }
  // Puts the other side's partial dimension last.
  void NumberSegments(const Dims& all, const std::vector<int64_t>& extent, int other_part) {
    for (const int d : all) {
      if (extent[d] > 1 && d != other_part && !Has(dims, d)) dims.push_back(d);
    }
    if (other_part >= 0 && !Has(dims, other_part)) dims.push_back(other_part);
  }
};

// `shared_stride` of the dimensions is set by the first call, for the input: a box in shared memory
// has the order of the input.
BoxSide MakeSide(const Permutation& p, const Order& order, const std::vector<int64_t>& extent,
                 const int64_t* strides, int64_t alignment, std::vector<uint32_t>* shared_stride) {
  const int64_t vector = kVector / p.unit;
  int64_t length = 1;
  for (size_t i = 0; i < order.run; ++i) length *= extent[order.dims[i]];
  BoxSide side;
  side.length = Divisor(length);
  side.chunks = Divisor(CeilDiv(length, vector));
  side.pitch = static_cast<uint32_t>(RoundUp(length, vector));
  side.count = 1;
  side.run_dims = static_cast<int>(order.run);
  side.segment_dims = static_cast<int>(order.dims.size() - order.run);
  side.aligned = alignment == kVector;
  uint32_t before = 1;
  for (size_t i = 0; i < order.dims.size(); ++i) {
    const int d = order.dims[i];
    if (i == order.run) before = side.pitch;
    uint32_t& shared = (*shared_stride)[d];
    if (shared == 0) shared = before;
    side.dims[i] = {Divisor(extent[d]), FastDivisor(before), shared, strides[d] * p.unit};
    before *= static_cast<uint32_t>(extent[d]);
    if (i < order.run) continue;
    side.count *= static_cast<uint32_t>(extent[d]);
    side.last_offset += (extent[d] - 1) * side.dims[i].stride;
    if (side.dims[i].stride % kVector != 0) side.aligned = false;
  }
  return side;
}

// Sets the padding. The 32 lanes of a warp gather neighboring chunks of the output, element by
// element, so lane l reads at l times some distance. Chunks are stored 16 bytes at a time, so
// distances are multiples of 16 bytes, which are four banks. The lanes reach eight different groups
// of four banks if the distance is an odd number of chunks. One chunk of padding after each power
// of two bytes makes it odd, if that power divides the distance. A distance that is odd needs no
// padding. There, each group of eight lanes begins with another word of its chunks: if those are an
// odd number of words apart, no two lanes meet in a bank.
void SetLayout(int element, BoxPlan* box) {
  const BoxSide& out = box->out;
  const uint32_t vector = kVector / element;
  int shift = 31;
  for (uint32_t lane = 1; lane < 32; lane *= 2) {
    uint32_t segment = lane / out.chunks.divisor, within = lane % out.chunks.divisor * vector;
    uint32_t distance = 0;
    for (int d = 0; d < out.run_dims + out.segment_dims; ++d) {
      uint32_t& index = d < out.run_dims ? within : segment;
      distance += index % out.dims[d].size.divisor * out.dims[d].shared_stride;
      index /= out.dims[d].size.divisor;
    }
    distance *= static_cast<uint32_t>(element);
    if (distance > 0 && distance % kVector == 0) {
      shift = std::min(shift, std::countr_zero(distance));
    }
  }
  box->turned = shift == 4 && element <= 2 && out.dims[0].shared_stride % 2 == 1;
  // For distances of 32 and 64 bytes, padding every 128 bytes reaches all groups in turn.
  box->pad_shift = static_cast<uint32_t>(shift == 4 ? 31 : shift < 31 ? std::max(shift, 7) : 7);
}

BoxPlan PlanBoxes(const Permutation& p, int64_t alignment, int processors) {
  const int element = static_cast<int>(p.unit);
  const Dims in_order = InputOrder(p), out_order = OutputOrder(p);
  // Each block makes its own table, so a small array has smaller boxes, several for each block.
  // With 2 bytes, larger boxes are faster nevertheless.
  int64_t box_bytes = element <= 2 ? 8192 : 16384;
  const double per_block =
      static_cast<double>(p.count * p.unit / box_bytes) / (processors * kBoxBlocks);
  if (element != 2 && per_block < 2.5) box_bytes /= 2;
  const std::vector<int64_t> extent = BoxExtent(p, box_bytes / element);

  Order in(p, in_order, extent), out(p, out_order, extent);
  in.NumberSegments(in_order, extent, out.part);
  out.NumberSegments(out_order, extent, in.part);
  BoxPlan box;
  box.bytes = p.count * p.unit;
  std::vector<uint32_t> shared_stride(p.rank);
  box.in = MakeSide(p, in, extent, p.in_stride, alignment, &shared_stride);
  box.out = MakeSide(p, out, extent, p.out_stride, alignment, &shared_stride);
  SetLayout(element, &box);

  box.boxes = 1;
  bool aligned = box.out.aligned && box.out.length.divisor * element % kVector == 0;
  for (const int d : out_order) {
    const int64_t size = CeilDiv(p.size[d], extent[d]);
    if (size == 1) continue;
    const BoxPart part = {box.rank, static_cast<uint32_t>(extent[d]), p.size[d]};
    if (d == in.part) box.in_part = part;
    if (d == out.part) box.out_part = part;
    MovedDim& dim = box.dims[box.rank++];
    dim = {Divisor(size), p.in_stride[d] * extent[d] * p.unit,
           p.out_stride[d] * extent[d] * p.unit};
    if (dim.out_stride % kVector != 0) aligned = false;
    box.boxes *= size;
  }

  const uint32_t entries = box.out.count * box.out.pitch;
  box.table_bytes = static_cast<uint32_t>(RoundUp(entries * 2, kVector));
  box.data_bytes = box.Place(box.in.count * box.in.pitch * element) / kVector * kVector + 32;
  // The few boxes at the end may be unaligned although the others are aligned.
  box.staged_bytes = aligned || element >= 4 ? 0 : entries * element + kVector;
  box.shared_bytes =
      box.table_bytes + box.data_bytes + box.staged_bytes + 8 * (box.in.count + box.out.count);
  return box;
}

}  // namespace

TransposePlan PlanTranspose(const TransposeShape& shape, int processors) {
  const Permutation p = Normalize(shape);
  TransposePlan plan;
  plan.unit = static_cast<int>(p.unit);
  if (p.IsCopy()) return plan;
  if (p.KeepsMinor() && p.size[p.rank - 1] * p.unit >= kVector) {
    // Leaves room for the threads of the last block.
    const int64_t count = p.unit < kVector ? p.count * p.unit : p.count;
    if (count > kLimit - 4096) {
      plan.kernel = PlanRows<uint64_t>(p);
    } else {
      plan.kernel = PlanRows<uint32_t>(p);
    }
    return plan;
  }
  if (!p.KeepsMinor()) {
    if (const std::optional<TilePlan> tile = PlanTiles(p, shape.alignment)) {
      plan.kernel = *tile;
      return plan;
    }
  }
  plan.kernel = PlanBoxes(p, shape.alignment, processors);
  return plan;
}

}  // namespace jax_fastops
