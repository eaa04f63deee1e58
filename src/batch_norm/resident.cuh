// What batch norm's cooperative kernels share. These kernels keep arrays on the chip between two
// passes over them, with a grid-wide reduction in between.
//
// In memory order, a thread first has some units that it keeps in registers. The others go through
// its ring of slots in shared memory. They are copied asynchronously, so the number of loads in
// flight does not depend on the number of registers. The last units, as many as the ring holds,
// stay there for the second pass. What does not fit is read again, from L2 if it is still there.
//
// The blocks write their partial sums to the workspace. After a grid barrier, each block adds up
// the sums of its own channels, if these are few. Otherwise the first blocks finish the channels,
// and all blocks wait until a counter says that these are done. Threads exchange only sums, so the
// arrays need no barrier.
#ifndef JAX_FASTOPS_BATCH_NORM_RESIDENT_CUH_
#define JAX_FASTOPS_BATCH_NORM_RESIDENT_CUH_

#include <cooperative_groups.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "batch_norm/plan.h"
#include "batch_norm/reduce.cuh"
#include "batch_norm/units.cuh"
#include "core/cuda/async_copy.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/packed.cuh"

namespace jax_fastops::cuda::batch_norm {

template <typename Arrays>
struct ResidentParams {
  Finish finish;
  Arrays arrays;
  double eps;
  double inverse_n;
  bool relu;
  bool aligned_parameters;
  bool plain;  // see ResidentPlan
  bool own;
  int64_t mask_bytes;       // of a group
  const uint8_t* mask_end;  // of all groups
  int32_t slots;            // of a thread's ring
  uint32_t finish_blocks;
};

// A unit of each array that stays on the chip, and the byte of the mask that belongs to it. These
// are raw bits as in memory.
template <typename T, int kArrays>
struct ResidentUnit {
  UnitBits<T> of[kArrays];
  uint32_t bits;
};

// The units of a thread: in registers, in the ring, or still to be read again. Unit j of the ring
// is in slot j % slots. Corresponding words of consecutive threads are adjacent. With a mask, a
// slot also has the 4-byte word of the mask that contains the unit's bits. Asynchronous copies of
// less than 4 bytes do not exist, so each thread that shares a word has its own copy of it.
template <typename T, int kArrays, bool kMask>
class Resident {
 public:
  using Loaded = ResidentUnit<T, kArrays>;
  static constexpr int kWords = UnitBits<T>::kWords;  // of a unit of one array
  static constexpr int kUnitWords = kArrays * kWords;
  static constexpr int kStep =
      kRingStep / kUnitWords;  // units that are copied, and used, at a time
  static constexpr int kKept = kResidentWords / kUnitWords;  // units in registers

  // `ring` is the beginning of the rings of all threads.
  __device__ __forceinline__ Resident(const Geometry& g, const Share& share,
                                      const T* const (&arrays)[kArrays], const uint8_t* mask,
                                      const uint8_t* mask_end, int slots, uint4* ring)
      : g_(g),
        share_(share),
        mask_(mask),
        mask_end_(mask_end),
        ring_(ring + threadIdx.x),
        ring_bits_(reinterpret_cast<uint32_t*>(ring + slots * kUnitWords * kThreads) + threadIdx.x),
        slots_(slots),
        ringed_(max(share.count - kKept, 0)),
        passing_(max(ringed_ - slots, 0)) {
#pragma unroll
    for (int a = 0; a < kArrays; ++a) arrays_[a] = arrays[a];
  }

