// Descriptions of matrices for copies of tiles between global and shared memory (tile_copy.cuh).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_fastops::cuda {

// Sets `*map` to describe tiles of `tile_rows` rows and 64 columns of a row-major matrix of 16-bit
// elements, whose rows and whose data begin at multiples of 16 bytes. In shared memory, a tile has
// rows of 128 bytes as Swizzled (warpgroup.cuh) says. What is outside of the matrix is read as
// zeros and not written. The current device has compute capability 9.0 or later.
cudaError_t DescribeTiles(const void* data, int64_t rows, int64_t columns, int tile_rows,
                          CUtensorMap* map);

}  // namespace jax_fastops::cuda
