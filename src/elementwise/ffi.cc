// Handlers of the element-wise ops. jax_fastops/lerp.py, relu.py, bias_act.py, gated_act.py and
// _broadcast.py declare their buffers.
//
// All buffers have the same rank. dy and the results of the forward have the whole shape. An
// operand with a shorter dimension is broadcast along it: its index 0 is used for all. (In
// partitioned programs it may have several equal copies there.) A gradient has size 1 along
// dimensions over which it is summed.
#include <array>
#include <cstring>

#include "core/ffi/activation.h"
#include "core/ffi/handler.h"
#include "elementwise/elementwise.h"

namespace jax_fastops {
namespace {

const Limit kRank("broadcast_rank", kMaxBroadcastRank);

struct Sum {
  void* data;
  size_t bytes;
};

#ifdef FASTOPS_CUDA
cudaError_t Clear(const Sum* sums, int count, Queue stream) {
  cudaError_t status = cudaSuccess;
  for (int i = 0; i < count && status == cudaSuccess; ++i)
    status = cudaMemsetAsync(sums[i].data, 0, sums[i].bytes, stream);
  return status;
}
#else
void Clear(const Sum* sums, int count, Queue) {
  for (int i = 0; i < count; ++i) std::memset(sums[i].data, 0, sums[i].bytes);
}
#endif

// Reads the arrays of a call, in the order in which the launcher takes their strides.
class Arrays {
 public:
  // `whole` is the buffer with the shape of the result.
  Arrays(Call& call, const char* whole)
      : call_(call), whole_(call.DimsOf(whole)), elements_(call.Elements(whole)) {}

  Operand In(const char* name) {
    Add(call_.DimsOf(name));
    call_.Require(call_.Elements(name) > 0 || elements_ == 0, name, "is empty");
    return {call_.In(name), call_.Wide(name)};
  }

  // An operand that the op does not have.
  Operand None() {
    Add(whole_);
    return {};
  }

  // A mask has one bit for each element, in whole bytes for each row.
  void AddMask(const char* name) {
    Call::Dims bits = call_.DimsOf(name);
    if (bits.rank > 0) bits.size[bits.rank - 1] *= 8;
    RowMajorStrides(bits.sizes(), &strides_[arrays_++]);
  }

  // A gradient that is not requested does not keep dimensions from being merged.
  Gradient Out(const char* name) {
    const Gradient gradient{call_.Out(name), call_.Wide(name)};
    if (gradient.data == nullptr) {
      Add(whole_);
      return gradient;
    }
    const Call::Dims dims = call_.DimsOf(name);
    for (int i = 0; i < dims.rank && i < whole_.rank; ++i)
      call_.Require(dims.size[i] == whole_.size[i] || dims.size[i] == 1, name, "is not a sum");
    Add(dims);
    sums_[sums_count_++] = {gradient.data, static_cast<size_t>(call_.Bytes(name))};
    return gradient;
  }

  SumWorkspace Workspace() { return {call_.Out("workspace?"), call_.Elements("workspace")}; }

  // Runs `launch(shape, dtype)`. The gradients of an empty result are empty sums.
  template <typename Launch>
  ffi::Error Run(Queue queue, const Launch& launch) {
    const DType dtype = call_.Type();
    BroadcastShape shape;
    if (!call_.failed() && !Collapse(whole_.sizes(), strides_.data(), arrays_, &shape))
      call_.Fail("the operands are broadcast in too many ways");
    return call_.Run([&] {
      if (shape.elements() == 0) return Clear(sums_, sums_count_, queue);
      return launch(shape, dtype);
    });
  }

 private:
  void Add(const Call::Dims& dims) {
    call_.Require(dims.rank == whole_.rank, "out", "has another rank than an operand");
    if (!call_.failed()) BroadcastStrides(whole_.sizes(), dims.sizes(), &strides_[arrays_]);
    ++arrays_;
  }

  Call& call_;
  const Call::Dims whole_;
  const int64_t elements_;
  int arrays_ = 0, sums_count_ = 0;
  std::array<ArrayStrides, kMaxBroadcastArrays> strides_;
  Sum sums_[kMaxGradients];
};

// ---- lerp --------------------------------------------------------------------------------------

ffi::Error Lerp(Call& call, Queue queue) {
  void* const out = call.Out("out");
  Arrays arrays(call, "out");
  const Operand operands[] = {arrays.In("start"), arrays.In("end"), arrays.In("weight")};
  return arrays.Run(queue, [&](const BroadcastShape& shape, DType dtype) {
    return backend::LerpForward(shape, dtype, operands, out, queue);
  });
}

ffi::Error LerpBackward(Call& call, Queue queue) {
  const void* const dy = call.In("dy");
  Arrays arrays(call, "dy");
  const Operand operands[] = {arrays.In("start"), arrays.In("end"), arrays.In("weight")};
  const Gradient gradients[] = {arrays.Out("dstart?"), arrays.Out("dend?"), arrays.Out("dweight?")};
  const SumWorkspace workspace = arrays.Workspace();
  return arrays.Run(queue, [&](const BroadcastShape& shape, DType dtype) {
    return backend::LerpBackward(shape, dtype, dy, operands, gradients, workspace, queue);
  });
}

// ---- bias_act ----------------------------------------------------------------------------------

// relu is bias_act without a bias, and add_relu is bias_act with a bias of the shape of x.
ffi::Error Forward(Call& call, Activation activation, const char* bias, const char* result,
                   Queue queue) {
  void* const out = call.Out(result);
  Arrays arrays(call, result);
  const Operand x = arrays.In("x");
  const Operand operands[] = {x, bias != nullptr ? arrays.In(bias) : arrays.None()};
  auto* const mask = static_cast<uint8_t*>(call.Out("mask?"));
  if (mask != nullptr) arrays.AddMask("mask");
  if (activation == Activation::kRelu) {
    call.Require(call.Elements("x") == call.Elements(result), "x", "must have the result's shape");
  }
  return arrays.Run(queue, [&](const BroadcastShape& shape, DType dtype) {
    return backend::BiasActForward(shape, dtype, activation, operands, out, mask, queue);
  });
}

ffi::Error BiasAct(Call& call, Queue queue) {
  return Forward(call, ReadActivation(call), "bias", "y", queue);
}

ffi::Error Relu(Call& call, Queue queue) {
  return Forward(call, Activation::kRelu, nullptr, "y", queue);
}

ffi::Error AddRelu(Call& call, Queue queue) {
  return Forward(call, Activation::kRelu, "y", "z", queue);
}

ffi::Error BiasActBackward(Call& call, Queue queue) {
  const Activation activation = ReadActivation(call);
  if (activation == Activation::kRelu) call.Fail("relu has bias_relu_bwd, which reads a mask");
  const void* const dy = call.In("dy");
  Arrays arrays(call, "dy");
  const Operand operands[] = {arrays.In("x"), arrays.In("bias")};
  const Gradient gradients[] = {arrays.Out("dx?"), arrays.Out("dbias?")};
  const SumWorkspace workspace = arrays.Workspace();
  return arrays.Run(queue, [&](const BroadcastShape& shape, DType dtype) {
    return backend::BiasActBackward(shape, dtype, activation, dy, operands, gradients, workspace,
                                    queue);
  });
}

ffi::Error BiasReluBackward(Call& call, Queue queue) {
  const void* const dy = call.In("dy");
  Arrays arrays(call, "dy");
  const auto* const mask = static_cast<const uint8_t*>(call.In("mask"));
  arrays.AddMask("mask");
  const Gradient gradients[] = {arrays.Out("dx?"), arrays.Out("dbias?")};
  const SumWorkspace workspace = arrays.Workspace();
  return arrays.Run(queue, [&](const BroadcastShape& shape, DType dtype) {
    return backend::BiasReluBackward(shape, dtype, dy, mask, gradients, workspace, queue);
  });
}

ffi::Error ReluBackward(Call& call, Queue queue) { return BiasReluBackward(call, queue); }

// ---- gated_act ---------------------------------------------------------------------------------

// The operands, or the halves of one array.
template <typename P>
std::pair<P, P> Halves(P both, P gate, P up, int64_t bytes) {
  return both == nullptr ? std::pair(gate, up) : std::pair(both, both + bytes);
}

// `whole` is the buffer with the shape of the result.
GatedShape GatedShapeOf(Call& call, const char* whole, bool halves) {
  const int64_t elements = call.Elements(whole), n = halves ? call.Size("n") : elements;
  return {n == 0 ? 0 : elements / n, n, halves ? 2 * n : n};
}

ffi::Error GatedAct(Call& call, Queue queue) {
  const Activation activation = ReadActivation(call);
  const DType dtype = call.Type();
  const GatedShape shape = GatedShapeOf(call, "y", call.Has("both"));
  const auto in = [&](const char* name) { return static_cast<const char*>(call.In(name)); };
  const auto [gate, up] =
      Halves(in("both?"), in("gate?"), in("up?"), shape.n * int64_t(DTypeSize(dtype)));
  auto* const y = static_cast<char*>(call.Out("y"));
  call.Require(gate != nullptr && up != nullptr, "y", "needs two operands");
  return call.Run(
      [&] { return backend::GatedActForward(shape, dtype, activation, gate, up, y, queue); });
}

ffi::Error GatedActBackward(Call& call, Queue queue) {
  const Activation activation = ReadActivation(call);
  const DType dtype = call.Type();
  const GatedShape shape = GatedShapeOf(call, "dy", call.Has("both"));
  const int64_t bytes = shape.n * int64_t(DTypeSize(dtype));
  const auto in = [&](const char* name) { return static_cast<const char*>(call.In(name)); };
  const auto out = [&](const char* name) { return static_cast<char*>(call.Out(name)); };
  const char* const dy = in("dy");
  const auto [gate, up] = Halves(in("both?"), in("gate?"), in("up?"), bytes);
  const auto [dgate, dup] = Halves(out("dboth?"), out("dgate?"), out("dup?"), bytes);
  call.Require(gate != nullptr && up != nullptr, "dy", "needs two operands");
  return call.Run([&] {
    return backend::GatedActBackward(shape, dtype, activation, dy, gate, up, dgate, dup, queue);
  });
}

FASTOPS_HANDLER("lerp", Lerp, LoadLerpKernels);
FASTOPS_HANDLER("lerp_bwd", LerpBackward, LoadLerpKernels);
FASTOPS_HANDLER("bias_act", BiasAct, LoadBiasActKernels);
FASTOPS_HANDLER("bias_act_bwd", BiasActBackward, LoadBiasActKernels);
FASTOPS_HANDLER("bias_relu_bwd", BiasReluBackward, LoadBiasActKernels);
FASTOPS_HANDLER("relu", Relu, LoadBiasActKernels);
FASTOPS_HANDLER("add_relu", AddRelu, LoadBiasActKernels);
FASTOPS_HANDLER("relu_bwd", ReluBackward, LoadBiasActKernels);
FASTOPS_HANDLER("gated_act", GatedAct, LoadGatedActKernels);
FASTOPS_HANDLER("gated_act_bwd", GatedActBackward, LoadGatedActKernels);

}  // namespace
}  // namespace jax_fastops