  // Starts to load.
  __device__ __forceinline__ void Start() {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (k < share_.count) kept_[k] = Load(ElementOf(g_, share_, k));
    }
    // Data that stays on the chip is not read again, so L2 may evict it first.
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once_));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(again_));
#pragma unroll
    for (int k = 0; k < kRingAhead; ++k) Copy();
  }

  // Whether all lanes of the warp have the same number of units, in pairs of lanes whose units are
  // adjacent.
  __device__ __forceinline__ bool together() const {
    return kWords == 2 && g_.run_units % 2 == 0 &&
           __all_sync(kFullWarp, share_.count == __shfl_sync(kFullWarp, share_.count, 0));
  }

  // The first unit, if there is one.
  __device__ __forceinline__ const Loaded& first() const { return kept_[0]; }

  // First pass: calls use(unit) for all units, in order, and between(n) now and then, when it has
  // been called for n units and others follow. `use` may change the units; the second pass sees
  // the changes of those that are in registers.
  template <typename Use, typename Between>
  __device__ __forceinline__ void FirstPass(const Use& use, const Between& between) {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (k < share_.count) use(kept_[k]);
      if (k + 1 < share_.count) between(k + 1);
    }
    int slot = 0;
    for (int used = 0; used < ringed_; used += kStep) {
      AwaitCopies<kRingAhead - 1>();
      if (used > 0) between(used + kKept);
      Loaded units[kStep];
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        if (used + k < ringed_) units[k] = Take(slot, used + k);
        slot = slot + 1 == slots_ ? 0 : slot + 1;
      }
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        if (used + k < ringed_) use(units[k]);
      }
      Copy();
    }
  }

  // Second pass: calls begin(), and then put(unit, other(element), element, kept) for all units;
  // `kept` is a constant that says whether the unit was in registers. It begins with the units that
  // have passed through the ring, in reverse order, because the last ones are the likeliest to be
  // in L2. Their first loads, kRows units, are issued before begin(). All loads of other(element)
  // of a batch are issued together.
  template <int kRows, typename Begin, typename Other, typename Put>
  __device__ __forceinline__ void SecondPass(const Begin& begin, const Other& other,
                                             const Put& put) const {
    using O = decltype(other(int64_t{}));
    struct Both {
      Loaded unit;
      O other;
    };
    Sweep<kRows, Both>(
        passing_, kKept + passing_ - 1, -1,
        [&](int64_t k) {
          const int64_t element = ElementOf(g_, share_, static_cast<int>(k));
          return Both{Load(element), other(element)};
        },
        [&](const Both&) {
          begin();
          PutKept(other, put);
        },
        [&](const Both& both, int64_t k) {
          const int64_t element = ElementOf(g_, share_, static_cast<int>(k));
          put(both.unit, both.other, element, std::false_type());
        },
        [] {});
    int slot = slots_ == 0 ? 0 : passing_ % slots_;
    Sweep<kStep, O>(
        ringed_ - passing_, passing_, 1,
        [&](int64_t j) { return other(ElementOf(g_, share_, kKept + static_cast<int>(j))); },
        [](const O&) {},
        [&](const O& loaded, int64_t j) {
          const Loaded unit = Take(slot, static_cast<int>(j));
          slot = slot + 1 == slots_ ? 0 : slot + 1;
          put(unit, loaded, ElementOf(g_, share_, kKept + static_cast<int>(j)), std::false_type());
        },
        [] {});
  }

  // The group's cut unit. Elements after the cut are 0.
  __device__ __forceinline__ Loaded LoadCut() const {
    const int64_t element = g_.group_size - share_.cut;
    Loaded loaded;
    loaded.bits = MaskByte(mask_, element);
#pragma unroll
    for (int a = 0; a < kArrays; ++a) {
      loaded.of[a] = LoadCutUnit(arrays_[a] + element, share_.cut);
    }
    return loaded;
  }

 private:
  __device__ __forceinline__ Loaded Load(int64_t element) const {
    Loaded loaded;
    loaded.bits = kMask ? mask_[element >> 3] : 0xffu;
#pragma unroll
    for (int a = 0; a < kArrays; ++a) loaded.of[a] = LoadUnit<T, true>(arrays_[a] + element);
    return loaded;
  }

  __device__ __forceinline__ uint4& Word(int slot, int word) const {
    return ring_[(slot * kUnitWords + word) * kThreads];
  }

  // Starts the copies of the next step. A 16-byte word that fills only half of a sector is cached
  // in L1, so that the copy of the other half finds the sector there.
  __device__ __forceinline__ void Copy() {
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      if (copied_ < ringed_) {
        const uint64_t policy = copied_ < passing_ ? again_ : once_;
        const int64_t element = ElementOf(g_, share_, kKept + copied_);
#pragma unroll
        for (int w = 0; w < kUnitWords; ++w) {
          const uint4* const from = reinterpret_cast<const uint4*>(arrays_[w / kWords] + element);
          CopyAsync16<kWords == 1>(&Word(copy_slot_, w), from + w % kWords, policy);
        }
        if constexpr (kMask) CopyBits(&ring_bits_[copy_slot_ * kThreads], mask_ + (element >> 3));
      }
      ++copied_;
      copy_slot_ = copy_slot_ + 1 == slots_ ? 0 : copy_slot_ + 1;
    }
    CommitCopies();
  }

  // Copies the word of the mask that contains `byte`. If the mask ends inside that word, stores
  // only the byte at its position in the word.
  __device__ __forceinline__ void CopyBits(uint32_t* to, const uint8_t* byte) const {
    const uintptr_t at = reinterpret_cast<uintptr_t>(byte) & 3;
    const uint8_t* const word = byte - at;
    if (mask_end_ - word < 4) {
      *to = uint32_t{*byte} << 8 * at;
    } else {
      CopyAsync<4>(to, word);
    }
  }

  // Unit j of the ring.
  __device__ __forceinline__ Loaded Take(int slot, int j) const {
    Loaded loaded;
#pragma unroll
    for (int w = 0; w < kUnitWords; ++w) loaded.of[w / kWords].words[w % kWords] = Word(slot, w);
    loaded.bits = 0xff;
    if constexpr (kMask) {
      const int64_t element = ElementOf(g_, share_, kKept + j);
      const auto byte = reinterpret_cast<uintptr_t>(mask_ + (element >> 3));
      loaded.bits = ring_bits_[slot * kThreads] >> 8 * (byte & 3);
    }
    return loaded;
  }

  template <typename Other, typename Put>
  __device__ __forceinline__ void PutKept(const Other& other, const Put& put) const {
#pragma unroll
    for (int k = 0; k < kKept; k += kStep) {
      decltype(other(int64_t{})) others[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        if (k + i < share_.count) others[i] = other(ElementOf(g_, share_, k + i));
      }
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        if (k + i >= share_.count) continue;
        put(kept_[k + i], others[i], ElementOf(g_, share_, k + i), std::true_type());
      }
    }
  }

  const Geometry& g_;
  const Share& share_;
  const T* arrays_[kArrays];
  const uint8_t* mask_;
  const uint8_t* mask_end_;
  uint4* ring_;
  uint32_t* ring_bits_;
  int slots_;
  int ringed_;   // units that go through the ring
  int passing_;  // those of them that do not stay in it
  int copied_ = 0, copy_slot_ = 0;
  uint64_t once_, again_;  // cache policies
  Loaded kept_[kKept];
};

