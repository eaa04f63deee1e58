// Chooses the kernel and the launch parameters of a window sum.
//
// All kernels are bound by memory: x is read once and y is written once. Along the last axis, a row
// is cut into tiles. Along another axis, blocks move along the axis in strips of columns. Windows
// that do not fit on the chip in either way are summed from a tree in the workspace.
#include "window_sum/window_sum_cuda.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/cuda/load_kernels.h"
#include "core/fast_divide.h"
#include "window_sum/columns.cuh"
#include "window_sum/long.cuh"
#include "window_sum/rows.cuh"
#include "window_sum/warps.cuh"

namespace jax_fastops::cuda {
namespace window_sum {
namespace {

constexpr int64_t kMaxGrid = std::numeric_limits<int32_t>::max();
constexpr int64_t kDirectAxis = 64;       // axes up to this length are summed directly
constexpr int64_t kShiftedBytes = 256;    // per row; with more, the words at its ends matter little
constexpr int kSharedPerBlock = 1 << 10;  // shared memory that the device reserves for each block

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Run {
  WindowSumShape shape;
  const void* x;
  void* y;
  void* workspace;
  int processors;
  int shared;  // the shared memory that a block may have
  cudaStream_t stream;
};

template <typename Params>
cudaError_t Launch(void (*kernel)(Params), Params params, int64_t blocks, dim3 threads,
                   int64_t shared_bytes, cudaStream_t stream) {
  void* arguments[] = {&params};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                          dim3(static_cast<unsigned>(std::min(blocks, kMaxGrid))), threads,
                          arguments, static_cast<size_t>(shared_bytes), stream);
}

// ---- Short axes ---------------------------------------------------------------------------------

template <typename T, int kBytes>
cudaError_t LaunchDirect(const Run& run) {
  constexpr int64_t kSize = kBytes / static_cast<int64_t>(sizeof(T));
  const WindowSumShape& s = run.shape;
  const int64_t units = s.inner / kSize, total = s.outer * s.m() * units;
  const DirectParams params = {static_cast<const char*>(run.x),
                               static_cast<char*>(run.y),
                               s.n,
                               units,
                               s.m(),
                               s.pad,
                               s.window(),
                               total};
  return Launch(DirectKernel<T, kBytes>, params, CeilDiv(total, 256), dim3(256), 0, run.stream);
}

// ---- The last axis ------------------------------------------------------------------------------

// Whether windows are short enough for WarpsKernel.
template <typename T>
bool OfWarps(const WindowSumShape& s) {
  constexpr int64_t kSize = 16 / sizeof(T);
  return s.window() - 1 <= (kWarpsShares + 1) * 32 * kSize &&
         s.n + 2 * s.window() < kWarpsLongest &&
         s.outer * CeilDiv(s.m() + kSize, 32 * kSize) < kMaxGrid - kWarpsThreads;
}

template <typename T>
cudaError_t LaunchWarps(const Run& run) {
  constexpr int64_t kElement = sizeof(T), kSize = 16 / kElement;
  const WindowSumShape& s = run.shape;
  const intptr_t x = reinterpret_cast<intptr_t>(run.x), y = reinterpret_cast<intptr_t>(run.y);
  // A row of y may begin and end within a unit.
  const bool whole = (y | (s.m() * kElement)) % 16 == 0;
  const int64_t chunks = CeilDiv(s.m() + (whole ? 0 : kSize - 1), 32 * kSize);
  const int64_t total = s.outer * chunks;

  WarpsParams params;
  params.x.begin = static_cast<const char*>(run.x);
  params.x.end = params.x.begin + s.outer * s.n * kElement;
  params.y = static_cast<char*>(run.y);
  params.n = s.n;
  params.m = s.m();
  params.pad = static_cast<int>(s.pad);
  params.window = static_cast<int>(s.window());
  params.log_lanes = 0;
  while (params.log_lanes < 5 && (kSize << (params.log_lanes + 1)) < params.window) {
    ++params.log_lanes;
  }
  params.chunks = FastDivisor(static_cast<uint32_t>(chunks));
  params.total = static_cast<uint32_t>(total);
  const auto launch = [&](auto kernel) {
    const int64_t blocks = CeilDiv(total, kWarpsThreads / 32 * kWarpsUnits);
    return Launch(kernel, params, blocks, dim3(kWarpsThreads), 0, run.stream);
  };
  if (s.window() <= kSize + 1) {
    return launch(WarpsKernel<T, WarpsKind::kNear>);
  }
  const bool aligned = (x - y - s.pad * kElement) % 16 == 0 &&
                       (s.n - s.m()) * (s.outer > 1) * kElement % 16 == 0 &&
                       2 * s.radius % kSize == 0;
  return aligned ? launch(WarpsKernel<T, WarpsKind::kAligned>)
                 : launch(WarpsKernel<T, WarpsKind::kShifted>);
}

template <typename T>
cudaError_t LaunchRows(const Run& run) {
  constexpr int kSize = 16 / sizeof(T), kUnits = kRowUnits<T>;
  const WindowSumShape& s = run.shape;
  RowsParams params;
  params.x = static_cast<const char*>(run.x);
  params.y = static_cast<char*>(run.y);
  params.rows = s.outer;
  params.n = s.n;
  params.m = s.m();
  params.pad = s.pad;
  params.window = static_cast<int>(s.window());
  params.log_lanes = 0;
  while (params.log_lanes < 5 && (kSize << (params.log_lanes + 1)) < params.window) {
    ++params.log_lanes;
  }
  const int64_t halo = CeilDiv(params.window - 1, kSize);
  const int64_t most = kRowThreads * kUnits - halo;         // units of y in a tile
  const int64_t units = CeilDiv(s.m() + kSize - 1, kSize);  // y may begin within one
  // Enough tiles for every SM, if they are long compared with the part that is read twice.
  const int64_t wanted =
      std::min(CeilDiv(2 * run.processors, s.outer), units / std::max<int64_t>(64, 4 * halo));
  const int64_t fewest = std::max(CeilDiv(units, most), wanted);
  // From this number of tiles, searches for the one that leaves the fewest threads idle: threads
  // without units, and threads for which an SM has no whole block.
  int threads = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t tiles = fewest; tiles < fewest + 16; ++tiles) {
    const int64_t tile_units = CeilDiv(units, tiles);
    const int of_tile = static_cast<int>(32 * CeilDiv(tile_units + halo, 32 * kUnits));
    const int of_block = std::max(1, kRowThreads / 2 / of_tile) * of_tile;
    const int fit = kRowResident / of_block * of_block;
    const double cost = static_cast<double>(tiles * of_tile) / fit;
    if (cost < least) {
      least = cost;
      threads = of_tile;
      params.tile_units = static_cast<int>(tile_units);
    }
  }
  params.halo_units = static_cast<int>(halo);
  const int64_t tiles = CeilDiv(units, params.tile_units);
  params.tiles = FastDivisor64(static_cast<uint64_t>(tiles));

