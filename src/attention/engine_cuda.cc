// Plans of cuDNN for attention, which are found once per problem and device and then kept.
//
// cuDNN is the library that JAX has loaded: this module is not linked against it.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "attention/attention.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace jax_fastops::cuda {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// The arrays of a graph.
enum Id : int64_t {
  kQ = 1,
  kK,
  kV,
  kBias,
  kY,
  kStats,
  kDy,
  kDq,
  kDk,
  kDv,
  kQLengths,
  kKvLengths,
  kSeed,
  kOffset,
  kQOffsets,
  kKvOffsets,
  kYOffsets,
  kStatsOffsets,
};

// Loads nothing that is not loaded, so that there is one cuDNN in a process.
bool HasCudnn() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (fe::cudnn_dlhandle == nullptr) {
    fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
  }
  return fe::cudnn_dlhandle != nullptr;
}

// A handle of the current device. Handles are kept, because creating one takes milliseconds.
class Handle {
 public:
  Handle() {
    if (cudaGetDevice(&device_) != cudaSuccess) throw std::runtime_error("no CUDA device");
    {
      const std::lock_guard<std::mutex> lock(Mutex());
      auto& free = Free()[device_];
      if (!free.empty()) {
        handle_ = free.back();
        free.pop_back();
        return;
      }
    }
    if (fe::detail::create_handle(&handle_) != CUDNN_STATUS_SUCCESS) {
      throw std::runtime_error("cuDNN does not start");
    }
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    const std::lock_guard<std::mutex> lock(Mutex());
    Free()[device_].push_back(handle_);
  }
  cudnnHandle_t get() const { return handle_; }
  int device() const { return device_; }

 private:
  // Never destroyed: cuDNN may be gone when the process ends.
  static std::mutex& Mutex() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }
  static std::map<int, std::vector<cudnnHandle_t>>& Free() {
    static auto* const free = new std::map<int, std::vector<cudnnHandle_t>>;
    return *free;
  }

  int device_ = 0;
  cudnnHandle_t handle_ = nullptr;
};

struct Plan {
  std::string problem;  // why there is none
  std::shared_ptr<fe::graph::Graph> graph;
  int64_t workspace_bytes = 0;
};

class Builder {
 public:
  explicit Builder(const AttentionProblem& p)
      : p_(p), graph_(std::make_shared<fe::graph::Graph>()) {
    const auto io = p.dtype == DType::kF16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16;
    graph_->set_io_data_type(io)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  std::shared_ptr<fe::graph::Graph> Build() {
    const Tensor q = Array("q", kQ, p_.heads, p_.queries, p_.q);
    const Tensor k = Array("k", kK, p_.kv_heads, p_.keys, p_.k);
    const Tensor v = Array("v", kV, p_.kv_heads, p_.keys, p_.v);
    if (p_.backward) {
      fe::graph::SDPA_backward_attributes options;
      SetCommon(&options);
      options.set_deterministic_algorithm(p_.deterministic);
      if (p_.segments > 0) {  // so that workspace does not grow with the number of segments
        options.set_max_total_seq_len_q(p_.batch * p_.queries);
        options.set_max_total_seq_len_kv(p_.batch * p_.keys);
      }
      const Tensor y = Array("y", kY, p_.heads, p_.queries, p_.y);
      const Tensor dy = Array("dy", kDy, p_.heads, p_.queries, p_.y);
      const auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, y, dy, Stats(), options);
      SetResult(dq, kDq, p_.heads, p_.queries, p_.q);
      SetResult(dk, kDk, p_.kv_heads, p_.keys, p_.k);
      SetResult(dv, kDv, p_.kv_heads, p_.keys, p_.v);
    } else {
      fe::graph::SDPA_attributes options;
      SetCommon(&options);
      options.set_generate_stats(true);
      const auto [y, stats] = graph_->sdpa(q, k, v, options);
      SetResult(y, kY, p_.heads, p_.queries, p_.y);
      stats->set_output(true)
          .set_uid(kStats)
          .set_data_type(fe::DataType_t::FLOAT)
          .set_dim(StatsSizes())
          .set_stride(StatsStrides());
      if (p_.segments > 0) stats->set_ragged_offset(Offsets("stats_offsets", kStatsOffsets));
    }
    return graph_;
  }

