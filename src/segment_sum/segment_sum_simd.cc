// The inner loops of segment_sum_cpu.cc.
#include "segment_sum/segment_sum_simd.h"

#include "core/cpu/block_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

template <typename E>
struct SegmentSum {
  using Wide = SameElement<typename E::A>;

  static void Add(const SegmentSumRows& p) {
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t segment = p.ids[row * p.id_step] - p.first;
      if (segment < 0 || segment >= p.segments) continue;
      const char* const x = p.x + row * p.x_step;
      char* const sums = p.sums + segment * p.sums_step;
      OverBlocks<E::kBlock>(0, p.n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
        AddTo(extent, sums, i, count, LoadElements<E>(extent, x + i * E::kBytes, count));
      });
    }
  }

  static void Round(const char* sums, int64_t n, char* y) {
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const auto v = LoadElements<Wide>(extent, sums + i * Wide::kBytes, count);
      StoreElements<E, false>(extent, y + i * E::kBytes, E::Narrow(v), count);
    });
  }

  static constexpr SegmentSumKernels kKernels = {Add, Round};
};

}  // namespace

const SegmentSumKernels segment_sum_kernels[] = FASTOPS_EACH_DTYPE(SegmentSum, kKernels);

}  // namespace jax_fastops::cpu::FASTOPS_ISA
