// Group norm on raw pointers. An array has `samples` samples of [outer, groups, channels, inner]
// elements: channels are last if inner is 1, and first if outer is 1. With s = x + residual, the
// mean and the biased variance of the elements of each group of each sample,
//   xhat = (s - mean) * rstd, rstd = 1 / sqrt(variance + eps), y = activation(xhat * scale + bias)
//
// Everything is computed in the accumulator's type (double for double, otherwise float), and
// rounded once; s is rounded to the type of x first. Statistics and gradients of parameters have
// the accumulator's type, parameters either type. Pointers need only the alignment of an element;
// outputs must not overlap inputs. Samples must have elements.
#pragma once

#include <cstdint>

#include "core/activation.h"
#include "core/backend.h"
#include "core/dtype.h"

namespace jax_fastops {

// The channels of a group, at most.
inline constexpr int64_t kMaxGroupChannels = 2048;

struct GroupNormParameter {
  const void* data = nullptr;  // [groups, channels], or null
  bool wide = false;           // of the accumulator's type
};

struct GroupNormCall {
  int64_t samples, outer, groups, channels, inner;
  DType dtype;
  bool active;  // with an activation
  Activation activation;
  GroupNormParameter scale, bias;
  // CUDA: `workspace_size` accumulators for each sample.
  void* workspace;
  int64_t workspace_size;

  int64_t all_channels() const { return groups * channels; }
  int64_t positions() const { return outer * inner; }
  int64_t sample_size() const { return all_channels() * positions(); }
};

struct GroupNormForwardCall : GroupNormCall {
  double eps;
  const void *x, *residual;  // the residual may be null
  void* y;
  void *sum, *mean, *rstd;  // s; [samples, groups]. Each may be null
};

struct GroupNormBackwardCall : GroupNormCall {
  const void *dy, *s, *mean, *rstd;
  void* dx;
  void *dscale, *dbias;  // of each sample: [samples, groups, channels]. Each may be null
};

}  // namespace jax_fastops

namespace jax_fastops::FASTOPS_BACKEND {

Status GroupNormForward(const GroupNormForwardCall& call, Queue queue);
Status GroupNormBackward(const GroupNormBackwardCall& call, Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadGroupNormKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND
