// What cuDNN reads from memory: lengths without gaps, and one seed for all of its dropout. It also
// sets rows to 0 that cuDNN does not write.
#include <algorithm>

#include "attention/attention.h"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/vec.cuh"
#include "core/philox.h"

namespace jax_fastops::cuda {
struct AttentionFamily;
namespace {

constexpr int kThreads = 256;

struct Params {
  const int32_t *q_lengths, *kv_lengths;  // null: whole
  int64_t batch, copies, queries, keys;
  const uint32_t* seeds;
  int64_t seed_count;
  const int32_t *starts, *counts;
  int64_t segments;
  int64_t batch_stride[4], row_stride[4];  // of the offsets
  Prepared out;
};

__device__ int32_t LengthOf(const int32_t* lengths, int64_t at, int64_t whole) {
  if (lengths == nullptr) return static_cast<int32_t>(whole);
  return static_cast<int32_t>(min(max(int64_t{lengths[at]}, int64_t{0}), whole));
}

// One block.
__global__ void __launch_bounds__(kThreads) PrepareKernel(const __grid_constant__ Params p) {
  if (p.segments > 0) {
    const int64_t sequences = p.batch * p.segments;
    for (int64_t i = threadIdx.x; i <= sequences; i += kThreads) {
      const int64_t b = i / p.segments, at = b * p.copies * p.segments + i % p.segments;
      const bool is_end = i == sequences;
      const int64_t start = is_end ? 0 : LengthOf(p.starts, at, p.queries);
      for (int k = 0; k < 4; ++k) {
        p.out.offsets[k][i] = b * p.batch_stride[k] + start * p.row_stride[k];
      }
      if (!is_end) {
        p.out.q_lengths[i] = p.out.kv_lengths[i] = LengthOf(p.counts, at, p.queries - start);
      }
    }
  } else {
    for (int64_t b = threadIdx.x; b < p.batch; b += kThreads) {
      const int32_t keys = LengthOf(p.kv_lengths, b * p.copies, p.keys);
      // A query without keys gives 0, as a query after the length does.
      p.out.q_lengths[b] = keys == 0 ? 0 : LengthOf(p.q_lengths, b * p.copies, p.queries);
      p.out.kv_lengths[b] = keys;
    }
  }
  if (p.seeds == nullptr) return;
  // Sums of random words, which depend on the seed and the position of each head.
  using Block = RowGroup<kThreads>;
  __shared__ Block::Scratch<uint32_t, 2> scratch;
  uint32_t sum[2] = {0, 0};
  for (int64_t i = threadIdx.x; i < p.seed_count; i += kThreads) {
    const PhiloxWords drawn =
        Philox({{static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), 0, 1}}, p.seeds[2 * i],
               p.seeds[2 * i + 1]);
    for (int word = 0; word < 2; ++word) sum[word] += drawn.word[word];
  }
  int phase = 0;
  Block::AllReduce(Sum(), sum, scratch, phase);
  if (threadIdx.x < 4) p.out.seed[threadIdx.x] = threadIdx.x < 2 ? sum[threadIdx.x] : 0;
}

constexpr int kRowsZeroed = 16;  // by a block

struct ZeroParams {
  // Rows of 16-byte units, such as all heads of a position, and the lengths of the examples.
  struct Array {
    Unit<uint32_t>* data;
    const int32_t* lengths;
    int64_t rows, row_units, row_stride, batch_stride;
  };
  Array arrays[3];
  float* stats;  // [batch, heads, rows] of the first array, or null
  int64_t heads;
};

__global__ void __launch_bounds__(kThreads) ZeroKernel(const __grid_constant__ ZeroParams p) {
  const ZeroParams::Array& array = p.arrays[blockIdx.z];
  const int64_t begin = int64_t{blockIdx.x} * kRowsZeroed;
  const int64_t first = max(begin, int64_t{array.lengths[blockIdx.y]});
  const int64_t count = min(begin + kRowsZeroed, array.rows) - first;
  if (count <= 0) return;
  Unit<uint32_t>* const data =
      array.data + blockIdx.y * array.batch_stride + first * array.row_stride;
  for (int64_t i = threadIdx.x; i < count * array.row_units; i += kThreads) {
    const int64_t row = i / array.row_units;
    Unit<uint32_t>{}.Store(data + row * array.row_stride + i - row * array.row_units);
  }
  if (p.stats == nullptr) return;
  float* const stats = p.stats + blockIdx.y * p.heads * array.rows + first;
  for (int64_t i = threadIdx.x; i < count * p.heads; i += kThreads) {
    stats[i / count * array.rows + i % count] = 0;
  }
}

}  // namespace

