#include <algorithm>
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
// Units and rows

template <typename Index>
UnitsPlan<Index> PlanUnits(const Permutation& p, int64_t alignment, bool rows) {
  const int unit = static_cast<int>(p.unit), pack = UnitsPerWord(unit);
  const int64_t size = rows ? unit : 1;  // of a unit, in what the plan counts
  UnitsPlan<Index> plan;
  plan.rows = rows;
  plan.together = alignment >= pack * unit && p.size[p.rank - 1] % pack == 0;
  plan.count = static_cast<Index>(p.count * size);
  plan.rank = p.rank;
  for (int d = 0; d < p.rank; ++d) {
    const int from = p.rank - 1 - d;
    using Divisor = decltype(plan.dims[d].size);
    // There is no division by the most major dimension, which may be too large for it.
    if (d == 0 || d < p.rank - 1) plan.dims[d].size = Divisor(p.size[from] * (d == 0 ? size : 1));
    plan.dims[d].in_stride = static_cast<Index>(p.in_stride[from] * (d == 0 ? 1 : size));
  }
  // What is written is aligned, so the first and the last chunk, or word, may be in part.
  plan.blocks = rows ? CeilDiv(p.count * unit / kVector + 2, kUnitsThreads * kChunksPerThread)
                     : CeilDiv(p.count + pack - 1, kUnitsThreads * WordsPerThread(unit) * pack);
  return plan;
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

}  // namespace

TransposePlan PlanTranspose(const TransposeShape& shape) {
  constexpr int64_t kNarrow = kLimit - 8192;  // leaves room for the threads of the last block
  Permutation p = Normalize(shape);
  TransposePlan plan;
  plan.unit = static_cast<int>(p.unit);
  if (p.IsCopy()) return plan;
  const bool wide = p.count > kNarrow;
  if (!p.KeepsMinor()) {
    if (const std::optional<TilePlan> tile = PlanTiles(p, shape.alignment)) {
      plan.kernel = *tile;
      return plan;
    }
  } else if (p.size[p.rank - 1] * p.unit >= kVector && (p.unit < kVector || wide)) {
    if (p.count * p.unit > kNarrow) {
      plan.kernel = PlanUnits<uint64_t>(p, shape.alignment, true);
    } else {
      plan.kernel = PlanUnits<uint32_t>(p, shape.alignment, true);
    }
    return plan;
  }
  if (wide) {  // byte by byte: rare, so there is no other kernel
    TransposeShape bytes = shape;
    bytes.alignment = 1;
    p = Normalize(bytes);
    plan.unit = 1;
    plan.kernel = PlanUnits<uint64_t>(p, shape.alignment, false);
  } else {
    plan.kernel = PlanUnits<uint32_t>(p, shape.alignment, false);
  }
  return plan;
}

}  // namespace jax_fastops
