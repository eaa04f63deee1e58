// Every shape of columns gets a plan whose threads cover each word once, and which keeps the limits
// of the device.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/integer.h"
#include "core/plan_columns.h"
#include "property.h"

using namespace jax_fastops;

namespace {

// An H100, a device without clusters, and a small one.
constexpr HeldLimits kDevices[] = {{132, 230400, 16}, {108, 164864, 1}, {46, 99328, 1}};
constexpr int64_t kLongRow = 16384;  // longer columns have a workspace

ColumnsShape RandomShape(Random& random) {
  ColumnsShape shape = {};
  shape.itemsize = 2 << random.Below(3);
  shape.inputs = 1 + random.Coin();
  const int64_t elements = int64_t{1} << random.Below(36);
  shape.n = random.Size(elements);
  const int64_t columns = std::max<int64_t>(1, elements / shape.n);
  shape.inner = random.Below(4) == 0 ? 1 : random.Size(columns);
  shape.outer = random.Size(std::max<int64_t>(1, columns / shape.inner));
  shape.addresses = random.Coin() ? 0 : random.Below(16 / shape.itemsize) * shape.itemsize;
  shape.mask_bits = random.Coin() ? 0 : random.Below(64);
  shape.long_workspace = shape.n > kLongRow;
  return shape;
}

#define FAIL_UNLESS(condition)                                                                     \
  CHECK(condition,                                                                                 \
        "[%lld, %lld, %lld] x %d, %d inputs, device %d, registers %d, words of %d bytes, held %d", \
        (long long)shape.outer, (long long)shape.n, (long long)shape.inner, shape.itemsize,        \
        shape.inputs, device.processors, (int)plan.registers, plan.bytes, (int)launch.held)

// A tile of 1 << log_width words by all of n, or by a chunk of it.
void CheckPlan(const ColumnsShape& shape, const HeldLimits& device, const ColumnsPlan& plan) {
  const ColumnsLaunch& launch = plan.launch;
  const int bytes = plan.bytes, size = bytes / shape.itemsize;
  const int64_t sum = int64_t{size} * std::max(4, shape.itemsize);
  FAIL_UNLESS(bytes == shape.itemsize ||
              (shape.itemsize < 8 && bytes == (plan.registers ? 16 : ColumnBytes(shape.itemsize))));
  FAIL_UNLESS(shape.inner % size == 0 && shape.addresses % bytes == 0);
  FAIL_UNLESS(size == 1 || shape.mask_bits % size == 0);
  FAIL_UNLESS(launch.columns == shape.outer * (shape.inner / size));
  FAIL_UNLESS(launch.row_words.divisor == static_cast<uint64_t>(shape.inner / size));
  FAIL_UNLESS(!plan.registers || shape.itemsize < 8);

  const int64_t block = int64_t{1} << launch.log_threads, width = int64_t{1} << launch.log_width;
  FAIL_UNLESS(plan.threads % 32 == 0 && plan.threads > 0);
  FAIL_UNLESS(block == 32 || block == plan.threads);
  const int threads = ColumnThreads(plan.registers, bytes, shape.inputs);
  FAIL_UNLESS(plan.registers ? plan.threads <= threads : plan.threads == threads);
  FAIL_UNLESS(plan.cluster == 1 << launch.log_blocks && plan.cluster <= device.max_cluster);
  FAIL_UNLESS(plan.cluster == 1 || (plan.registers && ColumnsInClusters(bytes, shape.inputs)));
  FAIL_UNLESS(launch.log_width >= 0 && width <= block);
  const int64_t tiles = plan.blocks * plan.threads / (block * plan.cluster);
  FAIL_UNLESS(plan.blocks % plan.cluster == 0 && tiles * width >= launch.columns);
  FAIL_UNLESS((tiles - plan.threads / block) * width < launch.columns);

  const int64_t block_lanes = block / width, lanes = block_lanes * plan.cluster;
  FAIL_UNLESS(!launch.adjacent || (!plan.registers && block_lanes <= 32 && shape.inner == 1));
  FAIL_UNLESS(!plan.registers || (launch.held && launch.words <= HeldColumnWords(bytes)));
  FAIL_UNLESS(!launch.held || (lanes * launch.words >= shape.n &&
                               lanes * (launch.words - 1) < shape.n && launch.chunks == 1));
  FAIL_UNLESS(launch.chunks >= 1 && launch.chunks <= 65535);
  FAIL_UNLESS(launch.chunk * launch.chunks >= shape.n);
  FAIL_UNLESS(launch.chunk * (launch.chunks - 1) < shape.n);
  FAIL_UNLESS((launch.stage == RowStage::kReduce) == (launch.chunks > 1));
  const int64_t sums_of_chunk = 3 - shape.inputs;  // softmax has a maximum, too, in the forward
  FAIL_UNLESS(launch.chunks == 1 ||
              (shape.long_workspace && sums_of_chunk * launch.chunks <= CeilDiv(shape.n, 1024)));

  const bool in_shared = !plan.registers || SecondInShared(HeldColumnWords(bytes), bytes, 2);
  const int64_t arrays = !launch.held || !in_shared ? 0 : shape.inputs - plan.registers;
  const int64_t held = arrays * launch.words * plan.threads * bytes;
  const int64_t parts = launch.adjacent ? 1 : block / std::max<int64_t>(width, 32);
  const int64_t scratch = parts > 1 ? parts * width * sum : 0;
  const int64_t exchange = plan.cluster > 1 ? width * sum : 0;
  FAIL_UNLESS(held <= int64_t{launch.scratch} * 16);
  FAIL_UNLESS(int64_t{launch.scratch} * 16 + scratch <=
              (exchange > 0 ? int64_t{launch.exchange} * 16 : plan.shared_bytes));
  FAIL_UNLESS(int64_t{launch.exchange} * 16 + exchange <= plan.shared_bytes);
  FAIL_UNLESS(plan.shared_bytes <= device.shared_bytes);
}

// The index arithmetic of ColumnsKernel, thread by thread.
void CheckCover(const ColumnsShape& shape, const HeldLimits& device, const ColumnsPlan& plan) {
  const ColumnsLaunch& launch = plan.launch;
  std::vector<int> covered(launch.columns * shape.n);
  const int threads = 1 << launch.log_threads, width = 1 << launch.log_width;
  const int lanes = threads / width, all_lanes = lanes * plan.cluster;
  for (int64_t i = 0; i < plan.blocks * plan.threads; ++i) {
    const int thread = static_cast<int>(i % plan.threads) & (threads - 1);
    const int64_t tile = i >> (launch.log_threads + launch.log_blocks);
    const int at = launch.adjacent ? thread / lanes : thread & (width - 1);
    const int lane = launch.adjacent ? thread & (lanes - 1) : thread >> launch.log_width;
    const int64_t column = (tile << launch.log_width) + at;
    if (column >= launch.columns) continue;
    const int rank = static_cast<int>(i / plan.threads % plan.cluster);
    for (int64_t chunk = 0; chunk < launch.chunks; ++chunk) {
      const int64_t end = std::min(shape.n, (chunk + 1) * launch.chunk);
      int64_t index = chunk * launch.chunk + lane, step = lanes, left = CeilDiv(end - index, lanes);
      if (plan.registers) {
        index = int64_t{launch.words - 1} * all_lanes + lane + rank * lanes;
        step = -all_lanes;
        left = launch.words;
        if (index >= shape.n) --left, index += step;  // the only one that the kernel leaves out
      }
      for (; left > 0; --left, index += step) {
        FAIL_UNLESS(index >= 0 && index < end);
        ++covered[column * shape.n + index];
      }
    }
  }
  FAIL_UNLESS(std::all_of(covered.begin(), covered.end(), [](int times) { return times == 1; }));
}

}  // namespace

