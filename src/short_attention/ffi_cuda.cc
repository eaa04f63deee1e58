// The handler of attention of short sequences. jax_fastops/_projection.py declares its buffers.
#include "core/alignment.h"
#include "core/ffi/handler.h"
#include "short_attention/short_attention.h"

namespace jax_fastops::inline xla {
namespace {

ffi::Error Forward(Call& call, cudaStream_t stream) {
  const int64_t length = call.Size("t"), features = call.Size("a") / 3;
  cuda::ShortAttentionCall c;
  c.dtype = call.Type();
  call.Require(c.dtype == DType::kBF16 || c.dtype == DType::kF16, "qkv", "must have 16 bits");
  call.Require(length <= cuda::kShortAttentionLength, "qkv", "has too many tokens");
  call.Require(call.Size("a") % (3 * cuda::kShortAttentionHead) == 0, "qkv",
               "needs three parts of whole heads");
  c.batch = call.Batch();
  c.length = static_cast<int>(length);
  c.heads = static_cast<int>(features / cuda::kShortAttentionHead);
  c.scale = static_cast<float>(call.Attribute<double>("scale"));
  c.qkv = call.In("qkv");
  c.bias = call.In("bias?");
  c.wide_bias = call.Wide("bias?");
  c.mask = static_cast<const bool*>(call.In("mask?"));
  c.q_lengths = static_cast<const int32_t*>(call.In("q_lengths?"));
  c.kv_lengths = static_cast<const int32_t*>(call.In("kv_lengths?"));
  c.y = call.Out("y");
  call.Require(CommonAlignment({c.qkv, c.bias, c.y}) == 16, "qkv",
               "and its bias and result must begin at multiples of 16 bytes");
  return call.Run([&] { return cuda::ShortAttention(c, stream); });
}

FASTOPS_HANDLER("short_attention", Forward, LoadShortAttentionKernels);

}  // namespace
}  // namespace jax_fastops::inline xla
