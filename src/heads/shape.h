// The shapes of the attention head ops, shared by the backends.
#pragma once

#include <cstdint>

namespace jax_fastops {

// Merged: x[batch, sequence, parts, heads, head_size], dense.
// Split:  parts arrays y[batch, heads, sequence, head_size], dense.
// A bias is [parts, heads, head_size], dense.
struct HeadsShape {
  int64_t batch;
  int64_t sequence;
  int64_t parts;  // 1, or 3 for queries, keys and values
  int64_t heads;
  int64_t head_size;

  int64_t features() const { return parts * heads * head_size; }
  int64_t size() const { return batch * sequence * features(); }
};

inline constexpr int kMaxHeadParts = 3;

// How the bias gradient is summed: partial sums[batch, groups, subgroups, features]. The sequence
// is split into `groups` runs of equal length, and each of them into `subgroups` runs of
// ceil(length / subgroups) rows. The last run may be shorter, or empty: its sums are then 0.
struct HeadsSums {
  int64_t groups;
  int64_t subgroups;
};

}  // namespace jax_fastops
