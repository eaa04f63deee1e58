// Handlers of attention by cuDNN. jax_fastops/_cudnn.py declares their buffers.
#include "attention/attention.h"
#include "core/ffi/handler.h"

namespace jax_fastops::inline xla {
namespace {

using cuda::AttentionBuffers;
using cuda::AttentionProblem;
using cuda::AttentionStrides;

ffi::Error Reported(const std::string& problem) {
  if (problem.empty()) return ffi::Error::Success();
  return ffi::Error::Internal("jax_fastops.attention: " + problem);
}

// A bias [..., heads of keys, queries for each, rows, keys], which has a size other than the whole
// one where it is broadcast: copies for the devices of a program.
void ReadBias(Call& call, AttentionProblem* p, AttentionBuffers* b) {
  if (!call.Has("bias?")) return;
  b->bias = call.In("bias?");
  p->wide_bias = call.Wide("bias?");
  const Call::Axis heads = call.AxisOf("bias?", "k");
  const Call::Dims dims = call.DimsOf("bias?");
  const int64_t groups = dims.size[dims.rank - 3], rows = dims.size[dims.rank - 2];
  const int64_t batch = heads.outer, whole = p->heads / p->kv_heads;
  const bool all = heads.size == p->kv_heads && groups == whole;
  call.Require(all || groups == 1, "bias", "must have all heads or one");
  call.Require(rows == 1 || rows == p->queries, "bias", "must have all queries or one");
  // Copies for the devices of a program are equal.
  p->bias_batch = batch == p->batch ? batch : 1;
  p->bias_heads = all ? p->heads : 1;
  p->bias_rows = rows;
  const int64_t head = rows * p->keys;
  p->bias = AttentionStrides{heads.size * groups * head, head, p->keys};
}

struct Given {
  AttentionProblem problem;
  AttentionBuffers buffers;
};

Given Read(Call& call, bool backward) {
  Given given;
  AttentionProblem& p = given.problem;
  AttentionBuffers& b = given.buffers;
  const bool packed = !call.Has("key?");
  p.dtype = call.Type();
  p.backward = backward;
  p.batch = call.Batch();
  p.kv_heads = call.Size("k");
  p.heads = p.kv_heads * call.Size("g");
  p.queries = call.Size("t");
  p.keys = packed ? p.queries : call.Size("s");
  p.size = call.Size("h");
  p.SetStrides(packed);
  const int64_t part = p.heads * p.size * 2;  // bytes between parts of a packed array
  b.q = call.In("query");
  b.k = packed ? static_cast<const char*>(b.q) + part : call.In("key?");
  b.v = packed ? static_cast<const char*>(b.q) + 2 * part : call.In("value?");
  ReadBias(call, &p, &b);
  b.q_lengths = static_cast<const int32_t*>(call.In("q_lengths?"));
  b.kv_lengths = static_cast<const int32_t*>(call.In("kv_lengths?"));
  if (call.Has("starts?")) {
    p.segments = call.Size("m");
    b.starts = static_cast<const int32_t*>(call.In("starts?"));
    b.counts = static_cast<const int32_t*>(call.In("counts?"));
  }
  p.lengths = b.q_lengths != nullptr || b.kv_lengths != nullptr || p.segments > 0;
  b.copies = p.kv_heads;
  b.seeds = static_cast<const uint32_t*>(call.In("seeds?"));
  p.before = call.Attribute<int64_t>("before");
  p.after = call.Attribute<int64_t>("after");
  p.scale = call.Attribute<double>("scale");
  p.rate = call.Attribute<double>("rate");
  call.Require((p.rate > 0) == (b.seeds != nullptr), "query", "needs seeds and a rate, or none");
  if (backward) {
    p.deterministic = call.Attribute<bool>("deterministic");
    b.y = const_cast<void*>(call.In("y"));
    b.stats = const_cast<void*>(call.In("stats"));
    b.dy = call.In("dy");
    b.dq = call.Out("dquery");
    b.dk = packed ? static_cast<char*>(b.dq) + part : call.Out("dkey?");
    b.dv = packed ? static_cast<char*>(b.dq) + 2 * part : call.Out("dvalue?");
  } else {
    b.y = call.Out("y");
    b.stats = call.Out("stats");
  }
  b.workspace = static_cast<char*>(call.Out("workspace"));
  b.workspace_bytes = call.Bytes("workspace");
  return given;
}

ffi::Error Run(Call& call, cudaStream_t stream, bool backward) {
  const Given given = Read(call, backward);
  if (const ffi::Error error = call.Run([] {}); error.failure()) return error;
  return Reported(cuda::RunAttention(given.problem, given.buffers, stream));
}

ffi::Error Forward(Call& call, cudaStream_t stream) { return Run(call, stream, false); }
ffi::Error Backward(Call& call, cudaStream_t stream) { return Run(call, stream, true); }

// Finds the plan and loads kernels, which is impossible while a graph is captured.
template <bool kBackward>
ffi::Error Initialize(ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attributes) {
  Call call("attention", args, rets, attributes);
  const Given given = Read(call, kBackward);
  if (const ffi::Error error = call.Run([] {}); error.failure()) return error;
  if (const cudaError_t error = cuda::LoadAttentionKernels(); error != cudaSuccess) {
    return ToError("attention", error);
  }
  int64_t bytes;
  std::string problem = cuda::PlanAttention(given.problem, &bytes);
  if (problem.empty() && bytes > given.buffers.workspace_bytes) {
    problem = "the plan of cuDNN takes a workspace of " + std::to_string(bytes) +
              " bytes, and the program has " + std::to_string(given.buffers.workspace_bytes);
  }
  return Reported(problem);
}

FASTOPS_CUDA_HANDLER("attention", Forward, Initialize<false>);
FASTOPS_CUDA_HANDLER("attention_bwd", Backward, Initialize<true>);

}  // namespace
}  // namespace jax_fastops::inline xla
