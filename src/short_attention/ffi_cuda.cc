// The handlers of attention of one projection, of a batch and of lists. jax_fastops/_projection.py
// declares its buffers.
#include "core/alignment.h"
#include "core/ffi/handler.h"
#include "short_attention/short_attention.h"

namespace jax_fastops::inline xla {
namespace {

// Reads what calls of a batch and of lists share.
cuda::ShortAttentionCall Read(Call& call) {
  cuda::ShortAttentionCall c = {};
  c.dtype = call.Type();
  call.Require(c.dtype == DType::kBF16 || c.dtype == DType::kF16, "qkv", "must have 16 bits");
  call.Require(call.Size("a") % (3 * cuda::kShortAttentionHead) == 0, "qkv",
               "needs three parts of whole heads");
  c.heads = static_cast<int>(call.Size("a") / (3 * cuda::kShortAttentionHead));
  c.scale = static_cast<float>(call.Attribute<double>("scale"));
  c.qkv = call.In("qkv");
  c.bias = call.In("bias?");
  c.wide_bias = call.Wide("bias?");
  c.y = call.Out("y");
  call.Require(CommonAlignment({c.qkv, c.bias, c.y}) == 16, "qkv",
               "and its bias and result must begin at multiples of 16 bytes");
  return c;
}

void SetLength(Call& call, cuda::ShortAttentionCall* c, int64_t length) {
  call.Require(length >= 1 && length <= cuda::kShortAttentionLength, "qkv",
               "must have sequences of 1 to 4096 tokens");
  c->length = static_cast<int>(length);
}

ffi::Error Forward(Call& call, cudaStream_t stream) {
  cuda::ShortAttentionCall c = Read(call);
  SetLength(call, &c, call.Size("t"));
  c.batch = call.Batch();
  c.mask = static_cast<const bool*>(call.In("mask?"));
  c.q_lengths = static_cast<const int32_t*>(call.In("q_lengths?"));
  c.kv_lengths = static_cast<const int32_t*>(call.In("kv_lengths?"));
  return call.Run([&] { return cuda::ShortAttention(c, stream); });
}

ffi::Error ForwardOfLists(Call& call, cudaStream_t stream) {
  cuda::ShortAttentionCall c = Read(call);
  SetLength(call, &c, call.Attribute<int64_t>("length"));
  call.Require(call.Size("t") < int64_t{1} << 31, "qkv", "has too many tokens");
  call.Require(call.Size("n") >= 2, "offsets", "must have two elements or more");
  c.tokens = static_cast<int>(call.Size("t"));
  c.sequences = static_cast<int>(call.Size("n")) - 1;
  c.batch = call.Batch() * c.sequences;
  c.offsets = static_cast<const int32_t*>(call.In("offsets"));
  return call.Run([&] { return cuda::ShortAttention(c, stream); });
}

FASTOPS_HANDLER("list_attention", ForwardOfLists, LoadShortAttentionKernels);
FASTOPS_HANDLER("short_attention", Forward, LoadShortAttentionKernels);

}  // namespace
}  // namespace jax_fastops::inline xla
