// A ring of slots in shared memory, between one thread that fills it by copies and groups of
// threads that read it. All of them go through the slots in the same order. Only for compute
// capability 9.0 and later.
#pragma once

#include "core/cuda/async_copy.cuh"

namespace jax_fastops::cuda {

template <int kSlots>
class Ring {
 public:
  static constexpr int kBytes = 2 * kSlots * sizeof(Barrier);  // of its memory

  explicit __device__ __forceinline__ Ring(void* memory)
      : full_(static_cast<Barrier*>(memory)), empty_(full_ + kSlots) {}

  // One thread calls it. The block's barrier follows. `readers` threads free each slot.
  __device__ __forceinline__ void Init(int readers) {
    for (int i = 0; i < kSlots; ++i) {
      full_[i].Init(1);
      empty_[i].Init(readers);
    }
    Barrier::PublishInit();
  }

  // This thread's place.
  __device__ __forceinline__ int slot() const { return slot_; }
  __device__ __forceinline__ void Advance(int slots) {
    slot_ += slots;
    while (slot_ >= kSlots) {
      slot_ -= kSlots;
      parity_ ^= 1;
    }
  }

  // Waits until the slot is free. Copies of so many bytes must count on the result.
  __device__ __forceinline__ Barrier* Fill(int bytes) {
    empty_[slot_].Wait<true>(parity_ ^ 1);
    full_[slot_].ArriveAndExpect(bytes);
    return full_ + slot_;
  }

  // Waits until the slot is filled. What came into this slot before was waited for, by this thread
  // or another one: rounds differ by their parity only.
  __device__ __forceinline__ void AwaitFilled() { full_[slot_].Wait<true>(parity_); }
  __device__ __forceinline__ void Free(int slot) { empty_[slot].Arrive(); }

 private:
  Barrier *full_, *empty_;
  int slot_ = 0, parity_ = 0;
};

}  // namespace jax_fastops::cuda
