// cuDNN's graphs of a convolution with parts of batch norm in its prologue or epilogue.
//
// A shared object with a C interface, which convolution_batch_norm.py calls. A graph is described
// by words, such as "forward stats". Arrays are NHWC, and kernels of convolutions are KRSC.
//
// "forward"   y = convolution(x, w). Other words:
//   prologue    x is relu(scale * x + bias), with parameters of the arrays' dtype, or "float"
//   stats       GenStats: the sums of y and of its squares per channel
//   sums        the same sums as reductions of the generic engines
//   sum         one reduction only
// "weights"   dw = weight gradient(dy, x), with "prologue" as above
// "data"      dx = data gradient(dy, w). Other words:
//   add         dx += other
//   relu        dx = dx where z > 0, the result of batch norm and ReLU
//   bits        dx = dx where a bit of z is set
//   norm        dx = dx where (bn_x - mean) * rsigma * scale + bias > 0
//   sums        the sums of dx and of dx * bn_x
//   dbn         BN_BWD_WEIGHTS: the gradients of scale and bias, by cuDNN's own operation
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <exception>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using fe::DataType_t;
using fe::PointwiseMode_t;

// The order of the pointers that `trial_run` takes. A graph uses some of them.
enum Id : int64_t {
  kX,       // of the convolution, or other
  kW,       //
  kY,       // or dy
  kSum,     // of y, or of dx
  kSum2,    // of y * y, or of dx * bn_x
  kScale,   //
  kBias,    //
  kMean,    //
  kRsigma,  //
  kDx,      //
  kBnX,     //
  kZ,       //
  kExtra0,  // what BN_BWD_WEIGHTS also returns
  kExtra1,
  kExtra2,
  kIds
};

struct Sizes {
  int64_t n, size, c, k, window, half;
};

struct Trial {
  cudnnHandle_t handle = nullptr;
  cudaStream_t stream = nullptr;
  std::shared_ptr<fe::graph::Graph> graph;
  std::vector<int64_t> plans;  // those that were built
  std::set<int64_t> ids;
  int64_t workspace_bytes = 0;
};

class Builder {
 public:
  Builder(const std::set<std::string>& words, const Sizes& sizes, Trial* trial)
      : words_(words), s_(sizes), trial_(trial) {}

  void Build() {
    trial_->graph = std::make_shared<fe::graph::Graph>();
    trial_->graph->set_io_data_type(Io())
        .set_intermediate_data_type(DataType_t::FLOAT)
        .set_compute_data_type(DataType_t::FLOAT);
    if (Has("forward")) Forward();
    if (Has("data")) Data();
    if (Has("weights")) Weights();
  }

 private:
  bool Has(const char* word) const { return words_.count(word) > 0; }
  fe::graph::Graph& graph() { return *trial_->graph; }
  DataType_t Io() const { return s_.half ? DataType_t::HALF : DataType_t::BFLOAT16; }

  void Forward() {
    const Tensor x = Input();
    const Tensor y = graph().conv_fprop(x, Kernel(), Window<fe::graph::Conv_fprop_attributes>());
    Result(y, kY);
    if (Has("stats")) {
      const auto [sum, squares] = graph().genstats(y, fe::graph::Genstats_attributes());
      Result(sum, kSum, true);
      Result(squares, kSum2, true);
    }
    if (Has("sum") || Has("sums")) Sum(y, kSum, s_.k);
    if (Has("sums")) Sum(Pointwise(PointwiseMode_t::MUL, y, y), kSum2, s_.k);
  }

