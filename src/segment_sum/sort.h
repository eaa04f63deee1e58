// A stable sort of the ids of rows, for the sums by segment on CUDA: a radix sort of only the bits
// that the number of segments has.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_fastops::cuda {

struct SegmentSortCall {
  int64_t lists, rows, segments;
  const int32_t* ids;  // lists x rows
  void* keys;          // lists x rows: ids in ascending order; those of no segment are `segments`
  int key_bytes;       // 2: uint16, 4: int32
  int32_t* order;      // lists x rows: where in the list each of the keys was

  int64_t bits;    // of a digit: 3 to 10
  int64_t tile;    // rows of a block: a multiple of 256, at most 4096
  uint32_t* work;  // lists x work_size. Only if a list has more rows than a tile
  int64_t work_size;
};

cudaError_t SegmentSort(const SegmentSortCall& call, cudaStream_t stream);

cudaError_t LoadSegmentSortKernels();

}  // namespace jax_fastops::cuda