int main() {
  Random random(1);
  int64_t registers[2] = {}, longer[2][3] = {}, adjacent = 0;
  int64_t clusters_covered = 0, chunks_covered = 0;
  for (int i = 0; i < kShapes; ++i) {
    const ColumnsShape shape = RandomShape(random);
    const HeldLimits& device = kDevices[random.Below(3)];
    const ColumnsPlan plan = PlanColumns(shape, device);
    const ColumnsLaunch& launch = plan.launch;
    CheckPlan(shape, device, plan);
    const bool rare = plan.cluster > 1 || launch.chunks > 1;
    if (launch.columns * shape.n <= (rare ? 1 << 18 : 1 << 15) && (rare || i % 8 == 0)) {
      CheckCover(shape, device, plan);
      clusters_covered += plan.cluster > 1;
      chunks_covered += launch.chunks > 1;
    }
    const bool wide = plan.bytes > shape.itemsize;
    ++(plan.registers ? registers[wide] : longer[wide][launch.held ? 0 : 1 + (launch.chunks > 1)]);
    adjacent += launch.adjacent;
  }
  for (int wide : {0, 1}) {
    CHECK(registers[wide] > 0, "no shape is in registers: wide %d", wide);
    for (int64_t count : longer[wide]) CHECK(count > 0, "a form is not used: wide %d", wide);
  }
  CHECK(clusters_covered > 0 && chunks_covered > 0, "no clusters, or no chunks, are covered");
  CHECK(adjacent > 0, "no adjacent lanes");
}