  int64_t rows = kRowThreads / 2 / threads;  // tiles per block
  rows = std::max<int64_t>(1, std::min(rows, s.outer * tiles / run.processors));
  return Launch(RowsKernel<T>, params, CeilDiv(s.outer * tiles, rows),
                dim3(threads, static_cast<unsigned>(rows)), rows * RowShared<T>(threads),
                run.stream);
}

// ---- Other axes ---------------------------------------------------------------------------------

template <typename T, int kBytes, bool kShifted = false>
cudaError_t LaunchColumns(const Run& run) {
  using A = ComputeType<T>;
  constexpr int64_t kSize = kBytes / static_cast<int64_t>(sizeof(T));
  constexpr int kRows = kColumnRows<kBytes>;
  const WindowSumShape& s = run.shape;
  const int64_t units = kShifted ? CeilDiv(s.inner + kSize - 1, kSize) : s.inner / kSize;
  int log_width = kBytes == 16 && !kShifted ? 3 : 4;
  const auto step = [&] { return (kColumnThreads >> log_width) * kRows; };
  const auto shared = [&] {
    return (s.window() - 1 + step()) * (kSize << log_width) * static_cast<int64_t>(sizeof(A));
  };
  // As wide as fits twice on an SM. If only one block fits, it narrows down to a sector of memory.
  const int of_two = run.shared / 2 - kSharedPerBlock;
  while (log_width > 0 && shared() > ((kBytes << log_width) > 32 ? of_two : run.shared)) {
    --log_width;
  }
  while (log_width > 0 && int64_t{1} << (log_width - 1) >= units) --log_width;
  if (kShifted && log_width == 0) return LaunchColumns<T, sizeof(T)>(run);
  if (shared() > run.shared) return cudaErrorInvalidConfiguration;

  ColumnsParams params;
  params.x = static_cast<const char*>(run.x);
  params.array = {params.x, params.x + s.outer * s.n * s.inner * static_cast<int64_t>(sizeof(T))};
  params.y = static_cast<char*>(run.y);
  params.n = s.n;
  params.inner = s.inner;
  params.m = s.m();
  params.pad = s.pad;
  params.window = static_cast<int>(s.window());
  params.log_width = log_width;
  params.log_group = 0;
  while ((1 << (log_width + params.log_group + 1)) <= 32 &&
         (kRows << (params.log_group + 1)) < params.window) {
    ++params.log_group;
  }
  params.ring = static_cast<int>(s.window() - 1 + step());

  // A segment reads a window before its first sum, but too few blocks leave SMs idle.
  const int64_t strips = CeilDiv(units, (int64_t{1} << log_width) - (kShifted ? 1 : 0));
  const int64_t lines = s.outer * strips;
  const int64_t resident =
      run.processors *
      std::min<int64_t>(kColumnBlocks<T, kBytes, kShifted>,
                        std::max<int64_t>(1, run.shared / (shared() + kSharedPerBlock)));
  int64_t best = 1;
  double least = std::numeric_limits<double>::infinity();
  const int64_t most = std::min<int64_t>(256, CeilDiv(s.m(), step()));
  for (int64_t segments = 1; segments <= most; ++segments) {
    const double waves = static_cast<double>(CeilDiv(lines * segments, resident));
    const double cost =
        waves * static_cast<double>(CeilDiv(s.m(), segments) + s.window() - 1 + step() / 2);
    if (cost < least) {
      least = cost;
      best = segments;
    }
  }
  params.segment = CeilDiv(s.m(), best);
  const int64_t segments = CeilDiv(s.m(), params.segment);
  params.strips = FastDivisor64(static_cast<uint64_t>(strips));
  params.segments = FastDivisor64(static_cast<uint64_t>(segments));
  params.blocks = lines * segments;
  return Launch(ColumnsKernel<T, kBytes, kShifted>, params, params.blocks, dim3(kColumnThreads),
                shared(), run.stream);
}

// ---- Long windows -------------------------------------------------------------------------------

template <typename In, typename A>
cudaError_t LaunchTreeLevel(const void* x, void* y, int64_t outer, int64_t below, int64_t above,
                            int64_t inner, cudaStream_t stream) {
  const In* from = static_cast<const In*>(x);
  A* to = static_cast<A*>(y);
  void* arguments[] = {&from, &to, &outer, &below, &above, &inner};
  const int64_t blocks = std::min(CeilDiv(outer * above * inner, 256), kMaxGrid);
  return cudaLaunchKernel(reinterpret_cast<const void*>(TreeLevelKernel<In, A>),
                          dim3(static_cast<unsigned>(blocks)), dim3(256), arguments, 0, stream);
}

template <typename T>
cudaError_t LaunchTree(const Run& run) {
  using A = ComputeType<T>;
  const WindowSumShape& s = run.shape;
  TreeParams params = {};
  params.x = static_cast<const char*>(run.x);
  params.y = static_cast<char*>(run.y);
  params.outer = s.outer;
  params.n = s.n;
  params.inner = s.inner;
  params.m = s.m();
  params.pad = s.pad;
  params.window = s.window();
  params.count[0] = s.n;
  // All levels have about n / 15 nodes, less than n / 8 if n > kWindowSumShortAxis.
  A* free = static_cast<A*>(run.workspace);
  while (free != nullptr && s.n > kWindowSumShortAxis && params.count[params.levels] > kTreeFan) {
    const int level = params.levels + 1;
    const int64_t below = params.count[level - 1], above = CeilDiv(below, kTreeFan);
    const cudaError_t error =
        level == 1 ? LaunchTreeLevel<T, A>(run.x, free, s.outer, below, above, s.inner, run.stream)
                   : LaunchTreeLevel<A, A>(params.sums[level - 1], free, s.outer, below, above,
                                           s.inner, run.stream);
    if (error != cudaSuccess) return error;
    params.count[level] = above;
    params.sums[level] = free;
    params.levels = level;
    free += s.outer * above * s.inner;
  }
  const int64_t threads = s.outer * CeilDiv(s.m(), kTreeFan) * s.inner;
  return Launch(TreeKernel<T>, params, CeilDiv(threads, 256), dim3(256), 0, run.stream);
}

// ---- All ----------------------------------------------------------------------------------------

// The widest unit of inner elements, at least kBytes, to which all addresses are aligned.
template <typename T, template <typename, int> class F, int kBytes = 16>
cudaError_t OfUnit(const Run& run) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(run.x) | reinterpret_cast<uintptr_t>(run.y) |
                        static_cast<uintptr_t>(run.shape.inner) * sizeof(T);
  if (all % 16 == 0) return F<T, 16>()(run);
  if constexpr (sizeof(T) < 4) {
    if (all % 4 == 0) return F<T, 4>()(run);
  }
  return F<T, sizeof(T)>()(run);
}

