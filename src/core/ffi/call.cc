#include "core/ffi/call.h"

#include <charconv>
#include <sstream>

namespace jax_fastops::inline xla {
namespace {

ffi::DataType AccumulatorType(ffi::DataType type) {
  return type == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32;
}

ffi::DataType TypeNamed(std::string_view name) {
  if (name == "uint8") return ffi::DataType::U8;
  if (name == "uint16") return ffi::DataType::U16;
  if (name == "uint32") return ffi::DataType::U32;
  if (name == "bool") return ffi::DataType::PRED;
  if (name == "int32") return ffi::DataType::S32;
  if (name == "float32") return ffi::DataType::F32;
  if (name == "bfloat16") return ffi::DataType::BF16;
  if (name == "float16") return ffi::DataType::F16;
  if (name == "float64") return ffi::DataType::F64;
  return ffi::DataType::INVALID;
}

bool ReadNumber(std::string_view text, int64_t* number) {
  if (!text.empty() && text.front() == '+') text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size();
}

// Takes the text up to a delimiter, and the delimiter, from the front of `*text`.
std::string_view Take(std::string_view* text, char delimiter) {
  size_t end = 0;
  while (end < text->size() && (*text)[end] != delimiter) ++end;
  const std::string_view taken = text->substr(0, end);
  text->remove_prefix(end + (end < text->size() ? 1 : 0));
  return taken;
}

}  // namespace

int64_t WholeBytes(ffi::DataType type) {
  using enum ffi::DataType;
  constexpr auto kWhole =
      [](auto... types) {
        return (... | (uint64_t{1} << static_cast<int>(types)));
      }(PRED, S8, S16, S32, S64, U8, U16, U32, U64, F16, F32, F64, BF16, C64, C128, F8E5M2, F8E4M3,
        F8E4M3FN, F8E4M3B11FNUZ, F8E5M2FNUZ, F8E4M3FNUZ, F8E3M4, F8E8M0FNU);
  const auto bit = static_cast<unsigned>(type);
  return bit < 64 && (kWhole >> bit & 1) != 0 ? static_cast<int64_t>(ffi::ByteWidth(type)) : 0;
}

#ifdef FASTOPS_CUDA
ffi::Error ToError(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_fastops.") + op + ": " + cudaGetErrorName(status) +
                              ": " + cudaGetErrorString(status));
}
#endif

Call::Call(const char* op, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
           const ffi::Dictionary& attributes)
    : op_(op), attributes_(attributes) {
  none_.data = nullptr;
  text_ = Attribute<std::string_view>("buffers");
  batch_first_ = attributes.contains("batch_first") && Attribute<bool>("batch_first");
  if (!failed_) Parse(text_, args, rets);
  if (!failed_) Bind();
}

// ---- The description ---------------------------------------------------------------------------

// Words are separated by one space, and buffers by commas: "x:", "...", "n,", "->", ":acc".
void Call::Parse(std::string_view text, const ffi::RemainingArgs& args,
                 const ffi::RemainingRets& rets) {
  size_t next_arg = 0, next_ret = 0;
  bool results = false;
  Buffer* buffer = nullptr;
  while (!text.empty() && !failed_) {
    std::string_view word = Take(&text, ' ');
    const bool last = !word.empty() && word.back() == ',';
    if (last) word.remove_suffix(1);
    if (word == "->") {
      results = true;
      buffer = nullptr;
    } else if (word.size() > 1 && word.back() == ':') {
      if (buffers_count_ == kMaxBuffers) return Fail("too many buffers");
      if (results ? next_ret >= rets.size() : next_arg >= args.size())
        return Fail("fewer buffers than in '" + std::string(text_) + "'");
      const ffi::AnyBuffer given =
          results ? **rets.get<ffi::AnyBuffer>(next_ret++) : *args.get<ffi::AnyBuffer>(next_arg++);
      buffer = &buffers_[buffers_count_++];
      buffer->name = word.substr(0, word.size() - 1);
      buffer->type = std::string_view();
      buffer->first = dims_count_;
      buffer->count = 0;
      buffer->batched = buffer->spread = buffer->read = false;
      buffer->result = results;
      buffer->element = given.element_type();
      buffer->dims = given.dimensions().begin();
      buffer->rank = static_cast<int>(given.dimensions().size());
      buffer->data = given.untyped_data();
    } else if (buffer == nullptr) {
      return Fail("cannot read '" + std::string(text_) + "'");
    } else if (word == "..." || word == "~...") {
      buffer->batched = true;
      buffer->spread = word.front() == '~';
    } else if (word.size() > 1 && word.front() == ':') {
      buffer->type = word.substr(1);
    } else if (dims_count_ < kMaxDims && ParseDim(word, &dims_[dims_count_])) {
      ++dims_count_;
      ++buffer->count;
    } else {
      return Fail("cannot read '" + std::string(word) + "' in '" + std::string(text_) + "'");
    }
    if (last) buffer = nullptr;
  }
  if (next_arg != args.size() || next_ret != rets.size() || next_arg == 0)
    Fail("more buffers than in '" + std::string(text_) + "'");
}

