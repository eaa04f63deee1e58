// The Python module `_cuda`. Loading it needs no GPU, no driver and no CUDA library: the runtime is
// linked statically, and looks for the driver at the first launch.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include <string>

#include "core/cuda/launch.h"
#include "core/ffi/module.h"

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

}  // namespace

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of jax_fastops as XLA FFI handlers.";
  jax_fastops::Define(m, &BuildInfo);
  m.def("bandwidth", &Bandwidth, "Bytes per second of a device's memory, or 0.");
  for (const auto* part = jax_fastops::ModulePart::First(); part != nullptr; part = part->Next()) {
    part->define(&m);
  }
}