Prepared PreparedAt(const AttentionProblem& problem, char* workspace) {
  const int64_t count = problem.sequences();
  Prepared at;
  at.seed = reinterpret_cast<uint32_t*>(workspace);
  char* next = workspace + 16;
  for (int64_t*& offsets : at.offsets) {
    offsets = reinterpret_cast<int64_t*>(next);
    if (problem.segments > 0) next += (count + 1) * sizeof(int64_t);
  }
  at.q_lengths = reinterpret_cast<int32_t*>(next);
  at.kv_lengths = at.q_lengths + count;
  at.bytes = (next - workspace + 2 * count * int64_t{sizeof(int32_t)} + 255) / 256 * 256;
  return at;
}

cudaError_t ZeroRows(const AttentionProblem& problem, const AttentionBuffers& buffers,
                     cudaStream_t stream) {
  const auto array = [&](void* data, int64_t rows, int64_t heads, const AttentionStrides& strides,
                         const int32_t* lengths) {
    return ZeroParams::Array{
        static_cast<Unit<uint32_t>*>(data), lengths,         rows,
        heads * problem.size / 8,           strides.row / 8, strides.batch / 8};
  };
  const Prepared prepared = PreparedAt(problem, buffers.workspace);
  const int32_t *const lengths = prepared.q_lengths, *const kv_lengths = prepared.kv_lengths;
  ZeroParams p = {};
  p.heads = problem.heads;
  int64_t rows = problem.queries;
  unsigned count = 1;
  if (problem.backward) {
    p.arrays[0] = array(buffers.dq, problem.queries, problem.heads, problem.q, lengths);
    p.arrays[1] = array(buffers.dk, problem.keys, problem.kv_heads, problem.k, kv_lengths);
    p.arrays[2] = array(buffers.dv, problem.keys, problem.kv_heads, problem.v, kv_lengths);
    rows = std::max(rows, problem.keys);
    count = 3;
  } else {
    p.arrays[0] = array(buffers.y, problem.queries, problem.heads, problem.y, lengths);
    p.stats = static_cast<float*>(buffers.stats);
  }
  const auto blocks = static_cast<unsigned>((rows + kRowsZeroed - 1) / kRowsZeroed);
  // An axis of a grid other than the first one has at most 65535 blocks.
  constexpr int64_t kMaxBlocks = 65535;
  for (int64_t b = 0; b < problem.batch; b += kMaxBlocks) {
    const dim3 grid(blocks, static_cast<unsigned>(std::min(kMaxBlocks, problem.batch - b)), count);
    const cudaError_t error = Launch(KernelOf<AttentionFamily, ZeroKernel>(),
                                     {.grid = grid, .block = dim3(kThreads)}, stream, p);
    if (error != cudaSuccess) return error;
    for (ZeroParams::Array& each : p.arrays) {
      each.data += kMaxBlocks * each.batch_stride;
      each.lengths += kMaxBlocks;
    }
    if (p.stats != nullptr) p.stats += kMaxBlocks * problem.heads * problem.queries;
  }
  return cudaSuccess;
}

cudaError_t PrepareAttention(const AttentionProblem& problem, const AttentionBuffers& buffers,
                             cudaStream_t stream) {
  Params p;
  p.q_lengths = buffers.q_lengths;
  p.kv_lengths = buffers.kv_lengths;
  p.batch = problem.batch;
  p.copies = buffers.copies;
  p.queries = problem.queries;
  p.keys = problem.keys;
  p.seeds = buffers.seeds;
  p.seed_count = problem.batch * problem.heads;
  p.starts = buffers.starts;
  p.counts = buffers.counts;
  p.segments = problem.segments;
  const AttentionStrides stats = {problem.queries * problem.heads, 1, problem.heads};
  const AttentionStrides* const strides[] = {&problem.q, &problem.k, &problem.y, &stats};
  for (int i = 0; i < 4; ++i) {
    p.batch_stride[i] = strides[i]->batch;
    p.row_stride[i] = strides[i]->row;
  }
  p.out = PreparedAt(problem, buffers.workspace);
  return Launch(KernelOf<AttentionFamily, PrepareKernel>(), {.block = dim3(kThreads)}, stream, p);
}

cudaError_t LoadAttentionKernels() { return LoadKernels<AttentionFamily>(); }

}  // namespace jax_fastops::cuda