bool Call::ParseDim(std::string_view word, Dim* dim) {
  *dim = Dim{0, false, false, {}, 1, 0};
  if (word.empty()) return false;
  if (word.front() == '*') {
    dim->star = true;
    word.remove_prefix(1);
  }
  if (word.empty() || (word.front() >= '0' && word.front() <= '9'))
    return ReadNumber(word, &dim->number);
  if (word.starts_with("ceil(") && word.back() == ')') {
    word = word.substr(5, word.size() - 6);
    std::string_view names = Take(&word, '/');
    while (!names.empty()) {
      if (dim->names == kMaxFactors) return false;
      dim->name[dim->names++] = static_cast<int16_t>(NameOf(Take(&names, '*')));
    }
    return ReadNumber(word, &dim->divisor) && dim->divisor > 0 && dim->names > 0;
  }
  size_t end = 0;
  while (end < word.size() && word[end] != '=' && word[end] != '+' && word[end] != '-') ++end;
  dim->names = 1;
  dim->name[0] = static_cast<int16_t>(NameOf(word.substr(0, end)));
  if (end == word.size()) return !failed_;
  dim->sized = word[end] == '=';
  return ReadNumber(word.substr(end + (dim->sized ? 1 : 0)), &dim->number) && !failed_;
}

int Call::NameOf(std::string_view text) {
  for (int i = 0; i < names_count_; ++i) {
    if (std::string_view(names_[i].text) == text) return i;
  }
  if (names_count_ == kMaxNames) {
    Fail("too many names");
    return 0;
  }
  Name& name = names_[names_count_];
  name.text = text;
  name.size = name.star = -1;
  return names_count_++;
}

// ---- The checks --------------------------------------------------------------------------------

void Call::Bind() {
  const Buffer* lead = nullptr;   // has the dimensions of `...`
  const Buffer* order = nullptr;  // has the order of the dimensions with a star
  bool own = false;
  for (int b = 0; b < buffers_count_; ++b) {
    const Buffer& buffer = buffers_[b];
    if (lead == nullptr && buffer.batched && !buffer.spread) lead = &buffer;
    for (int i = 0; i < buffer.count; ++i) {
      const bool star = dims_[buffer.first + i].star;
      own = own || !star;
      if (star && (order == nullptr || (buffer.result && !order->result))) order = &buffer;
    }
  }
  if (batch_first_) {
    pad_ = own ? 0 : 1;
    for (int i = 0; order != nullptr && i < order->count; ++i) {
      const Dim& dim = dims_[order->first + i];
      if (dim.star) names_[dim.name[0]].star = stars_++;
    }
  }
  if (lead != nullptr) {
    rank_ = lead->rank - lead->count - pad_;
    if (rank_ < 0 || lead->rank > kMaxRank)
      return Fail(Describe(*lead) + " does not fit '" + std::string(text_) + "'");
    for (int d = 0; d < rank_; ++d) batch_ *= lead->dims[d];
  }
  for (const bool derived : {false, true}) {
    for (int b = 0; b < buffers_count_; ++b) {
      const Buffer& buffer = buffers_[b];
      const int rank = (buffer.batched ? rank_ : 0) + buffer.count + pad_;
      bool fits = buffer.rank == rank && rank <= kMaxRank && CheckShape(buffer, derived);
      for (int d = 0; fits && buffer.batched && d < rank_; ++d) {
        const int64_t size = buffer.dims[d], whole = lead == nullptr ? size : lead->dims[d];
        fits = size == whole || (buffer.spread && size > 0);
      }
      if (fits && derived && !CheckType(buffer)) fits = false;
      if (!fits) {
        return Fail(Describe(buffer) + " and " + Describe(buffers_[b == 0 ? 1 : 0]) +
                    " do not fit '" + std::string(text_) + "'");
      }
    }
  }
}