template <typename T, int kBytes>
struct Direct {
  cudaError_t operator()(const Run& run) const { return LaunchDirect<T, kBytes>(run); }
};
template <typename T, int kBytes>
struct Columns {
  cudaError_t operator()(const Run& run) const {
    if (kBytes < 16 && run.shape.inner >= kShiftedBytes / static_cast<int64_t>(sizeof(T))) {
      return LaunchColumns<T, 16, true>(run);
    }
    return LaunchColumns<T, kBytes>(run);
  }
};

template <typename T>
cudaError_t OfType(const Run& run) {
  const WindowSumShape& s = run.shape;
  if (s.radius == 0) {
    return cudaMemcpyAsync(run.y, run.x, static_cast<size_t>(s.outer * s.n * s.inner) * sizeof(T),
                           cudaMemcpyDeviceToDevice, run.stream);
  }
  if (s.n <= kDirectAxis) return OfUnit<T, Direct>(run);
  if (s.window() > kWindowSumLongWindow) return LaunchTree<T>(run);
  if (s.inner > 1) return OfUnit<T, Columns>(run);
  return OfWarps<T>(s) ? LaunchWarps<T>(run) : LaunchRows<T>(run);
}

// The shared memory that a block may have.
cudaError_t SharedLimit(int* bytes) {
  int device;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

template <typename T, typename Load>
void LoadType(int shared_limit, const Load& load) {
  using A = ComputeType<T>;
  constexpr int kNarrow = sizeof(T) < 4 ? 4 : sizeof(T);
  load(reinterpret_cast<const void*>(DirectKernel<T, 16>));
  load(reinterpret_cast<const void*>(DirectKernel<T, kNarrow>));
  load(reinterpret_cast<const void*>(DirectKernel<T, sizeof(T)>));
  load(reinterpret_cast<const void*>(WarpsKernel<T, WarpsKind::kNear>));
  load(reinterpret_cast<const void*>(WarpsKernel<T, WarpsKind::kAligned>));
  load(reinterpret_cast<const void*>(WarpsKernel<T, WarpsKind::kShifted>));
  load(reinterpret_cast<const void*>(TreeLevelKernel<T, A>));
  load(reinterpret_cast<const void*>(TreeLevelKernel<A, A>));
  load(reinterpret_cast<const void*>(TreeKernel<T>));
  const void* shared[] = {reinterpret_cast<const void*>(RowsKernel<T>),
                          reinterpret_cast<const void*>(ColumnsKernel<T, 16>),
                          reinterpret_cast<const void*>(ColumnsKernel<T, 16, true>),
                          reinterpret_cast<const void*>(ColumnsKernel<T, kNarrow>),
                          reinterpret_cast<const void*>(ColumnsKernel<T, sizeof(T)>)};
  for (const void* kernel : shared) {
    load(kernel);
    load.Check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit));
  }
}

}  // namespace
}  // namespace window_sum

cudaError_t WindowSum(const WindowSumShape& shape, DType dtype, const void* x, void* y,
                      void* workspace, cudaStream_t stream) {
  if (shape.outer * shape.inner == 0 || shape.m() <= 0) return cudaSuccess;
  window_sum::Run run = {shape, x, y, workspace, 0, 0, stream};
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&run.processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = window_sum::SharedLimit(&run.shared);
  if (error != cudaSuccess) return error;
  switch (dtype) {
    case DType::kF32:
      return window_sum::OfType<float>(run);
    case DType::kBF16:
      return window_sum::OfType<__nv_bfloat16>(run);
    case DType::kF16:
      return window_sum::OfType<__half>(run);
    case DType::kF64:
      return window_sum::OfType<double>(run);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LoadWindowSumKernels() {
  static KernelLoader loader;
  return loader.Load([](const auto& load) {
    int shared = 0;
    load.Check(window_sum::SharedLimit(&shared));
    window_sum::LoadType<float>(shared, load);
    window_sum::LoadType<__nv_bfloat16>(shared, load);
    window_sum::LoadType<__half>(shared, load);
    window_sum::LoadType<double>(shared, load);
  });
}

}  // namespace jax_fastops::cuda