  void Data() {
    const Tensor dy = Array(kY, s_.k);
    Tensor g = graph().conv_dgrad(dy, Kernel(), Window<fe::graph::Conv_dgrad_attributes>());
    SetSizes(g, s_.c);
    if (Has("add")) g = Pointwise(PointwiseMode_t::ADD, g, Array(kX, s_.c));
    if (Has("relu")) g = Pointwise(PointwiseMode_t::RELU_BWD, g, Array(kZ, s_.c));
    if (Has("bits")) {
      const Tensor bits = Array(kZ, s_.c);
      bits->set_data_type(DataType_t::BOOLEAN);
      g = Pointwise(PointwiseMode_t::MUL, g, bits);
    }
    Tensor bn_x, mean, rsigma, scale;
    if (Has("norm") || Has("sums") || Has("dbn")) bn_x = Array(kBnX, s_.c);
    if (Has("norm") || Has("dbn")) {
      mean = Channel(kMean, s_.c, true);
      rsigma = Channel(kRsigma, s_.c, true);
      scale = Channel(kScale, s_.c, true);
    }
    if (Has("norm")) {
      Tensor z = Pointwise(PointwiseMode_t::SUB, bn_x, mean);
      z = Pointwise(PointwiseMode_t::MUL, z, rsigma);
      z = Pointwise(PointwiseMode_t::MUL, z, scale);
      z = Pointwise(PointwiseMode_t::ADD, z, Channel(kBias, s_.c, true));
      g = Pointwise(PointwiseMode_t::RELU_BWD, g, z);
    }
    Result(g, kDx);
    SetSizes(g, s_.c);
    if (Has("sum") || Has("sums")) Sum(g, kSum, s_.c);
    if (Has("sums")) Sum(Pointwise(PointwiseMode_t::MUL, g, bn_x), kSum2, s_.c);
    if (Has("dbn")) {
      const auto results =
          graph().dbn_weight(g, bn_x, mean, rsigma, scale, fe::graph::DBN_weight_attributes());
      const Id ids[] = {kSum2, kSum, kExtra0, kExtra1, kExtra2};
      for (int i = 0; i < 5; ++i) Result(results[i], ids[i], true);
    }
  }

  void Weights() {
    const Tensor dy = Array(kY, s_.k), x = Input();
    const Tensor dw = graph().conv_wgrad(dy, x, Window<fe::graph::Conv_wgrad_attributes>());
    const int64_t row = s_.window * s_.c;
    dw->set_dim({s_.k, s_.c, s_.window, s_.window}).set_stride({s_.window * row, 1, row, s_.c});
    Result(dw, kW);
  }

  // ---- parts ----

  // The convolution's input, which may be normalized in the prologue.
  Tensor Input() {
    Tensor x = Array(kX, s_.c);
    if (!Has("prologue")) return x;
    // The specialized engines take parameters of the arrays' dtype only.
    x = Pointwise(PointwiseMode_t::MUL, x, Channel(kScale, s_.c, Has("float")));
    x = Pointwise(PointwiseMode_t::ADD, x, Channel(kBias, s_.c, Has("float")));
    x = Pointwise(PointwiseMode_t::RELU_FWD, x);
    if (!Has("wide")) x->set_data_type(Io());  // the generic engines take no float32 here
    return x;
  }

  Tensor New(Id id, std::vector<int64_t> sizes, std::vector<int64_t> strides) {
    trial_->ids.insert(id);
    return graph().tensor(
        fe::graph::Tensor_attributes().set_uid(id + 1).set_dim(sizes).set_stride(strides));
  }
  Tensor Array(Id id, int64_t channels) {
    return New(id, {s_.n, channels, s_.size, s_.size},
               {s_.size * s_.size * channels, 1, s_.size * channels, channels});
  }
  void SetSizes(const Tensor& tensor, int64_t channels) {
    tensor->set_dim({s_.n, channels, s_.size, s_.size})
        .set_stride({s_.size * s_.size * channels, 1, s_.size * channels, channels});
  }
  Tensor Kernel() {
    const int64_t row = s_.window * s_.c;
    return New(kW, {s_.k, s_.c, s_.window, s_.window}, {s_.window * row, 1, row, s_.c});
  }
  Tensor Channel(Id id, int64_t channels, bool is_float) {
    Tensor tensor = New(id, {1, channels, 1, 1}, {channels, 1, channels, channels});
    if (is_float) tensor->set_data_type(DataType_t::FLOAT);
    return tensor;
  }
  void Result(const Tensor& tensor, Id id, bool is_float = false) {
    trial_->ids.insert(id);
    tensor->set_output(true).set_uid(id + 1);
    if (is_float) tensor->set_data_type(DataType_t::FLOAT);
  }
  void Sum(const Tensor& tensor, Id id, int64_t channels) {
    const Tensor sum = graph().reduction(
        tensor, fe::graph::Reduction_attributes().set_mode(fe::ReductionMode_t::ADD));
    sum->set_dim({1, channels, 1, 1}).set_stride({channels, 1, channels, channels});
    Result(sum, id, true);
  }
  template <typename... Tensors>
  Tensor Pointwise(PointwiseMode_t mode, const Tensors&... tensors) {
    return graph().pointwise(tensors..., fe::graph::Pointwise_attributes().set_mode(mode));
  }
  template <typename Attributes>
  Attributes Window() {
    const int64_t padding = s_.window / 2;
    Attributes window;
    window.set_padding({padding, padding}).set_stride({1, 1}).set_dilation({1, 1});
    return window;
  }