// Stores units of two words, which are adjacent between neighboring lanes. All lanes of the warp
// must call it. Each pair of lanes exchanges a word, so that each of the two store instructions
// fills the sectors that it touches.
template <typename T>
__device__ __forceinline__ void StorePairs(T* p, const UnitBits<T>& unit) {
  static_assert(UnitBits<T>::kWords == 2);
  const bool odd = threadIdx.x & 1;
  const uint4 mine = odd ? unit.words[1] : unit.words[0];
  const uint4 given = odd ? unit.words[0] : unit.words[1];
  const auto exchange = [](uint32_t word) { return __shfl_xor_sync(kFullWarp, word, 1); };
  const uint4 got = {exchange(given.x), exchange(given.y), exchange(given.z), exchange(given.w)};
  uint4* const first = reinterpret_cast<uint4*>(odd ? p - kUnit : p) + odd;
  __stcs(first, odd ? got : mine);
  __stcs(first + 2, odd ? mine : got);
}

// Stores a unit of the result. `together`: all lanes of the warp store units, adjacent in pairs.
template <typename T>
__device__ __forceinline__ void StoreResident(T* p, const UnitBits<T>& unit, bool together) {
  if constexpr (UnitBits<T>::kWords == 2) {
    if (together) {
      StorePairs(p, unit);
      return;
    }
  }
  StoreUnit<T, true>(p, unit);
}

// -------------------------------------------------------------------------------------------------
// The reduction over the grid

__device__ __forceinline__ void CountRelease(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(__cvta_generic_to_global(counter))
               : "memory");
}

__device__ __forceinline__ uint32_t ReadAcquire(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return value;
}

// From the sums of a thread's channels to two values for each channel of the grid, which
// convert(group, channel, sums, values) makes. Load gives those of a thread's channels. `A` is the
// accumulator type.
template <typename A, typename V>
class GridTotals {
 public:
  template <typename Params>
  __device__ __forceinline__ GridTotals(const Params& p, const Place& place, FoldBuffer<V>& buffer)
      : f_(p.finish),
        place_(place),
        buffer_(buffer),
        finish_blocks_(p.finish_blocks),
        plain_(p.plain),
        own_(p.own) {
    // The counter follows the first group's sums in the workspace.
    counter_ = reinterpret_cast<uint32_t*>(GroupSums<A, V>(f_, 0) + 2 * f_.geometry.plane());
  }

