// What the batch norm kernels share: loads and stores of units of 8 elements, the loop over a
// thread's units, the parameters of a unit's channels, and the launch of elementwise kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>

#include "batch_norm/geometry.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/math.cuh"
#include "core/cuda/relu_of.cuh"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda::batch_norm {

// Resident blocks per SM. The number limits the registers of a thread. Three blocks keep enough
// loads in flight, and the accumulators still fit into registers.
template <typename T>
inline constexpr int kBlocksPerProcessor = sizeof(T) == 8 ? 2 : 3;

// Units that a thread loads before it uses the first of them. 64 bytes per thread, over all arrays,
// keep enough loads in flight.
template <typename T, int kArrays>
inline constexpr int kInFlight =
    64 / (kUnit * sizeof(T) * kArrays) > 0 ? 64 / (kUnit * int{sizeof(T)} * kArrays) : 1;

template <typename T>
using UnitVec = Vec<T, kUnit * sizeof(T)>;

// A unit of a 16-bit type is one 16-byte access. Units of wider types take several accesses to the
// same sectors; the first one leaves the sectors in L1 for the others.
template <typename T, bool kAligned>
__device__ __forceinline__ UnitVec<T> LoadUnit(const T* p) {
  if constexpr (kAligned) {
    constexpr bool kOne = sizeof(T) == 2;
    return UnitVec<T>::template Load<kOne ? CacheHint::kNoAllocate : CacheHint::kReadOnly>(p);
  } else {
    return UnitVec<T>::LoadElements(p, [](int) { return true; });
  }
}

// Loads the first `cut` elements of a partial unit and sets the others to 0.
template <typename T>
__device__ __forceinline__ UnitVec<T> LoadCutUnit(const T* p, int cut) {
  return UnitVec<T>::LoadElements(p, [&](int i) { return i < cut; });
}

// Uses streaming stores unless the next kernel reads the array, so that written data does not evict
// from L2 what is still to be read.
template <typename T, bool kAligned, bool kReadNext = false>
__device__ __forceinline__ void StoreUnit(T* p, const UnitVec<T>& unit) {
  if constexpr (kAligned) {
    unit.template Store<kReadNext ? CacheHint::kDefault : CacheHint::kStreaming>(p);
  } else {
    unit.StoreElements(p, [](int) { return true; });
  }
}

template <typename T>
__device__ __forceinline__ void StoreCutUnit(T* p, const UnitVec<T>& unit, int cut) {
  unit.StoreElements(p, [&](int i) { return i < cut; });
}

// Adds the elements of two units and rounds the sums.
template <typename T>
__device__ __forceinline__ UnitVec<T> AddUnits(const UnitVec<T>& a, const UnitVec<T>& b) {
  ComputeType<T> values[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) values[i] = ToCompute(a[i]) + ToCompute(b[i]);
  return UnitVec<T>::Packed(values);
}

// The array from element `offset`, or null if the array is null.
template <typename T, typename Array>
__device__ __forceinline__ T* PartOf(Array* array, int64_t offset) {
  return array == nullptr ? nullptr : static_cast<T*>(array) + offset;
}

// The loop over a thread's units. It calls load(element) for every unit and then use(loaded,
// element), both in order and kRows units at a time. `begin(loaded)` is called once, after the
// first loads have been issued, so that its own waiting overlaps with theirs. It is called even if
// the thread has no units; `loaded` is uninitialized then. `between()` is called each time the
// loads of a later batch have been issued.
template <int kRows, typename Loaded, typename Load, typename Begin, typename Use, typename Between>
__device__ __forceinline__ void Sweep(int count, int64_t first, int64_t stride, const Load& load,
                                      const Begin& begin, const Use& use, const Between& between) {
  Loaded loaded[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (k < count) loaded[k] = load(first + k * stride);
  }
  begin(loaded[0]);
  while (count > 0) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (k < count) use(loaded[k], first + k * stride);
    }
    count -= kRows;
    first += kRows * stride;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (k < count) loaded[k] = load(first + k * stride);
    }
    if (count > 0) between();
  }
}

// Sweeps from the last unit to the first. The previous kernel has read in ascending order, so the
// end of the array is still in L2.
template <int kRows, typename Loaded, typename Load, typename Begin, typename Use>
__device__ __forceinline__ void SweepBack(const Share& share, const Load& load, const Begin& begin,
                                          const Use& use) {
  Sweep<kRows, Loaded>(share.count, share.first + (share.count - 1) * share.stride, -share.stride,
                       load, begin, use, [] {});
}

// The channels of the elements in a thread's unit.
class UnitChannels {
 public:
  __device__ __forceinline__ UnitChannels(const Geometry& g, const Place& place, const Share& share,
                                          bool aligned)
      : channels_(g.channels) {
    const int64_t run = DividePosition(g, share.position, g.inner);
    const int64_t channel = run - DividePosition(g, run, g.channels) * g.channels;
    const int64_t left = (run + 1) * g.inner - share.position;
    base_ = place.group * g.channels;
    channel_ = channel;
    left_ = static_cast<int>(left < kUnit ? left : kUnit);
    inner_ = static_cast<int>(g.inner < kUnit ? g.inner : kUnit);
    vector_ = aligned && g.inner == 1 && g.channels % kUnit == 0;
  }

