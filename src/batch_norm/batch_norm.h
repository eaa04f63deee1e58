// Batch norm on raw pointers. batch_norm/shape.h defines what is computed.
//
// Results are the same bits in every run. Pointers need only the alignment of an element; outputs
// must not overlap inputs. Empty arrays succeed and nothing is written. Some CUDA kernels are
// programmatic dependent launches: they may start while the preceding kernel of the stream still
// runs, and wait for it themselves (core/cuda/dependent.cuh).
#pragma once

#include "batch_norm/shape.h"
#include "core/backend.h"

namespace jax_fastops::FASTOPS_BACKEND {

// mean = sum(x) / n and var = sum((x - mean)^2) / n with n = outer * inner.
Status BatchNormStatistics(const BatchNormCall& call, Queue queue);

// z = (x - mean) * (rsqrt(var + eps) * scale) + bias + residual, y = relu(z) or z. Computed in the
// accumulator type and rounded once. relu keeps NaN. Stores the mask if it is requested.
Status BatchNormApply(const BatchNormCall& call, Queue queue);

// Statistics and result together.
Status BatchNormForward(const BatchNormCall& call, Queue queue);

// With g = dy + dy2 where the mask is set, otherwise 0 (selected, not multiplied), the averages
//   sums[0] = sum(g) / n,  sums[1] = sum(g * (x - mean)) / n
// of each channel. g is rounded to the type of x: if y has two users, dy and dy2 are their
// cotangents, which JAX would add in that type. The same pass writes dresidual = g, and, if dx is
// requested, the gradient for given statistics, dx = g * rsqrt(var + eps) * scale.
Status BatchNormSums(const BatchNormCall& call, Queue queue);

// With g = dy where the mask is set, otherwise 0 (selected), and a = rsqrt(var + eps) * scale:
//   dx = a * (g - sums[0] - (x - mean) * sums[1] / (var + eps)) + dmean + 2 * dvar * (x - mean)
// dmean and dvar are the cotangents of the statistics divided by n. If BatchNormSums has written g,
// then g is passed as dy, without a mask.
Status BatchNormBackward(const BatchNormCall& call, Queue queue);

// Sums and dx together, without dy2 and dresidual. The sums are a result.
Status BatchNormGradient(const BatchNormCall& call, Queue queue);

#ifdef FASTOPS_CUDA
struct BatchNormKernels;  // the family of KernelOf
#endif
Status LoadBatchNormKernels();  // CUDA only: loads the kernels on the current device

}  // namespace jax_fastops::FASTOPS_BACKEND