  // Writes the sums to the workspace.
  __device__ __forceinline__ void Write(const Pair<V> (&sums)[kUnit]) const {
    if (blockIdx.x == 0 && threadIdx.x == 0) *counter_ = 0;
    V* const workspace = GroupSums<A, V>(f_, place_.group);
    if (f_.geometry.run_units > 0) {
      FoldChannel(f_.geometry, place_, sums, buffer_, workspace);
    } else if (plain_) {
      FoldPlain(f_.geometry, place_, sums, buffer_, workspace);
    } else {
      Fold(f_.geometry, place_, sums, buffer_, workspace);
    }
  }

  // All threads of the grid must call it. `meanwhile()` is called during the wait, if there is one.
  template <typename Convert, typename Meanwhile>
  __device__ __forceinline__ void Find(const Convert& convert, const Meanwhile& meanwhile) const {
    cooperative_groups::this_grid().sync();
    if (own_) {
      OwnTotals(f_, place_, buffer_.warps, totals(), convert);
      meanwhile();  // first, it would take registers that OwnTotals needs
    } else {
      if (blockIdx.x < finish_blocks_) {
        auto& buffer = *reinterpret_cast<FinishBuffer<V>*>(&buffer_);
        FinishChannels<A>(f_, buffer, convert, [] {});
        __syncthreads();
        if (threadIdx.x == 0) CountRelease(counter_);
      }
      meanwhile();
      if (threadIdx.x == 0) {
        while (ReadAcquire(counter_) < finish_blocks_) {
        }
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void Load(const UnitChannels& channels, const Share& share,
                                       A (&first)[kUnit], A (&second)[kUnit]) const {
    const Geometry& g = f_.geometry;
    if (own_) {
      const UnitChannels slots = UnitChannels::OfSlots(g, place_, share);
      slots.Load(totals(), first);
      slots.Load(totals() + g.slots, second);
    } else {
      // Load adds the offset of a group that has one value per channel.
      const int64_t offset = place_.group * (f_.out_stride - g.channels);
      channels.Load(static_cast<const A*>(f_.out[0]) + offset, first);
      channels.Load(static_cast<const A*>(f_.out[1]) + offset, second);
    }
  }

 private:
  static_assert(sizeof(FinishBuffer<V>) <= sizeof(FoldBuffer<V>));
  static_assert(2 * kMaxOwnEntries * sizeof(A) <= sizeof(FoldBuffer<V>::value));

  __device__ __forceinline__ A* totals() const { return reinterpret_cast<A*>(&buffer_); }

  const Finish& f_;
  const Place& place_;
  FoldBuffer<V>& buffer_;
  uint32_t* counter_;
  uint32_t finish_blocks_;
  bool plain_, own_;
};

// -------------------------------------------------------------------------------------------------
// Host

inline cudaError_t GetResidentDevice(ResidentDevice* resident) {
  Device device;
  const cudaError_t error = CurrentDevice(&device);
  *resident = {device.processors, device.shared_per_block, device.shared_per_processor,
               device.cooperative};
  return error;
}

// Launches a cooperative kernel. The caller sets eps, relu and aligned_parameters of the
// parameters, and the outputs in the plan.
template <typename Arrays>
cudaError_t LaunchResident(void (*kernel)(ResidentParams<Arrays>), const BatchNormShape& shape,
                           const ResidentPlan& plan, const Arrays& arrays,
                           ResidentParams<Arrays>* p, cudaStream_t stream) {
  p->finish = plan.finish;
  p->finish.workspace = arrays.workspace;
  p->arrays = arrays;
  p->inverse_n = 1 / plan.finish.n;
  p->plain = plan.plain;
  p->own = plan.own;
  p->mask_bytes = shape.mask_bytes();
  p->mask_end = arrays.mask == nullptr
                    ? nullptr
                    : static_cast<const uint8_t*>(arrays.mask) + shape.groups * p->mask_bytes;
  p->slots = plan.slots;
  p->finish_blocks = plan.finish_blocks;
  return Launch(kernel,
                {.grid = dim3(plan.blocks),
                 .block = dim3(kThreads),
                 .shared = static_cast<size_t>(plan.shared_bytes),
                 .cooperative = true},
                stream, *p);
}

}  // namespace jax_fastops::cuda::batch_norm

#endif  // JAX_FASTOPS_BATCH_NORM_RESIDENT_CUH_
