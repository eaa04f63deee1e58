// Property tests of planners: random shapes, and a check that says which shape failed.
//
//   int main() {
//     Random random(1);
//     for (int i = 0; i < kShapes; ++i) {
//       const Shape shape = {.rows = random.Size(1 << 20), ...};
//       const Plan plan = MakePlan(shape, device);
//       CHECK(plan.blocks > 0, "rows %lld", (long long)shape.rows);
//     }
//   }
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

inline constexpr int kShapes = 100000;

// Ends the program with the condition, its place, and a formatted description of the case.
#define CHECK(condition, ...)                                                       \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: %s is false: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                            \
      std::fprintf(stderr, "\n");                                                   \
      std::exit(1);                                                                 \
    }                                                                               \
  } while (false)

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  // From 0 to n - 1, each equally likely.
  int64_t Below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(engine_); }

  bool Coin() { return Below(2) == 1; }

  // A size from 1 to `most`, log-uniform. Half of them are near a multiple of a power of two, where
  // planners change their minds.
  int64_t Size(int64_t most) {
    std::uniform_real_distribution<double> log(0.0, std::log(static_cast<double>(most) + 1));
    int64_t size = static_cast<int64_t>(std::exp(log(engine_)));
    if (Coin()) {
      const int64_t step = int64_t{1} << Below(13);
      size = size / step * step + Below(3) - 1;
    }
    return size < 1 ? 1 : size > most ? most : size;
  }

 private:
  std::mt19937_64 engine_;
};
