#include "core/cuda/tensor_map.h"

namespace jax_fastops::cuda {
namespace {

// The function of the driver, which is not linked; null if the driver has none.
decltype(&cuTensorMapEncodeTiled) Encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function) : nullptr;
  }();
  return encoder;
}

}  // namespace

cudaError_t DescribeTiles(const void* data, int64_t rows, int64_t columns, int tile_rows,
                          CUtensorMap* map) {
  const auto encode = Encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[1] = {2 * sizes[0]};
  const cuuint32_t tile[2] = {64, static_cast<cuuint32_t>(tile_rows)}, steps[2] = {1, 1};
  // Bits are copied, so the type does not matter.
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, const_cast<void*>(data), sizes, pitch, tile,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_fastops::cuda
