// The launch plan of an element-wise backward over broadcast operands, computed on the host from
// the shape. elementwise/backward.cuh describes the kernel.
//
// The outer dimensions (all but the innermost one) are sorted into two sets, A and B, so that a sum
// of columns keeps all dimensions of A or none, and no dimension of B. A block loops over indices
// of A, and for each of them over indices of B. A sum ends with each index of A, or with the block.
// If a sum of columns keeps A and another one keeps B, the pass is crossed: the block has several
// indices of A in flight for each index of B.
#ifndef JAX_FASTOPS_ELEMENTWISE_PLAN_H_
#define JAX_FASTOPS_ELEMENTWISE_PLAN_H_

#include <cstdint>

#include "elementwise/broadcast.h"

namespace jax_fastops {

inline constexpr int kMaxSums = 3;
inline constexpr int kBackwardThreads = 256;  // maximum per block
inline constexpr int kBackwardRows = 4;       // in flight
inline constexpr int kBackwardTable = 256;    // rows whose offsets a block holds

enum class SumKind : uint8_t {
  kNone,     // not requested
  kFull,     // has the result's shape: written, not summed
  kColumns,  // keeps the innermost dimension; lanes add up their columns
  kLoop,     // summed along rows; lanes add up their elements of many rows
  kRows,     // summed along rows; one sum for each row
};

// A gradient for the planner.
struct GradientShape {
  bool wanted = false;
  int array = 0;     // of the shape: the gradient
  int operand = -1;  // of the shape: the operand that the backward reads; -1: none
};

// The sums of a gradient: [parts][A][B][columns], without the dimensions that are summed before.
struct SumPlan {
  SumKind kind = SumKind::kNone;
  bool keeps_a = false, keeps_b = false;  // has an index for each index of A, of B
  bool complete = true;                   // the sums are the gradient
  int64_t parts = 1;
  int64_t plane = 0;                       // distance between parts
  int64_t offset = 0;                      // partial sums: in the workspace
  int64_t stride[kMaxBroadcastRank] = {};  // along the plan's dimensions
};

struct BackwardPlan {
  bool valid = false;
  int dims[kMaxBroadcastRank] = {};  // of A, then of B; each major to minor
  int rank_a = 0, rank = 0;
  int64_t length_a = 1, length_b = 1;
  int columns = 0;  // bit g: gradient g is a sum of columns, or its operand is kept in registers
  bool crossed = false;  // the second sum of columns keeps B
  bool over_a = false;   // the groups of a block take different indices of A
  int lanes = 1;         // that take a row, or a strip or segment of it
  int threads = kBackwardThreads;
  int64_t strips = 1;    // of a row, taken by different blocks
  int64_t segments = 1;  // of a row, taken one after another
  int64_t classes = 1;   // a block takes every classes-th row, with units at the same columns
  int64_t boxes_a = 1, boxes_b = 1;  // blocks that share A, and B
  int slots = 0;                     // crossed: indices of B of a thread
  SumPlan sum[kMaxSums];
  int64_t workspace = 0;  // elements used

  int groups() const { return threads / lanes; }
  int64_t blocks() const { return strips * classes * boxes_a * boxes_b; }
};

struct BackwardLimits {
  int unit = 1;         // elements that a lane loads at once
  int columns = 2;      // sums of columns in a pass
  bool crossed = true;  // whether there are kernels for crossed passes
  int slots = 1;        // crossed: indices of B of a thread, at most
  int64_t workspace = 0;
  int processors = 1;
  int blocks = 1;  // resident on a processor
};

// The plan is not valid if the sums cannot share a pass. With units of one element, a single sum
// always has a plan.
BackwardPlan PlanBackward(const BroadcastShape& shape, const GradientShape* gradients, int count,
                          const BackwardLimits& limits);

// How the second kernel adds up partial sums. Dimensions are merged where strides allow it.
struct FinishPlan {
  static constexpr int kMaxRank = kMaxBroadcastRank + 1;
  int kept = 0, added = 0;  // ranks
  int64_t kept_size[kMaxRank], kept_stride[kMaxRank], out_stride[kMaxRank];
  int64_t added_size[kMaxRank], added_stride[kMaxRank];
  int64_t elements = 1, terms = 1;
};
FinishPlan PlanFinish(const BroadcastShape& shape, const BackwardPlan& plan, const SumPlan& sum,
                      int array);

// The shape with rows in which every array has adjacent elements, or one element. If that does not
// hold (a mask with one bit per byte; copies of an operand along a dimension of size 1), rows of
// one element are appended. False if there is no room for another dimension.
bool WithRows(const BroadcastShape& shape, BroadcastShape* with_rows);

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_ELEMENTWISE_PLAN_H_