  // Loads a parameter for each element of the unit. With inner == 1, neighboring lanes read 32
  // bytes apart, and the time of an access is proportional to the cache lines that it touches.
  // Vectorized loads keep the number of accesses small where alignment allows them.
  template <typename A>
  __device__ __forceinline__ void Load(const A* parameter, A (&values)[kUnit]) const {
    const A* const p = parameter + base_;
    if (vector_) {
#pragma unroll
      for (int i = 0; i < kUnit; i += Unit<A>::kSize) {
        const Unit<A> word = LoadWord(p + channel_ + i);
#pragma unroll
        for (int k = 0; k < word.kSize; ++k) values[i + k] = word[k];
      }
    } else {
      Gather([&](int64_t channel) { return p[channel]; }, values);
    }
  }

  // As Load, with the value `instead` if the parameter is null.
  template <typename A>
  __device__ __forceinline__ void LoadOr(const A* parameter, A instead, A (&values)[kUnit]) const {
    if (parameter != nullptr) {
      Load(parameter, values);
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) values[i] = instead;
    }
  }

  // Sets values[i] to get(channel of element i).
  template <typename Get, typename V>
  __device__ __forceinline__ void Gather(const Get& get, V (&values)[kUnit]) const {
    if (inner_ == kUnit) {  // at most two channels
      const V here = get(channel_);
      const V next = left_ < kUnit ? get(channel_ + 1 == channels_ ? 0 : channel_ + 1) : here;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) values[i] = i < left_ ? here : next;
    } else {
      int64_t channel = channel_;
      int left = left_;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        values[i] = get(channel);
        if (--left == 0) {
          left = inner_;
          channel = channel + 1 == channels_ ? 0 : channel + 1;
        }
      }
    }
  }

 private:
  int64_t channels_, base_, channel_;
  int left_, inner_;  // elements of the first channel's run, and of later runs
  bool vector_;
};

// A byte of the mask. Without a mask all bits are set.
__device__ __forceinline__ uint32_t MaskByte(const uint8_t* mask, int64_t element) {
  return mask != nullptr ? mask[element >> 3] : 0xffu;
}

// The unit of the result. Elements at `size` and after get no mask bit. `residual` is used if
// `add`.
template <typename T>
__device__ __forceinline__ UnitVec<T> ApplyUnit(const UnitVec<T>& x, bool add,
                                                const UnitVec<T>& residual,
                                                const ComputeType<T> (&mean)[kUnit],
                                                const ComputeType<T> (&factor)[kUnit],
                                                const ComputeType<T> (&bias)[kUnit], bool relu,
                                                uint8_t* mask, int64_t element, int size) {
  ComputeType<T> values[kUnit];
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    values[i] = fma(ToCompute(x[i]) - mean[i], factor[i], bias[i]);
    if (add) values[i] += ToCompute(residual[i]);
    if (values[i] > 0) bits |= 1u << i;
  }
  if (mask != nullptr) mask[element >> 3] = static_cast<uint8_t>(bits & 0xffu >> (kUnit - size));
  if (relu) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) values[i] = ReluOf(values[i]);
  }
  return UnitVec<T>::Packed(values);
}

// a * g + b * (x - mean) + c
template <typename T>
__device__ __forceinline__ UnitVec<T> GradientUnit(const UnitVec<T>& x, const UnitVec<T>& g,
                                                   const ComputeType<T> (&mean)[kUnit],
                                                   const ComputeType<T> (&a)[kUnit],
                                                   const ComputeType<T> (&b)[kUnit],
                                                   const ComputeType<T> (&c)[kUnit]) {
  ComputeType<T> values[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    const ComputeType<T> sum = fma(ToCompute(x[i]) - mean[i], b[i], c[i]);
    values[i] = fma(a[i], ToCompute(g[i]), sum);
  }
  return UnitVec<T>::Packed(values);
}

// Parameters of the kernels that are not cooperative.
struct ElementParams {
  Geometry geometry;
  BatchNormCall call;
  bool aligned_parameters;
  int64_t mask_bytes;  // of a group
};

// -------------------------------------------------------------------------------------------------
// Host

inline bool IsEmpty(const BatchNormShape& shape) { return shape.groups * shape.group_size() == 0; }

inline unsigned BlocksOf(const BatchNormShape& shape, const Geometry& g) {
  return static_cast<unsigned>(g.tiles * g.parts * shape.groups);
}

inline bool IsAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <typename... Pointers>
bool AreAligned(Pointers... pointers) {
  return (IsAligned(pointers) && ...);
}

// Whether all groups of these arrays are aligned to 16 bytes.
template <typename... Pointers>
bool AreGroupsAligned(const BatchNormCall& call, Pointers... arrays) {
  const int64_t bytes = call.shape.group_size() * static_cast<int64_t>(DTypeSize(call.dtype));
  return AreAligned(arrays...) && (call.shape.groups == 1 || bytes % 16 == 0);
}

// Launches an elementwise kernel (one without sums) as a dependent. An SM runs `resident` of its
// blocks at once. The caller sets everything in `params` except the geometry.
template <typename Params>
cudaError_t LaunchMap(void (*kernel)(Params), int resident, Params* params, cudaStream_t stream) {
  const BatchNormShape& shape = params->call.shape;
  Device device;
  const cudaError_t error = CurrentDevice(&device);
  if (error != cudaSuccess) return error;
  const BlockWish wish = {int64_t{device.processors} * resident, 2,
                          std::numeric_limits<int64_t>::max()};
  if (!MakeGeometry(shape, wish, &params->geometry)) return cudaErrorInvalidConfiguration;
  const unsigned blocks = BlocksOf(shape, params->geometry);
  return Launch(kernel, {.grid = dim3(blocks), .block = dim3(kThreads), .dependent = true}, stream,
                *params);
}

}  // namespace jax_fastops::cuda::batch_norm
