// The random bits of dropout: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
// 2, 3"), on the host and on the device. jax_fastops/_random.py says the same in jax.numpy.
//
// A row of elements has a seed of four words: its position (the low and the high word), and the two
// words of the key. Eight elements are a block, and take the 128 bits of one call with
//
//   counter = (block in the row, position low, position high, 0), key = (key 0, key 1).
//
// Element i of the block takes the 16 bits of output word i / 2 that begin at bit 16 * (i % 2), and
// is kept if they are at most `largest`, the threshold minus 1.
#pragma once

#include <stdint.h>

namespace jax_fastops {

// No arrays: the device does not have the host's.
inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxStep0 = 0x9E3779B9, kPhiloxStep1 = 0xBB67AE85;
inline constexpr int kPhiloxRounds = 10;
inline constexpr int kSeedWords = 4, kSeedBlock = 8;  // words of a seed, elements of a block

struct PhiloxWords {
  uint32_t word[4];
};

// The seeds of the rows of an array. If `counted`, `words` are the two words of the key, and row i
// has the position `first` + i. Otherwise there are four words for each row.
struct RowSeeds {
  const uint32_t* words = nullptr;  // null: none
  bool counted = false;
  int64_t first = 0;

  constexpr RowSeeds From(int64_t row) const {
    if (words == nullptr) return {};
    return counted ? RowSeeds{words, true, first + row} : RowSeeds{words + row * kSeedWords};
  }

  // Always inline, for core/cpu/isa.h.
  __attribute__((always_inline)) constexpr PhiloxWords At(int64_t row) const {
    if (counted) {
      const uint64_t position = static_cast<uint64_t>(first + row);
      return {{static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), words[0],
               words[1]}};
    }
    const uint32_t* const seed = words + row * kSeedWords;
    return {{seed[0], seed[1], seed[2], seed[3]}};
  }
};

// Dropout of rows. Elements whose random bits are at most `largest` are kept and multiplied by
// `scale`.
struct RowDropout {
  RowSeeds seeds;  // no words: no dropout
  uint32_t largest = 0;
  double scale = 1;

  __attribute__((always_inline)) constexpr bool drops() const { return seeds.words != nullptr; }
};

constexpr PhiloxWords Philox(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxMultiplier0} * c0;
    const uint64_t p1 = uint64_t{kPhiloxMultiplier1} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(p0);
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  return {{c0, c1, c2, c3}};
}

// The bits of a block of the row that has this seed.
constexpr PhiloxWords RandomBits(PhiloxWords seed, uint32_t block) {
  return Philox({{block, seed.word[0], seed.word[1], 0}}, seed.word[2], seed.word[3]);
}

constexpr bool IsKept(const PhiloxWords& bits, int element, uint32_t largest) {
  const uint32_t word = bits.word[element / 2];
  return element % 2 == 0 ? (word & 0xffffu) <= largest : word <= (largest << 16 | 0xffffu);
}

}  // namespace jax_fastops