 private:
  template <typename Options>
  void SetCommon(Options* options) {
    options->set_name("attention").set_attn_scale(static_cast<float>(p_.scale));
    if (p_.bias_batch > 0) {
      Tensor bias = New("bias", kBias, {p_.bias_batch, p_.bias_heads, p_.bias_rows, p_.keys},
                        {p_.bias.batch, p_.bias.head, p_.bias.row, 1});
      if (p_.wide_bias) bias->set_data_type(fe::DataType_t::FLOAT);
      options->set_bias(bias);
    }
    if (p_.lengths) {
      options->set_padding_mask(true)
          .set_seq_len_q(Numbers("q_lengths", kQLengths, p_.sequences(), fe::DataType_t::INT32))
          .set_seq_len_kv(Numbers("kv_lengths", kKvLengths, p_.sequences(), fe::DataType_t::INT32));
    }
    if (p_.before >= 0 || p_.after >= 0) {
      options->set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT);
    }
    // cuDNN counts the query's own position among the keys before it.
    if (p_.before >= 0) options->set_diagonal_band_left_bound(static_cast<int>(p_.before + 1));
    if (p_.after >= 0) options->set_diagonal_band_right_bound(static_cast<int>(p_.after));
    if (p_.rate > 0) {
      options->set_dropout(static_cast<float>(p_.rate),
                           Numbers("seed", kSeed, 1, fe::DataType_t::INT64),
                           Numbers("offset", kOffset, 1, fe::DataType_t::INT64));
    }
  }

  Tensor New(const char* name, Id id, std::vector<int64_t> sizes, std::vector<int64_t> strides) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_name(name)
                              .set_uid(id)
                              .set_dim(std::move(sizes))
                              .set_stride(std::move(strides)));
  }
  Tensor Array(const char* name, Id id, int64_t heads, int64_t rows, const AttentionStrides& s) {
    const Tensor tensor =
        New(name, id, {p_.sequences(), heads, rows, p_.size}, {s.batch, s.head, s.row, 1});
    SetOffsets(tensor, id);
    return tensor;
  }
  Tensor Numbers(const char* name, Id id, int64_t count, fe::DataType_t type) {
    Tensor tensor = New(name, id, {count, 1, 1, 1}, {1, 1, 1, 1});
    tensor->set_data_type(type);
    return tensor;
  }
  Tensor Stats() {
    Tensor stats = New("stats", kStats, StatsSizes(), StatsStrides());
    stats->set_data_type(fe::DataType_t::FLOAT);
    if (p_.segments > 0) stats->set_ragged_offset(Offsets("stats_offsets", kStatsOffsets));
    return stats;
  }
  std::vector<int64_t> StatsSizes() const { return {p_.sequences(), p_.heads, p_.queries, 1}; }
  std::vector<int64_t> StatsStrides() const {
    const int64_t example = p_.heads * p_.queries;
    if (p_.segments > 0) return {example, 1, p_.heads, 1};
    return {example, p_.queries, 1, 1};
  }
  // Where the sequences of an array begin. Each list is one tensor of the graph.
  Tensor Offsets(const char* name, Id id) {
    Tensor& offsets = offsets_[id];
    if (offsets == nullptr) {
      offsets = Numbers(name, id, p_.sequences() + 1, fe::DataType_t::INT64);
    }
    return offsets;
  }
  void SetOffsets(const Tensor& tensor, Id id) {
    if (p_.segments == 0) return;
    const bool is_query = id == kQ || id == kDq, is_result = id == kY || id == kDy;
    tensor->set_ragged_offset(is_query    ? Offsets("q_offsets", kQOffsets)
                              : is_result ? Offsets("y_offsets", kYOffsets)
                                          : Offsets("kv_offsets", kKvOffsets));
  }
  void SetResult(const Tensor& tensor, Id id, int64_t heads, int64_t rows,
                 const AttentionStrides& s) {
    tensor->set_output(true)
        .set_uid(id)
        .set_dim({p_.sequences(), heads, rows, p_.size})
        .set_stride({s.batch, s.head, s.row, 1});
    SetOffsets(tensor, id);
  }

  const AttentionProblem& p_;
  std::shared_ptr<fe::graph::Graph> graph_;
  std::map<Id, Tensor> offsets_;
};

