// Every shape of a softmax gets a plan that covers its rows once and keeps the limits of the
// device.
#include <algorithm>
#include <cstdint>

#include "core/integer.h"
#include "property.h"
#include "softmax/plan.h"

using namespace jax_fastops;
using namespace jax_fastops::cuda::softmax;

namespace {

// An H100, a device without clusters, and a small one.
constexpr HeldLimits kDevices[] = {{132, 230400, 16}, {108, 164864, 1}, {46, 99328, 1}};

Call RandomCall(Random& random) {
  Call call = {};
  call.itemsize = 2 << random.Below(3);
  call.grad = random.Coin();
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
  call.a = address();
  call.b = call.grad ? address() : call.a;
  call.out = address();
  if (random.Coin()) {
    call.mask.data = reinterpret_cast<const uint8_t*>(uintptr_t{1} << 30);
    call.mask.stride = random.Coin() ? call.shape.inner : 0;
    if (random.Coin() && call.shape.inner > 1) {
      call.mask.inner = {.rank = 1, .size = {call.shape.inner}, .stride = {1}};
    }
    call.mask.outer = {.rank = 1, .size = {call.shape.outer}, .stride = {random.Coin() ? 0 : 1}};
  }
  return call;
}

#define FAIL_UNLESS(condition)                                                             \
  CHECK(condition, "[%lld, %lld, %lld] x %d, grad %d, device %d, kernel %d",               \
        (long long)call.shape.outer, (long long)call.shape.n, (long long)call.shape.inner, \
        call.itemsize, call.grad, device.processors, static_cast<int>(plan.kernel))

// The launch itself, and the workspace.
void CheckLaunch(const Call& call, const HeldLimits& device, const Plan& plan) {
  FAIL_UNLESS(plan.blocks > 0 && plan.blocks_y > 0 && plan.blocks_y <= 65535);
  FAIL_UNLESS(plan.threads % 32 == 0 && plan.threads > 0 && plan.threads <= 1024);
  FAIL_UNLESS(plan.shared_bytes >= 0 && plan.shared_bytes <= device.shared_bytes);
  FAIL_UNLESS(plan.cluster <= device.max_cluster && plan.blocks % plan.cluster == 0);
  FAIL_UNLESS(call.itemsize < 8 || plan.kernel == Kernel::kElementColumns);
}

// Rows along the minor axis have a kernel of the core if their arrays are alike, or short.
// core_plan_test.cc checks the plan itself.
void CheckRows(const Call& call, const HeldLimits& device, const HeldPlan& rows) {
  const Plan plan = {};
  const int64_t n = call.shape.n;
  const bool alike = (call.a ^ call.b) % 16 == 0 && (call.a ^ call.out) % 16 == 0;
  const bool whole = call.a % 16 == 0 && n * call.itemsize % 16 == 0;
  const bool may = call.shape.inner == 1 && call.itemsize < 8 && alike && n < int64_t{1} << 31;
  FAIL_UNLESS(!may || call.dropout || rows.holder != RowHolder::kNone);
  // softmax.py asks for dropout in these rows.
  const bool short_enough = n <= kSoftmaxDropoutRow - (whole ? 0 : 8);
  FAIL_UNLESS(!may || !call.dropout || !short_enough || rows.holder == RowHolder::kRegisters);
  FAIL_UNLESS(!call.dropout || rows.holder == RowHolder::kRegisters ||
              rows.holder == RowHolder::kNone);
  // The workspace has ceil(n / 1024) values of each row.
  const int64_t room = n > kWorkspaceRow ? CeilDiv(n, 1024) : 0;
  FAIL_UNLESS(rows.holder != RowHolder::kStreamed || rows.one_launch ||
              rows.blocks_of_row * (call.grad ? 1 : 2) <= room);
}

// A tile of 1 << log_width columns by all of n, or by a chunk of it.
void CheckColumns(const Call& call, const HeldLimits& device, const Plan& plan) {
  const int bytes = plan.kernel == Kernel::kColumnRegisters ? 16
                    : plan.kernel == Kernel::kColumns       ? ColumnUnitBytes(call.itemsize)
                                                            : call.itemsize;
  const int size = bytes / call.itemsize, accumulator = std::max(4, call.itemsize);
  FAIL_UNLESS(call.shape.inner % size == 0);
  FAIL_UNLESS((call.a | call.b | call.out) % bytes == 0);
  const int64_t columns = call.shape.outer * (call.shape.inner / size);
  if (plan.kernel == Kernel::kColumnRegisters || plan.kernel == Kernel::kElementColumnRegisters) {
    const ColumnRegistersParams& q = plan.registers;
    FAIL_UNLESS(q.columns == columns && q.log_width >= 0);
    FAIL_UNLESS(q.places <= ColumnPlaces(call.itemsize, bytes));
    FAIL_UNLESS(plan.threads <= ColumnRegisterThreads(bytes));
    FAIL_UNLESS(q.log_threads == 5 ? q.log_blocks == 0 : 1 << q.log_threads == plan.threads);
    FAIL_UNLESS(plan.cluster == 1 << q.log_blocks);
    FAIL_UNLESS(q.log_blocks == 0 || ColumnsInClusters(bytes, call.grad));
    FAIL_UNLESS(q.log_width <= q.log_threads);
    const int64_t lanes = int64_t{1} << (q.log_threads + q.log_blocks - q.log_width);
    FAIL_UNLESS(lanes * q.places >= call.shape.n && lanes * (q.places - 1) < call.shape.n);
    const int64_t held = ((plan.blocks * plan.threads) >> (q.log_threads + q.log_blocks))
                         << q.log_width;
    FAIL_UNLESS(held >= columns && held - columns < int64_t{plan.threads} * plan.cluster);
    return;
  }
  const ColumnsParams& q = plan.columns;
  FAIL_UNLESS(q.columns == columns && plan.threads == ColumnThreads(call.grad));
  const int64_t width = int64_t{1} << q.log_width, lanes = plan.threads / width;
  FAIL_UNLESS(lanes >= 1 && plan.blocks * width >= columns && (plan.blocks - 1) * width < columns);
  FAIL_UNLESS(!q.adjacent || (lanes <= 32 && call.shape.inner == 1));
  FAIL_UNLESS(q.chunks == plan.blocks_y && q.chunk * q.chunks >= call.shape.n);
  FAIL_UNLESS(q.chunk * (q.chunks - 1) < call.shape.n);
  FAIL_UNLESS((q.stage == RowStage::kReduce) == (q.chunks > 1) && !(q.held && q.chunks > 1));
  const int64_t rows = call.shape.rows(), partials = 2 * q.chunks * columns * size;
  FAIL_UNLESS(q.chunks == 1 ||
              (call.shape.n > kWorkspaceRow && partials <= rows * CeilDiv(call.shape.n, 1024)));
  const int64_t held =
      q.held ? CeilDiv(call.shape.n, lanes) * plan.threads * bytes * (call.grad ? 2 : 1) : 0;
  FAIL_UNLESS(held <= int64_t{q.scratch} * 16);
  const int64_t parts = plan.threads / std::max<int64_t>(width, 32);
  const int64_t scratch = parts == 1 || q.adjacent ? 0 : parts * width * size * accumulator;
  FAIL_UNLESS(int64_t{q.scratch} * 16 + scratch <= plan.shared_bytes);
}

}  // namespace

int main() {
  Random random(1);
  int64_t uses[static_cast<int>(Kernel::kElementColumns) + 1] = {};
  for (int i = 0; i < kShapes; ++i) {
    const Call call = RandomCall(random);
    const HeldLimits& device = kDevices[random.Below(3)];
    const HeldPlan rows = PlanRowsOf(call, device);
    CheckRows(call, device, rows);
    if (rows.holder != RowHolder::kNone) continue;
    const Plan plan = MakePlan(call, device);
    ++uses[static_cast<int>(plan.kernel)];
    CheckLaunch(call, device, plan);
    CheckColumns(call, device, plan);
  }
  for (int64_t count : uses) CHECK(count > 0, "no shape uses one of the kernels");
}