  const std::set<std::string>& words_;
  const Sizes& s_;
  Trial* trial_;
};

void Check(fe::error_t error, const char* step) {
  if (error.is_bad()) throw std::runtime_error(std::string(step) + ": " + error.get_message());
}

// Builds the first plans of the heuristics that fit. Each of their modes is asked.
std::string BuildPlans(Trial* trial, int64_t plans, int64_t max_workspace) {
  fe::graph::Graph& graph = *trial->graph;
  Check(graph.validate(), "validate");
  Check(graph.build_operation_graph(trial->handle), "operation graph");
  std::string names, problem = "no engine";
  const std::vector<fe::HeurMode_t> modes = {fe::HeurMode_t::A, fe::HeurMode_t::B,
                                             fe::HeurMode_t::FALLBACK};
  Check(graph.create_execution_plans(modes), "heuristics");
  const int64_t count = graph.get_execution_plan_count();
  std::set<std::string> known;
  for (int64_t i = 0; i < count && static_cast<int64_t>(trial->plans.size()) < plans; ++i) {
    std::string name;
    if (graph.get_plan_name_at_index(i, name).is_bad() || !known.insert(name).second) continue;
    fe::error_t error = graph.build_plan_at_index(trial->handle, i);
    if (error.is_bad()) {
      problem = error.get_message();
      continue;
    }
    const int64_t bytes = graph.get_workspace_size_plan_at_index(i);
    if (bytes > max_workspace) continue;
    trial->workspace_bytes = std::max(trial->workspace_bytes, bytes);
    trial->plans.push_back(i);
    names += (names.empty() ? "" : ";") + name;
  }
  if (trial->plans.empty()) {
    throw std::runtime_error(problem + " (" + std::to_string(count) + " candidates)");
  }
  return names;
}

}  // namespace

extern "C" {

// The number of plans, or -1. `message` gets the plans' names, or why there is none.
int trial_new(const char* description, const int64_t* sizes, int64_t plans, int64_t max_workspace,
              void** result, int64_t* workspace_bytes, char* message, size_t length) {
  auto trial = std::make_unique<Trial>();
  std::string text;
  int count = -1;
  try {
    if (fe::cudnn_dlhandle == nullptr) fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW);
    if (fe::cudnn_dlhandle == nullptr) throw std::runtime_error(dlerror());
    if (fe::detail::create_handle(&trial->handle) != CUDNN_STATUS_SUCCESS) {
      throw std::runtime_error("cuDNN does not start");
    }
    if (cudaStreamCreateWithFlags(&trial->stream, cudaStreamNonBlocking) != cudaSuccess) {
      throw std::runtime_error("no stream");
    }
    fe::detail::set_stream(trial->handle, trial->stream);
    std::istringstream stream(description);
    std::set<std::string> words;
    for (std::string word; stream >> word;) words.insert(word);
    const Sizes s = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
    Builder(words, s, trial.get()).Build();
    text = BuildPlans(trial.get(), plans, max_workspace);
    count = static_cast<int>(trial->plans.size());
    *workspace_bytes = trial->workspace_bytes;
    *result = trial.release();
  } catch (const std::exception& error) {
    text = error.what();
  }
  snprintf(message, length, "%s", text.c_str());
  return count;
}

// Runs a plan and waits for it. Returns 0, or 1 for an error.
int trial_run(void* of, int plan, void* const* pointers, void* workspace) {
  Trial& trial = *static_cast<Trial*>(of);
  std::unordered_map<int64_t, void*> arrays;
  for (const int64_t id : trial.ids) arrays[id + 1] = pointers[id];
  const fe::error_t error =
      trial.graph->execute_plan_at_index(trial.handle, arrays, workspace, trial.plans.at(plan));
  return error.is_bad() || cudaStreamSynchronize(trial.stream) != cudaSuccess;
}

}  // extern "C"