// First names get their sizes, then the sizes derived from names are compared.
bool Call::CheckShape(const Buffer& buffer, bool derived) {
  int own = 0;
  if (pad_ != 0 && buffer.dims[buffer.rank - 1] != 1) return false;
  for (int i = 0; i < buffer.count; ++i) {
    const Dim& dim = dims_[buffer.first + i];
    const int place = Place(buffer, i, &own);
    // Batch-first, every buffer with `...` has the stars of the result.
    const bool known = !batch_first_ || !dim.star || names_[dim.name[0]].star >= 0;
    if (!known || place >= buffer.rank) return false;
    const int64_t size = buffer.dims[place];
    const bool loose = buffer.spread && dim.star;
    const bool plain = dim.names == 1 && dim.divisor == 1 && (dim.sized || dim.number == 0);
    if (plain && !derived && !loose) {
      int64_t& known = names_[dim.name[0]].size;
      if (known < 0) known = size;
      if (known != size || (dim.sized && size != dim.number)) return false;
    } else if (derived && size != Resolve(dim) && !(loose && size > 0)) {
      return false;
    }
  }
  return true;
}

int64_t Call::Resolve(const Dim& dim) const {
  if (dim.names == 0) return dim.number;
  int64_t product = 1;
  for (int f = 0; f < dim.names; ++f) {
    const int64_t size = names_[dim.name[f]].size;
    if (size < 0) return -1;
    product *= size;
  }
  return (product + dim.divisor - 1) / dim.divisor + (dim.sized ? 0 : dim.number);
}

int Call::Place(const Buffer& buffer, int i, int* own) const {
  const Dim& dim = dims_[buffer.first + i];
  const int lead = buffer.batched ? rank_ : 0;
  if (!batch_first_ || !buffer.batched) return lead + i;
  return lead + (dim.star ? names_[dim.name[0]].star : stars_ + (*own)++);
}

bool Call::CheckType(const Buffer& buffer) const {
  const ffi::DataType first = buffers_[0].element, wide = AccumulatorType(first);
  const std::string_view type = buffer.type;
  if (type.empty()) return buffer.element == first;
  if (type == "acc") return buffer.element == wide;
  if (type == "acc?") return buffer.element == first || buffer.element == wide;
  return buffer.element == TypeNamed(type);
}

// ---- What a handler reads ----------------------------------------------------------------------

int Call::IndexOf(std::string_view name) const {
  if (!name.empty() && name.back() == '?') name.remove_suffix(1);
  for (int b = 0; b < buffers_count_; ++b) {
    if (std::string_view(buffers_[b].name) == name) return b;
  }
  return -1;
}

Call::Buffer& Call::Find(std::string_view name, bool result) {
  const int index = failed_ ? -1 : IndexOf(name);
  if (index >= 0 && buffers_[index].result == result) {
    buffers_[index].read = true;
    return buffers_[index];
  }
  if (index >= 0 || name.back() != '?') Fail("no buffer '" + std::string(name) + "'");
  return none_;
}

ffi::DataType Call::TypeOf(std::string_view name) const {
  const int index = IndexOf(name);
  return index < 0 ? ffi::DataType::INVALID : buffers_[index].element;
}