Plan FindPlan(const AttentionProblem& problem, cudnnHandle_t handle) {
  Plan plan;
  try {
    plan.graph = Builder(problem).Build();
    fe::error_t error = plan.graph->build(handle, {fe::HeurMode_t::A});
    if (error.is_good()) error = plan.graph->get_workspace_size(plan.workspace_bytes);
    if (error.is_bad()) plan.problem = "cuDNN: " + error.get_message();
  } catch (const std::exception& error) {
    plan.problem = std::string("cuDNN: ") + error.what();
  }
  return plan;
}

// The plan of a problem on the current device. Plans are kept until the process ends.
const Plan& PlanOf(const AttentionProblem& problem, const Handle& handle) {
  using Key = std::pair<int, AttentionProblem>;
  static auto* const mutex = new std::mutex;
  static auto* const plans = new std::map<Key, std::unique_ptr<Plan>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<Plan>& plan = (*plans)[{handle.device(), problem}];
  if (plan == nullptr) plan = std::make_unique<Plan>(FindPlan(problem, handle.get()));
  return *plan;
}

}  // namespace

void AttentionProblem::SetStrides(bool packed) {
  const int64_t parts = packed ? 3 : 1;
  const auto of = [this](int64_t rows, int64_t row) {
    return AttentionStrides{rows * row, size, row};
  };
  q = of(queries, parts * heads * size);
  k = v = of(keys, parts * kv_heads * size);
  y = of(queries, heads * size);
}

std::string PlanAttention(const AttentionProblem& problem, int64_t* workspace_bytes) {
  *workspace_bytes = 0;
  if (!HasCudnn()) return "cuDNN is not loaded";
  try {
    const Handle handle;
    // Another one is kept for calls that run meanwhile: it could not be created in a capture.
    {
      const Handle other;
    }
    const Plan& plan = PlanOf(problem, handle);
    *workspace_bytes = PreparedAt(problem, nullptr).bytes + plan.workspace_bytes;
    return plan.problem;
  } catch (const std::exception& error) {
    return std::string("cuDNN: ") + error.what();
  }
}

std::string RunAttention(const AttentionProblem& problem, const AttentionBuffers& b,
                         cudaStream_t stream) {
  if (!HasCudnn()) return "cuDNN is not loaded";
  try {
    const Handle handle;
    const Plan& plan = PlanOf(problem, handle);
    if (!plan.problem.empty()) return plan.problem;
    const Prepared prepared = PreparedAt(problem, b.workspace);
    if (prepared.bytes + plan.workspace_bytes > b.workspace_bytes)
      return "the workspace is too small";
    if (problem.lengths || problem.rate > 0) {
      const cudaError_t error = PrepareAttention(problem, b, stream);
      if (error != cudaSuccess) return cudaGetErrorString(error);
    }
    if (fe::detail::set_stream(handle.get(), stream) != CUDNN_STATUS_SUCCESS) {
      return "cuDNN does not take the stream";
    }
    std::unordered_map<int64_t, void*> arrays = {
        {kQ, const_cast<void*>(b.q)},
        {kK, const_cast<void*>(b.k)},
        {kV, const_cast<void*>(b.v)},
        {kY, b.y},
        {kStats, b.stats},
    };
    if (problem.bias_batch > 0) arrays[kBias] = const_cast<void*>(b.bias);
    if (problem.lengths) {
      arrays[kQLengths] = prepared.q_lengths;
      arrays[kKvLengths] = prepared.kv_lengths;
    }
    for (int i = 0; problem.segments > 0 && i < 4; ++i) {
      arrays[kQOffsets + i] = prepared.offsets[i];
    }
    if (problem.rate > 0) {
      arrays[kSeed] = prepared.seed;
      arrays[kOffset] = prepared.seed + 2;
    }
    if (problem.backward) {
      arrays[kDy] = const_cast<void*>(b.dy);
      arrays[kDq] = b.dq;
      arrays[kDk] = b.dk;
      arrays[kDv] = b.dv;
    }
    fe::error_t error = plan.graph->execute(handle.get(), arrays, b.workspace + prepared.bytes);
    if (error.is_bad()) return "cuDNN: " + error.get_message();
    if (problem.lengths && problem.segments == 0) {
      const cudaError_t zeroed = ZeroRows(problem, b, stream);
      if (zeroed != cudaSuccess) return cudaGetErrorString(zeroed);
    }
    return "";
  } catch (const std::exception& error) {
    return std::string("cuDNN: ") + error.what();
  }
}

}  // namespace jax_fastops::cuda
