// Every call of softmax asks for a plan that its workspace and its mask allow.
#include <algorithm>
#include <cstdint>

#include "core/integer.h"
#include "property.h"
#include "softmax/requests.h"

using namespace jax_fastops;
using namespace jax_fastops::cuda::softmax;

namespace {

// An H100, a device without clusters, and a small one.
constexpr HeldLimits kDevices[] = {{132, 230400, 16}, {108, 164864, 1}, {46, 99328, 1}};

struct Call {
  SoftmaxShape shape;
  SoftmaxMask mask;
  Addresses at;
  int itemsize, inputs;
  bool dropout;
};

Call RandomCall(Random& random) {
  Call call = {};
  call.itemsize = 2 << random.Below(3);
  call.inputs = 1 + random.Coin();
  call.dropout = random.Below(8) == 0;
  const int64_t elements = int64_t{1} << random.Below(36);
  call.shape.n = random.Size(elements);
  const int64_t rows = std::max<int64_t>(1, elements / call.shape.n);
  call.shape.inner = random.Coin() ? 1 : random.Size(rows);
  call.shape.outer = random.Size(std::max<int64_t>(1, rows / call.shape.inner));
  const int64_t at = random.Coin() ? 0 : random.Below(16 / call.itemsize) * call.itemsize;
  const auto address = [&] {
    const bool alike = random.Below(4) > 0;
    return (uint64_t{1} << 40) + (alike ? at : random.Below(8) * call.itemsize);
  };
  call.at.first = address();
  call.at.second = call.inputs == 2 ? address() : call.at.first;
  call.at.out = address();
  if (random.Coin()) {
    const bool along = random.Coin();  // the mask has the dimension of n
    call.mask.data = reinterpret_cast<const uint8_t*>((uintptr_t{1} << 30) + random.Below(9));
    if (call.shape.inner > 1 && random.Coin()) {
      call.mask.inner = {.rank = 1, .size = {call.shape.inner}, .stride = {1}};
    }
    const int64_t inner = call.mask.inner.rank > 0 ? call.shape.inner : 1;
    call.mask.stride = along ? inner : 0;
    const int64_t outer = random.Coin() ? 0 : inner * (along ? call.shape.n : 1);
    call.mask.outer = {.rank = 1, .size = {call.shape.outer}, .stride = {outer}};
  }
  return call;
}

#define FAIL_UNLESS(condition)                                                             \
  CHECK(condition, "[%lld, %lld, %lld] x %d, %d inputs, dropout %d, device %d",            \
        (long long)call.shape.outer, (long long)call.shape.n, (long long)call.shape.inner, \
        call.itemsize, call.inputs, call.dropout, device.processors)

// Rows along the minor axis have a kernel of the core if their arrays are alike.
// core_plan_test.cc checks the plan itself.
void CheckRows(const Call& call, const HeldLimits& device, const HeldPlan& rows) {
  const int64_t n = call.shape.n;
  const bool alike =
      (call.at.first ^ call.at.second) % 16 == 0 && (call.at.first ^ call.at.out) % 16 == 0;
  const bool whole = call.at.first % 16 == 0 && n * call.itemsize % 16 == 0;
  const bool may = call.shape.inner == 1 && call.itemsize < 8 && alike && n < int64_t{1} << 31;
  FAIL_UNLESS(!may || call.dropout || rows.holder != RowHolder::kNone);
  // softmax.py asks for dropout in these rows.
  const bool short_enough = n <= kSoftmaxDropoutRow - (whole ? 0 : 8);
  FAIL_UNLESS(!may || !call.dropout || !short_enough || rows.holder == RowHolder::kRegisters);
  FAIL_UNLESS(!call.dropout || rows.holder == RowHolder::kRegisters ||
              rows.holder == RowHolder::kNone);
  // The workspace has ceil(n / 1024) values of each row.
  const int64_t room = n > kSoftmaxWorkspace ? CeilDiv(n, 1024) : 0;
  FAIL_UNLESS(rows.holder != RowHolder::kStreamed || rows.one_launch ||
              rows.blocks_of_row * (3 - call.inputs) <= room);
}

// The columns as the mask and the arrays allow. core_columns_plan_test.cc checks the plan itself.
void CheckColumns(const Call& call, const HeldLimits& device, const ColumnsPlan& plan) {
  const int64_t size = plan.bytes / call.itemsize, columns = call.shape.rows();
  FAIL_UNLESS((call.at.first | call.at.second | call.at.out) % plan.bytes == 0);
  const int64_t partials = (3 - call.inputs) * plan.launch.chunks * columns;
  FAIL_UNLESS(plan.launch.chunks == 1 || (call.shape.n > kSoftmaxWorkspace &&
                                          partials <= columns * CeilDiv(call.shape.n, 1024)));
  if (size == 1 || call.mask.inner.rank == 0) return;
  const uint64_t data = reinterpret_cast<uintptr_t>(call.mask.data);
  const int64_t outer = call.mask.outer.stride[0];
  const auto offset = [&](int64_t o, int64_t i, int64_t j) {
    return data + static_cast<uint64_t>(o * outer + i * call.mask.stride + j);
  };
  for (int64_t o : {int64_t{0}, call.shape.outer - 1}) {
    for (int64_t i : {int64_t{0}, call.shape.n - 1}) {
      FAIL_UNLESS(offset(o, i, call.shape.inner - size) % size == 0);
    }
  }
}

}  // namespace

int main() {
  Random random(1);
  int64_t held = 0, wide_masks = 0;
  for (int i = 0; i < kShapes; ++i) {
    const Call call = RandomCall(random);
    const HeldLimits& device = kDevices[random.Below(3)];
    const HeldPlan rows =
        PlanRowsOf(call.shape, call.at, call.itemsize, call.inputs, call.dropout, device);
    CheckRows(call, device, rows);
    held += rows.holder != RowHolder::kNone;
    if (rows.holder != RowHolder::kNone || call.dropout) continue;
    const ColumnsPlan plan =
        PlanColumns(ColumnsOf(call.shape, call.mask, call.at, call.itemsize, call.inputs), device);
    CheckColumns(call, device, plan);
    wide_masks += plan.bytes > call.itemsize && call.mask.inner.rank > 0;
  }
  CHECK(held > 0 && wide_masks > 0, "no rows, or no masks of words");
}
