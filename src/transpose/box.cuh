// Transpositions in which the runs of a tile would need the same dimension, because one is short (3
// channels), or dimensions are permuted within a small block.
//
// A box of the array, 8 or 16 KB, is copied to shared memory in the input's order, and gathered
// from there in the order of the output, 16 bytes per thread. The source of each element is the
// same for every box, so a table holds 16-bit addresses. Blocks are persistent: each makes the
// table once, one dimension at a time. (A chain of divisions per entry took a third of the time for
// bfloat16.) Segments of the output that are not aligned are first gathered into shared memory, and
// written from there in aligned chunks.
#pragma once

#include <cstdint>
#include <cstring>

#include "transpose/bytes.cuh"
#include "transpose/plan.h"

namespace jax_fastops::cuda::transpose {

// The shared memory of a block.
struct BoxMemory {
  uint16_t* table;  // where each element of the output is in `data`, in bytes
  char* data;
  char* staged;  // the box in the order of the output
  int64_t* in_offsets;
  int64_t* out_offsets;  // of the segments

  __device__ __forceinline__ BoxMemory(uint4* shared, const BoxPlan& p)
      : table(reinterpret_cast<uint16_t*>(shared)),
        data(reinterpret_cast<char*>(shared) + p.table_bytes),
        staged(data + p.data_bytes),
        in_offsets(reinterpret_cast<int64_t*>(staged + p.staged_bytes)),
        out_offsets(in_offsets + p.in.count) {}
};

__device__ __forceinline__ int64_t SegmentOffset(const BoxSide& side, uint32_t n) {
  int64_t offset = 0;
  for (int d = side.run_dims; d < side.run_dims + side.segment_dims; ++d) {
    offset += static_cast<int64_t>(TakeRemainder(n, side.dims[d].size)) * side.dims[d].stride;
  }
  return offset;
}

// Sets the table and the segments' offsets.
template <int kElement>
__device__ __forceinline__ void MakeTables(const BoxPlan& p, const BoxMemory& memory) {
  uint16_t* table = memory.table;
  for (uint32_t i = threadIdx.x; i < p.in.count; i += kBoxThreads) {
    memory.in_offsets[i] = SegmentOffset(p.in, i);
  }
  for (uint32_t i = threadIdx.x; i < p.out.count; i += kBoxThreads) {
    memory.out_offsets[i] = SegmentOffset(p.out, i);
  }
  // The table, dimension by dimension: each index of a new dimension repeats the existing entries
  // with an offset. Entries between segments exist if a segment does not end on 16 bytes. They may
  // be read, so they must be valid addresses.
  const uint32_t entries = p.out.count * p.out.pitch;
  for (uint32_t i = threadIdx.x; i < entries; i += kBoxThreads) table[i] = 0;
  for (int d = 0; d < p.out.run_dims + p.out.segment_dims; ++d) {
    __syncthreads();
    const BoxDim& dim = p.out.dims[d];
    const uint32_t before = dim.before.divisor, limit = before * dim.size.divisor;
    for (uint32_t i = before + threadIdx.x; i < limit; i += kBoxThreads) {
      uint32_t quotient = i;
      const uint32_t repeated = TakeRemainder(quotient, dim.before);
      table[i] = static_cast<uint16_t>(table[repeated] + quotient * dim.shared_stride);
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < entries; i += kBoxThreads) {
    table[i] = static_cast<uint16_t>(p.Place(table[i] * kElement));
  }
}

// Where a box is, and what of it exists.
struct BoxPosition {
  const char* x;
  char* y;
  uint32_t in_length, in_count, out_length, out_count;
};

__device__ __forceinline__ BoxPosition FindBox(const BoxPlan& p, const char* x, char* y,
                                               uint32_t box) {
  BoxPosition at = {x, y, p.in.length.divisor, p.in.count, p.out.length.divisor, p.out.count};
  uint32_t n = box;
  for (int d = 0; d < p.rank; ++d) {
    const int64_t i = TakeRemainder(n, p.dims[d].size);
    at.x += i * p.dims[d].in_stride;
    at.y += i * p.dims[d].out_stride;
    if (d == p.in_part.dim && (i + 1) * p.in_part.size > p.in_part.total) {
      const uint32_t part = static_cast<uint32_t>(p.in_part.total - i * p.in_part.size);
      at.in_length = at.in_length / p.in_part.size * part;
      if (p.in_part.dim == p.out_part.dim) {
        at.out_length = at.out_length / p.in_part.size * part;
      } else {
        at.out_count = at.out_count / p.in_part.size * part;
      }
    }
    if (d == p.out_part.dim && p.in_part.dim != p.out_part.dim &&
        (i + 1) * p.out_part.size > p.out_part.total) {
      const uint32_t part = static_cast<uint32_t>(p.out_part.total - i * p.out_part.size);
      at.out_length = at.out_length / p.out_part.size * part;
      at.in_count = at.in_count / p.out_part.size * part;
    }
  }
  return at;
}

// Copies the segments of the input to shared memory, 16 bytes at a time by load(address).
template <int kElement, typename LoadChunk>
__device__ __forceinline__ void ReadSegments(const BoxPlan& p, const BoxPosition& box,
                                             const BoxMemory& memory, const LoadChunk& load) {
  constexpr int kVector = 16 / kElement;
  constexpr int kTogether = 4;
  const uint32_t total = box.in_count * p.in.chunks.divisor;
  for (uint32_t first = threadIdx.x; first < total; first += kBoxThreads * kTogether) {
    const auto for_each_chunk = [&](const auto& visit) {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        uint32_t segment = first + k * kBoxThreads;
        const bool live = segment < total;
        const uint32_t within = TakeRemainder(segment, p.in.chunks) * kVector;
        if (live && within < box.in_length) visit(k, segment, within);
      }
    };
    decltype(load(box.x)) v[kTogether];
    for_each_chunk([&](int k, uint32_t segment, uint32_t within) {
      v[k] = load(box.x + memory.in_offsets[segment] + within * kElement);
    });
    for_each_chunk([&](int k, uint32_t segment, uint32_t within) {
      Store(memory.data + p.Place((segment * p.in.pitch + within) * kElement), Bytes(v[k]));
    });
  }
}

// The chunk of the output that begins at entry `from` of the table. With kTurned, the words of the
// chunk are gathered in the order 0 ^ turn, 1 ^ turn, ...
template <int kElement, bool kTurned>
__device__ __forceinline__ uint4 Gather(const BoxMemory& memory, uint32_t from, uint32_t turn) {
  using Element = Word<kElement>;
  constexpr int kVector = 16 / kElement;
  constexpr int kEntries = kTurned ? 4 / kElement : kVector < 8 ? kVector : 8;  // read together
  Element elements[kVector];
#pragma unroll
  for (int i = 0; i < kVector; i += kEntries) {
    const uint32_t first = kTurned ? (i / kEntries ^ turn) * kEntries : i;
    const auto entries = Load<Word<kEntries * 2>>(memory.table + from + first);
    uint16_t addresses[kEntries];
    memcpy(addresses, &entries, sizeof(addresses));
#pragma unroll
    for (int j = 0; j < kEntries; ++j) elements[i + j] = Load<Element>(memory.data + addresses[j]);
  }
  uint4 chunk;
  memcpy(&chunk, elements, 16);
  if constexpr (kTurned) {
    if (turn & 1) chunk = make_uint4(chunk.y, chunk.x, chunk.w, chunk.z);
    if (turn & 2) chunk = make_uint4(chunk.z, chunk.w, chunk.x, chunk.y);
  }
  return chunk;
}

// Gathers all chunks of the output, and calls store(segment, the chunk's first element in it, the
// chunk's index, the chunk).
template <int kElement, bool kTurned, typename StoreChunk>
__device__ __forceinline__ void GatherSegments(const BoxPlan& p, const BoxPosition& box,
                                               const BoxMemory& memory, const StoreChunk& store) {
  const uint32_t chunks = box.out_count * p.out.chunks.divisor;
#pragma unroll 2
  for (uint32_t index = threadIdx.x; index < chunks; index += kBoxThreads) {
    uint32_t segment = index;
    const uint32_t chunk = TakeRemainder(segment, p.out.chunks);
    const uint32_t within = chunk * (16 / kElement);
    if (within < box.out_length) {
      store(segment, within, index,
            Gather<kElement, kTurned>(memory, segment * p.out.pitch + within, chunk / 8 % 4));
    }
  }
}

template <int kElement, typename StoreChunk>
__device__ __forceinline__ void GatherSegments(const BoxPlan& p, const BoxPosition& box,
                                               const BoxMemory& memory, const StoreChunk& store) {
  if constexpr (kElement <= 2) {
    if (p.turned) return GatherSegments<kElement, true>(p, box, memory, store);
  }
  GatherSegments<kElement, false>(p, box, memory, store);
}

// Writes the segments that are in memory.staged, in aligned chunks.
template <int kElement>
__device__ __forceinline__ void WriteStaged(const BoxPlan& p, const BoxPosition& box,
                                            const BoxMemory& memory) {
  const uint32_t total = box.out_count * p.out.chunks.divisor;
  const int bytes = static_cast<int>(box.out_length) * kElement;
#pragma unroll 1  // not more: registers
  for (uint32_t unit = threadIdx.x; unit < total; unit += kBoxThreads) {
    uint32_t segment = unit;
    const uint32_t chunk = TakeRemainder(segment, p.out.chunks);
    char* address = box.y + memory.out_offsets[segment];
    const int skip = ToAlignment(address, 16);
    const int begin = skip + static_cast<int>(chunk) * 16;
    if (begin + 16 <= bytes) {
      const char* from = memory.staged + (segment * p.out.chunks.divisor + chunk) * 16;
      const Window window(Load<uint4>(from), Load<uint4>(from + 16), skip);
      Store(address + begin, Bytes(window));
    }
  }
  // The elements before the first chunk of a segment, and those after the last one.
  constexpr int kEnds = 32 / kElement;
  for (uint32_t unit = threadIdx.x; unit < box.out_count * kEnds; unit += kBoxThreads) {
    const uint32_t segment = unit / kEnds;
    char* address = box.y + memory.out_offsets[segment];
    const int skip = min(ToAlignment(address, 16), bytes);
    int b = static_cast<int>(unit % kEnds) * kElement;
    const int limit = b < 16 ? skip : bytes;
    if (b >= 16) b += skip - 16 + ((bytes - skip) & ~15);
    if (b < limit) {
      const char* from = memory.staged + segment * p.out.chunks.divisor * 16;
      Store(address + b, Load<Word<kElement>>(from + b));
    }
  }
}

// Reads one box of the array.
template <int kElement>
__device__ __forceinline__ void ReadBox(const BoxPlan& p, const BoxPosition& box,
                                        const BoxMemory& memory, const char* begin) {
  const char* end = begin + p.bytes;
  if (kElement == 16 ||
      (p.in.aligned && Misalignment(box.x, 16) == 0 && box.in_length * kElement % 16 == 0)) {
    ReadSegments<kElement>(p, box, memory,
                           [](const char* address) { return Load<uint4>(address); });
  } else if (AlignDown(box.x, 16) >= begin &&
             box.x + p.in.last_offset + (p.in.length.divisor * kElement + 32) <= end) {
    ReadSegments<kElement>(p, box, memory, [](const char* address) { return Window(address); });
  } else {
    ReadSegments<kElement>(p, box, memory,
                           [&](const char* address) { return LoadBytes(address, end); });
  }
}

// Writes the box that has been read.
template <int kElement>
__device__ __forceinline__ void WriteBox(const BoxPlan& p, const BoxPosition& box,
                                         const BoxMemory& memory) {
  if (kElement == 16 ||
      (p.out.aligned && Misalignment(box.y, 16) == 0 && box.out_length * kElement % 16 == 0)) {
    GatherSegments<kElement>(
        p, box, memory, [&](uint32_t segment, uint32_t within, uint32_t, const uint4& chunk) {
          Store(box.y + memory.out_offsets[segment] + within * kElement, chunk);
        });
  } else if (kElement >= 4 || p.staged_bytes == 0) {
    using Element = Word<kElement>;
    const uint32_t total = box.out_count * p.out.length.divisor;
    for (uint32_t unit = threadIdx.x; unit < total; unit += kBoxThreads) {
      uint32_t segment = unit;
      const uint32_t within = TakeRemainder(segment, p.out.length);
      if (within < box.out_length) {
        const uint16_t address = memory.table[segment * p.out.pitch + within];
        Store(box.y + memory.out_offsets[segment] + within * kElement,
              Load<Element>(memory.data + address));
      }
    }
  } else {
    GatherSegments<kElement>(p, box, memory,
                             [&](uint32_t, uint32_t, uint32_t index, const uint4& chunk) {
                               Store(memory.staged + index * 16, chunk);
                             });
    __syncthreads();
    WriteStaged<kElement>(p, box, memory);
  }
}

template <int kElement>
__global__ void __launch_bounds__(kBoxThreads, kBoxBlocks)
    BoxKernel(const char* x, char* y, const __grid_constant__ BoxPlan p) {
  extern __shared__ uint4 shared[];
  const BoxMemory memory(shared, p);
  MakeTables<kElement>(p, memory);
  const uint32_t boxes = static_cast<uint32_t>(p.boxes);
  for (uint32_t n = blockIdx.x; n < boxes; n += gridDim.x) {
    const BoxPosition box = FindBox(p, x, y, n);
    __syncthreads();  // the table is complete, and the previous box has been read
    ReadBox<kElement>(p, box, memory, x);
    __syncthreads();
    WriteBox<kElement>(p, box, memory);
  }
}

}  // namespace jax_fastops::cuda::transpose