bool Call::Wide(std::string_view name) {
  if (failed_ || !Has(name)) return false;
  const ffi::DataType type = TypeOf(name), first = buffers_[0].element;
  if (type == first) return false;
  Require(type == AccumulatorType(first), name, "must have the element or accumulator type");
  return true;
}

Call::Dims Call::DimsOf(std::string_view name) {
  Dims dims;
  const int index = failed_ ? -1 : IndexOf(name);
  if (index < 0) {
    Fail("no buffer '" + std::string(name) + "'");
    return dims;
  }
  const Buffer& buffer = buffers_[index];
  for (; buffer.batched && dims.rank < rank_; ++dims.rank) {
    dims.size[dims.rank] = buffer.dims[dims.rank];
    dims.name[dims.rank] = -1;
  }
  for (int i = 0, own = 0; i < buffer.count; ++i, ++dims.rank) {
    const Dim& dim = dims_[buffer.first + i];
    dims.size[dims.rank] = buffer.dims[Place(buffer, i, &own)];
    dims.name[dims.rank] = dim.names == 0 ? -1 : dim.name[0];
  }
  return dims;
}

int64_t Call::Elements(std::string_view name) {
  const int index = failed_ ? -1 : IndexOf(name);
  if (index < 0) return 0;
  int64_t count = 1;
  for (const int64_t size : buffers_[index].shape()) count *= size;
  return count;
}

Call::Axis Call::AxisOf(std::string_view buffer, std::string_view dimension) {
  const Dims dims = DimsOf(buffer);
  Axis axis;
  bool found = false;
  for (int i = 0; i < dims.rank; ++i) {
    if (!found && dims.name[i] >= 0 && std::string_view(names_[dims.name[i]].text) == dimension) {
      axis.index = i;
      axis.size = dims.size[i];
      found = true;
    } else {
      (found ? axis.inner : axis.outer) *= dims.size[i];
    }
  }
  Require(found, buffer, "lacks a dimension");
  return axis;
}

int64_t Call::Size(std::string_view name, int64_t absent) {
  for (int i = 0; i < names_count_; ++i) {
    if (std::string_view(names_[i].text) == name && names_[i].size >= 0) return names_[i].size;
  }
  if (absent < 0) Fail("no dimension '" + std::string(name) + "'");
  return absent < 0 ? 0 : absent;
}

DType Call::Type() {
  if (failed_) return DType::kF32;
  switch (buffers_[0].element) {
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::F64:
      return DType::kF64;
    default:
      Fail(Describe(buffers_[0]) + " must be f32, bf16, f16 or f64");
      return DType::kF32;
  }
}

int64_t Call::ItemSize() {
  if (failed_) return 1;
  const int64_t bytes = WholeBytes(buffers_[0].element);
  if (bytes == 0) Fail(Describe(buffers_[0]) + " has elements of unknown size");
  return bytes;
}

void Call::Fail(const std::string& what) {
  if (!failed_) what_ = std::string("jax_fastops.") + op_ + ": " + what;
  failed_ = true;
}

void Call::Require(bool valid, std::string_view buffer, const char* what) {
  if (valid || failed_) return;
  const int index = IndexOf(buffer);
  Fail((index < 0 ? std::string(buffer) : Describe(buffers_[index])) + " " + what);
}

void Call::Finish() {
  for (int b = 0; b < buffers_count_ && !failed_; ++b) {
    if (!buffers_[b].read) Fail("does not know the buffer " + Describe(buffers_[b]));
  }
  if (attributes_read_ < attributes_.size()) {
    Fail("knows " + std::to_string(attributes_read_) + " of the call's " +
         std::to_string(attributes_.size()) + " attributes");
  }
}

// "x f32[2,3]"
std::string Call::Describe(const Buffer& buffer) const {
  std::ostringstream out;
  out << std::string_view(buffer.name) << " " << buffer.element << "[";
  for (int i = 0; i < buffer.rank; ++i) out << (i == 0 ? "" : ",") << buffer.dims[i];
  out << "]";
  return out.str();
}

}  // namespace jax_fastops::inline xla
