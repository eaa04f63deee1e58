// The Python module `_cuda`. Loading it needs no GPU, no driver and no CUDA library: the runtime is
// linked statically, and looks for the driver at the first launch.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include <string>

#include "core/cuda/launch.h"
#include "core/ffi/module.h"
#ifdef FASTOPS_CUDNN
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "attention/attention.h"
#endif

namespace {

nanobind::dict BuildInfo() {
  nanobind::dict info = jax_fastops::CommonBuildInfo();
  // CMake's list, separated by commas: "80-real,90-real,90-virtual".
  nanobind::list architectures;
  const std::string all = FASTOPS_CUDA_ARCHITECTURES;
  for (size_t begin = 0; begin < all.size();) {
    size_t end = all.find(',', begin);
    if (end == std::string::npos) end = all.size();
    architectures.append(all.substr(begin, end - begin).c_str());
    begin = end + 1;
  }
  info["architectures"] = architectures;
  info["kernels"] = jax_fastops::cuda::internal::registered_kernels;
  // The runtime is linked statically, so this is the version that runs.
  info["runtime_version"] =
      (std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10))
          .c_str();
  // 0 without a driver. A driver runs every runtime of its major version.
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  info["driver_version"] = driver;
#ifdef FASTOPS_CUDNN
  info["cudnn"] = FASTOPS_CUDNN;  // the version of the headers
#else
  info["cudnn"] = "no";
#endif
  return info;
}

// Bytes per second, from the clock and the width of the device's memory. 0 if it is not known.
double Bandwidth(int device) {
  int kilohertz = 0, bits = 0;
  if (cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return 2e3 * kilohertz * bits / 8;  // two transfers per clock
}

#ifdef FASTOPS_CUDNN
// The workspace of cuDNN's plan on a device, and why there is no plan.
std::pair<int64_t, std::string> AttentionPlan(int device, const std::string& dtype, int64_t batch,
                                              int64_t heads, int64_t kv_heads, int64_t queries,
                                              int64_t keys, int64_t size, bool packed,
                                              int64_t bias_batch, int64_t bias_heads,
                                              int64_t bias_rows, bool wide_bias, bool lengths,
                                              bool backward, double scale, int64_t before,
                                              int64_t after, double rate, bool deterministic) {
  jax_fastops::cuda::AttentionProblem p;
  p.dtype = dtype == "float16" ? jax_fastops::DType::kF16 : jax_fastops::DType::kBF16;
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
  p.lengths = lengths;
  p.before = before;
  p.after = after;
  p.scale = scale;
  p.rate = rate;
  p.deterministic = backward && deterministic;
  int before_call = 0;
  cudaGetDevice(&before_call);
  cudaSetDevice(device);
  int64_t bytes = 0;
  std::string problem = jax_fastops::cuda::PlanAttention(p, &bytes);
  cudaSetDevice(before_call);
  return {bytes, problem};
}
#endif

}  // namespace

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of jax_fastops as XLA FFI handlers.";
  jax_fastops::Define(m, &BuildInfo);
  m.def("bandwidth", &Bandwidth, "Bytes per second of a device's memory, or 0.");
#ifdef FASTOPS_CUDNN
  namespace nb = nanobind;
  m.def("attention_plan", &AttentionPlan, nb::kw_only(), nb::arg("device"), nb::arg("dtype"),
        nb::arg("batch"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("queries"),
        nb::arg("keys"), nb::arg("size"), nb::arg("packed"), nb::arg("bias_batch"),
        nb::arg("bias_heads"), nb::arg("bias_rows"), nb::arg("wide_bias"), nb::arg("lengths"),
        nb::arg("backward"), nb::arg("scale"), nb::arg("before"), nb::arg("after"), nb::arg("rate"),
        nb::arg("deterministic"), nb::call_guard<nb::gil_scoped_release>(),
        "The bytes of workspace of cuDNN's plan for attention, and why there is no plan.");
#endif
}
