// The function of the Python module `_cuda` that finds plans of cuDNN.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <utility>

#include "attention/attention.h"
#include "core/ffi/registry.h"

namespace jax_fastops {
namespace {

// The workspace of cuDNN's plan on a device, and why there is no plan.
std::pair<int64_t, std::string> Plan(int device, const std::string& dtype, int64_t batch,
                                     int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys,
                                     int64_t size, bool packed, int64_t bias_batch,
                                     int64_t bias_heads, int64_t bias_rows, bool wide_bias,
                                     bool lengths, int64_t segments, bool backward, double scale,
                                     int64_t before, int64_t after, double rate,
                                     bool deterministic) {
  cuda::AttentionProblem p;
  p.dtype = dtype == "float16" ? DType::kF16 : DType::kBF16;
  p.backward = backward;
  p.batch = batch;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.queries = queries;
  p.keys = keys;
  p.size = size;
  p.SetStrides(packed);
  p.bias_batch = bias_batch;
  p.bias_heads = bias_heads;
  p.bias_rows = bias_rows;
  p.SetBiasStrides();
  p.wide_bias = wide_bias;
  p.lengths = lengths || segments > 0;
  p.segments = segments;
  p.before = before;
  p.after = after;
  p.scale = scale;
  p.rate = rate;
  p.deterministic = backward && deterministic;
  int current = 0;
  cudaGetDevice(&current);
  cudaSetDevice(device);
  int64_t bytes = 0;
  std::string problem = cuda::PlanAttention(p, &bytes);
  cudaSetDevice(current);
  return {bytes, problem};
}

void Define(void* module) {
  namespace nb = nanobind;
  static_cast<nb::module_*>(module)->def(
      "attention_plan", &Plan, nb::kw_only(), nb::arg("device"), nb::arg("dtype"), nb::arg("batch"),
      nb::arg("heads"), nb::arg("kv_heads"), nb::arg("queries"), nb::arg("keys"), nb::arg("size"),
      nb::arg("packed"), nb::arg("bias_batch"), nb::arg("bias_heads"), nb::arg("bias_rows"),
      nb::arg("wide_bias"), nb::arg("lengths"), nb::arg("segments"), nb::arg("backward"),
      nb::arg("scale"), nb::arg("before"), nb::arg("after"), nb::arg("rate"),
      nb::arg("deterministic"), nb::call_guard<nb::gil_scoped_release>(),
      "The bytes of workspace of cuDNN's plan for attention, and why there is no plan.");
}

const ModulePart kPart(&Define);

}  // namespace
}  // namespace jax_fastops
