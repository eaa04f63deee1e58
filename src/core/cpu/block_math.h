// For writing block kernels, for the instruction set for which a *_simd.cc file is compiled: loads
// and stores of the arrays of a block. As in simd_math.h, everything is in the anonymous namespace.
#pragma once

#include "core/cpu/block.h"
#include "core/cpu/simd_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// ---- The arrays of a block ----------------------------------------------------------------------

template <typename E>
constexpr bool kHasWide = E::kBytes != SameElement<typename E::A>::kBytes;

template <typename E, typename Extent>
FASTOPS_INLINE Pair<typename E::A> LoadBlock(Extent extent, const BlockArray& array, int64_t i,
                                             int64_t count) {
  return LoadEither<E>(extent, array.data, kHasWide<E> && array.wide, i & array.mask, count);
}

// The same for a backward, with a prefetch of the next block. Nothing is read from memory while
// blocks_cpu.cc sums what the kernel has written, so the prefetch fills that time. A forward sums
// nothing, and would lose. Arrays on the stack are prefetched although they are in the cache,
// because this costs less than a condition.
constexpr int64_t kFetchAhead = 4096;

template <typename E, typename Extent>
FASTOPS_INLINE Pair<typename E::A> LoadBlockAhead(Extent extent, const BlockArray& array, int64_t i,
                                                  int64_t count) {
  if constexpr (Extent::kWhole) {
    FetchBlock<E>(array.data + (i & array.mask) * E::kBytes, kFetchAhead);
  }
  return LoadBlock<E>(extent, array, i, count);
}

// For values to which a mask is then applied. It keeps the compiler from merging a load and a
// select into a masked load, which is several times slower if the line is not in the cache.
template <typename A>
FASTOPS_INLINE Pair<A> Loaded(Pair<A> v) {
#if FASTOPS_ISA_LEVEL == 2
  __asm__("" : "+v"(v.part[0]), "+v"(v.part[1]));
#endif
  return v;
}

template <typename E, typename Extent>
FASTOPS_INLINE void PutBlock(Extent extent, const BlockArray& array, int64_t i, int64_t count,
                             typename E::Raw v) {
  char* const to = array.data + i * E::kBytes;
  if (array.stream) {
    StoreElements<E, true>(extent, to, v, count);
  } else {
    StoreElements<E, false>(extent, to, v, count);
  }
}

// Does nothing for an output that is not requested.
template <typename E, typename Extent>
FASTOPS_INLINE void StoreBlock(Extent extent, const BlockArray& array, int64_t i, int64_t count,
                               Pair<typename E::A> v) {
  using Wide = SameElement<typename E::A>;
  if (array.data == nullptr) return;
  if (array.add) return AddTo(extent, array.data, i & array.mask, count, v);
  if constexpr (kHasWide<E>) {
    if (array.wide) return PutBlock<Wide>(extent, array, i, count, v);
  }
  PutBlock<E>(extent, array, i, count, E::Narrow(v));
}

// The bits of a block. If a block has less than 8 elements, two blocks share a byte.
template <typename E, typename Extent>
FASTOPS_INLINE uint32_t BitsAt(Extent, const void* mask, int64_t i, int64_t count) {
  uint32_t bits = 0;
  if constexpr (Extent::kWhole) count = E::kBlock;
  memcpy(&bits, static_cast<const char*>(mask) + i / 8, static_cast<size_t>((count + 7) / 8));
  if constexpr (E::kBlock < 8) bits >>= i % 8;
  return bits;
}

template <typename E, typename Extent>
FASTOPS_INLINE PairMask<typename E::A> LoadBits(Extent extent, const BlockArray& array, int64_t i,
                                                int64_t count) {
  return PairOfBits<typename E::A>(BitsAt<E>(extent, array.data, i, count));
}

template <typename E, typename Extent>
FASTOPS_INLINE void StoreBits(Extent, const BlockArray& array, int64_t i, int64_t count,
                              PairMask<typename E::A> m) {
  using A = typename E::A;
  if (array.data == nullptr) return;
  uint32_t bits = BitsOfPair<A>(m);
  if constexpr (!Extent::kWhole) bits &= (uint32_t{1} << count) - 1;
  if constexpr (E::kBlock < 8) {
    if (i % 8 != 0) bits = bits << i % 8 | static_cast<uint8_t>(array.data[i / 8]);
  }
  memcpy(array.data + i / 8, &bits, static_cast<size_t>((count + 7) / 8));
}

}  // namespace
}  // namespace jax_fastops::cpu::FASTOPS_ISA
