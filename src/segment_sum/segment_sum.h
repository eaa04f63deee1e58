// Sums of rows by segment, on raw pointers: y[s] is the sum of the rows x[r] whose id is s, in the
// accumulator's type (double for double, otherwise float), rounded once. A row whose id is not
// from 0 to segments - 1 is in no sum. A segment without rows has the sum 0. Sums are added up in
// an order that depends only on ids and shapes, so they have the same bits in every run.
//
// CUDA takes ids in ascending order: row i of the sum is row order[i] of x. The CPU takes ids in
// any order, and no `order`. Pointers need only the alignment of an element.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/broadcast.h"
#include "core/dtype.h"
#include "core/integer.h"

namespace jax_fastops {

struct SegmentSumCall {
  DType dtype;
  bool wide;  // y has the accumulator's type
  // x is batch x rows x columns, y batch x segments x columns.
  int64_t batch, rows, columns, segments;
  const void* x;
  void* y;

  // The ids of an index of the batch begin at FirstId and are `step` elements apart.
  const void* ids;
  int id_bytes;  // 4: int32. 2, on CUDA only: uint16
  int64_t step;
  BroadcastShape of_batch;  // ids may be the same along dimensions of the batch

  // CUDA only.
  const int32_t* order;  // with the steps of ids; null if rows are in the order of their ids
  int64_t tile;          // rows and segments that a group of threads takes, together
  void* parts;           // batch x tiles x 3 x columns, in the accumulator's type
  int64_t tiles;
};

constexpr int64_t FirstId(const SegmentSumCall& call, int64_t batch) {
  int64_t lists = 0;
  for (int d = call.of_batch.rank - 1; d >= 0; --d) {
    const int64_t size = call.of_batch.size[d];
    lists += batch % size * call.of_batch.stride[0][d];
    batch /= size;
  }
  return lists * call.rows * call.step;
}

}  // namespace jax_fastops

namespace jax_fastops::FASTOPS_BACKEND {

Status SegmentSum(const SegmentSumCall& call, Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadSegmentSumKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND
