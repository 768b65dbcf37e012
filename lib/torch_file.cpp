// torch.save's zip file (torch/csrc/jit/serialization, torch/serialization.py): NAME/data.pkl is a pickle in which
// storages are persistent ids ('storage', TYPE, KEY, LOCATION, ELEMENTS), their bytes NAME/data/KEY; NAME/byteorder
// says "little". Tensors are calls of torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad,
// hooks, metadata), or of functions around one (torch/_utils.py, torch/_tensor.py).
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>

#include "lib/checkpoint_readers.h"
#include "lib/error.h"
#include "lib/pickle.h"
#include "lib/zip_file.h"

namespace forkpoint {
namespace {

using Type = PickleValue::Type;

struct TypeName {
  std::string_view torch, storage;
  DType dtype;
};
constexpr TypeName kTypeNames[] = {
    {"float32", "FloatStorage", DType::f32},       {"float64", "DoubleStorage", DType::f64},
    {"float16", "HalfStorage", DType::f16},        {"bfloat16", "BFloat16Storage", DType::bf16},
    {"int64", "LongStorage", DType::i64},          {"int32", "IntStorage", DType::i32},
    {"int16", "ShortStorage", DType::i16},         {"int8", "CharStorage", DType::i8},
    {"uint8", "ByteStorage", DType::u8},           {"bool", "BoolStorage", DType::boolean},
    {"complex64", "ComplexFloatStorage", DType::c64}, {"complex128", "ComplexDoubleStorage", DType::c128},
    {"uint16", "", DType::u16},                    {"uint32", "", DType::u32},
    {"uint64", "", DType::u64},                    {"float8_e4m3fn", "Float8_e4m3fnStorage", DType::f8e4m3},
    {"float8_e5m2", "Float8_e5m2Storage", DType::f8e5m2}, {"float4_e2m1fn_x2", "", DType::f4x2}};

struct Storage {
  FileSlice bytes;
  DType dtype = DType::raw;  // raw: an untyped one
};

class TorchReader {
 public:
  explicit TorchReader(const FileSlice& file) : file_(file), zip_(file) {
    for (const auto& [name, entry] : zip_.entries()) {
      const size_t slash = name.find('/');
      if (slash != name.npos && name.substr(slash) == "/data.pkl") root_ = name.substr(0, slash + 1);
    }
    if (root_.empty()) throw Error(fmt::format("{}: a zip file without data.pkl: torch.save did not write it.", file.path()));
    if (zip_.entries().contains(root_ + "byteorder")) {
      const FileSlice order = zip_.open(root_ + "byteorder");
      if (order.text(0, order.size_bytes(), "byteorder") != "little") {
        throw Error(fmt::format("{}: its byte order is not little-endian, which is all that is read.", file.path()));
      }
    }
    const FileSlice data = zip_.open(root_ + "data.pkl");
    const std::string bytes = data.text(0, data.size_bytes(), "data.pkl");
    pickle_ = Pickle::parse(bytes, fmt::format("{}: {}data.pkl", file.path(), root_));
  }

  void add_all(const std::string& prefix, LeafAdder* leaves) {
    leaves_ = leaves;
    walk(pickle_.root(), {prefix, prefix.empty() ? "root" : "object"}, 0);
  }
  Pickle take_pickle() { return std::move(pickle_); }
  std::optional<CheckpointTensor> only_tensor() const {
    Extras extras;
    auto tensor = tensor_of(pickle_[pickle_.root()], 0, &extras);
    return extras.empty() ? std::move(tensor) : std::nullopt;
  }

 private:
  // What belongs to a tensor beside its values: a name for it, and where it is.
  using Extras = std::vector<std::pair<std::string_view, PickleId>>;

  [[noreturn]] void fail(const std::string& what) const { throw Error(fmt::format("{}: {}.", file_.path(), what)); }
  const PickleValue& at(PickleId id) const { return pickle_[id]; }
  PickleId argument_id(const PickleValue& call, size_t index) const {
    const auto& items = at(call.arguments).items;
    if (index >= items.size()) fail(fmt::format("{} has too few arguments", pickle_.callable_name(call)));
    return items[index];
  }
  const PickleValue& argument(const PickleValue& call, size_t index) const { return at(argument_id(call, index)); }
  const PickleValue& item(const PickleValue& tuple, size_t index) const {
    if (index >= tuple.items.size()) fail("a tensor has too few arguments");
    return at(tuple.items[index]);
  }

  Storage storage_of(const PickleValue& id) const;
  std::vector<int64_t> numbers(const PickleValue& value) const;
  std::optional<CheckpointTensor> tensor_of(const PickleValue& value, int depth, Extras* extras) const;
  std::optional<CheckpointTensor> of_subclass(const PickleValue& value, Extras* extras) const;
  CheckpointTensor rebuilt(const PickleValue& arguments, bool has_dtype, Extras* extras) const;
  void set_metadata(const PickleValue& metadata, CheckpointTensor* tensor) const;
  CheckpointTensor bare_storage(const PickleValue& value) const;
  std::string key_text(PickleId id);
  std::string scalar_text(const PickleValue& value) const;
  std::string exact_text(PickleId id, int depth);
  std::string exact_list(std::string text, const std::vector<PickleId>& items, int depth);
  void walk(PickleId id, const LeafPath& path, int depth);
  void walk_object(const PickleValue& value, const LeafPath& path, int depth);
  void walk_children(const PickleValue& value, const LeafPath& path, int depth);
  bool walk_set(const PickleValue& value, const LeafPath& path);

  FileSlice file_;
  ZipFile zip_;
  std::string root_;
  Pickle pickle_;
  LeafAdder* leaves_ = nullptr;
  size_t steps_ = 0;
};

std::vector<int64_t> TorchReader::numbers(const PickleValue& value) const {
  // torch.Size is a call with a tuple.
  if (pickle_.callable_name(value) == "torch.Size") return numbers(argument(value, 0));
  if (value.type != Type::tuple && value.type != Type::list) fail("a shape is no tuple");
  std::vector<int64_t> result;
  for (const PickleId id : value.items) {
    if (at(id).type != Type::integer) fail("a shape holds something that is no number");
    result.push_back(at(id).integer);
  }
  return result;
}

Storage TorchReader::storage_of(const PickleValue& id) const {
  if (id.type != Type::persistent) fail("a tensor has no storage");
  const PickleValue& what = at(id.arguments);
  if (what.type != Type::tuple || what.items.size() < 5 || at(what.items[0]).text != "storage") {
    fail("a persistent value is no storage");
  }
  const std::string& type = at(what.items[1]).text;
  const PickleValue& elements = at(what.items[4]);
  Storage storage{zip_.open(root_ + "data/" + at(what.items[2]).text)};
  const std::string_view name = std::string_view(type).substr(type.rfind('.') + 1);
  const auto* known = std::find_if(std::begin(kTypeNames), std::end(kTypeNames), [&](auto& t) { return t.storage == name; });
  if (known != std::end(kTypeNames) && !name.empty()) {
    storage.dtype = known->dtype;
  } else if (name != "UntypedStorage") {
    fail(fmt::format("a storage of the type {} is not known", type));
  }
  const auto expected = static_cast<unsigned __int128>(elements.integer) * static_cast<unsigned>(size_bytes(storage.dtype));
  if (elements.type != Type::integer || elements.integer < 0 || expected != storage.bytes.size_bytes()) {
    fail(fmt::format("the storage {} has {} bytes, expected {} elements of {}", at(what.items[2]).text,
                     storage.bytes.size_bytes(), elements.integer, type));
  }
  return storage;
}

// torch.Tensor's conj and neg bits. A kind of tensor from outside of torch may put there whatever its own code reads.
void TorchReader::set_metadata(const PickleValue& metadata, CheckpointTensor* tensor) const {
  if (metadata.type == Type::none) return;
  if (metadata.type != Type::dict) fail("the metadata of a tensor are no dict");
  TensorPart& part = tensor->parts.front();
  for (size_t i = 0; i + 1 < metadata.entries.size(); i += 2) {
    const PickleValue &key = at(metadata.entries[i]), &value = at(metadata.entries[i + 1]);
    const bool known =
        key.type == Type::text && value.type == Type::boolean && (key.text == "conj" || key.text == "neg");
    if (!known) {
      tensor->unread = fmt::format("its metadata hold `{}`, which is not known", key.text);
    } else {
      (key.text == "conj" ? part.conjugate : part.negative) = value.integer != 0;
    }
  }
  constexpr DType kSigned[] = {DType::f16, DType::bf16, DType::f32, DType::f64, DType::c64, DType::c128};
  const bool has_sign = std::find(std::begin(kSigned), std::end(kSigned), tensor->dtype) != std::end(kSigned);
  if ((part.conjugate || part.negative) && !has_sign)
    tensor->unread = fmt::format("it is a negated view of {}", name(tensor->dtype));
}

// The arguments of _rebuild_tensor_v2, and (with a dtype at the 7th place, an untyped storage and an offset in
// elements) of _rebuild_tensor_v3.
CheckpointTensor TorchReader::rebuilt(const PickleValue& arguments, bool has_dtype, Extras* extras) const {
  CheckpointTensor tensor;
  Storage storage = storage_of(item(arguments, 0));
  tensor.dtype = storage.dtype;
  if (has_dtype) {
    const std::string& name = item(arguments, 6).text;
    if (!torch_dtype(name, &tensor.dtype)) fail(fmt::format("tensors of the type {} are not known", name));
  } else if (storage.dtype == DType::raw) {
    fail("a tensor has an untyped storage and no type");
  }
  tensor.dtype_name = name(tensor.dtype);
  tensor.shape = numbers(item(arguments, 2));
  const PickleValue& offset = item(arguments, 1);
  if (offset.type != Type::integer || offset.integer < 0 || offset.integer > INT64_MAX / 16) fail("a tensor has no sensible offset");
  TensorPart part{storage.bytes,
                  static_cast<uint64_t>(offset.integer) * static_cast<uint64_t>(size_bytes(tensor.dtype)), tensor.shape,
                  numbers(item(arguments, 3)), std::vector<int64_t>(tensor.shape.size(), 0)};
  check_part(part, tensor.dtype, "a tensor");
  tensor.parts.push_back(std::move(part));
  if (item(arguments, 4).type == Type::boolean) tensor.requires_grad = item(arguments, 4).integer != 0;
  const PickleValue& hooks = item(arguments, 5);  // none since torch 1.0
  if (!hooks.entries.empty() || !hooks.items.empty()) extras->emplace_back("@hooks", arguments.items[5]);
  if (const size_t place = has_dtype ? 7 : 6; place < arguments.items.size())
    set_metadata(item(arguments, place), &tensor);
  return tensor;
}

CheckpointTensor TorchReader::bare_storage(const PickleValue& value) const {
  const Storage storage = storage_of(value);
  CheckpointTensor tensor;
  tensor.dtype = storage.dtype;
  tensor.dtype_name = name(tensor.dtype);
  tensor.shape = {static_cast<int64_t>(storage.bytes.size_bytes()) / size_bytes(tensor.dtype)};
  tensor.parts.push_back({storage.bytes, 0, tensor.shape, {1}, {0}});
  return tensor;
}

// _rebuild_from_type_v2(function, class, arguments, state): a subclass, or a tensor with attributes of its own.
std::optional<CheckpointTensor> TorchReader::of_subclass(const PickleValue& value, Extras* extras) const {
  const std::string& function = argument(value, 0).text;
  const bool v2 = function == "torch._utils._rebuild_tensor_v2", v3 = function == "torch._utils._rebuild_tensor_v3";
  const PickleValue& type = argument(value, 1);
  if ((!v2 && !v3) || argument(value, 2).type != Type::tuple) return {};
  if (type.text != "torch.Tensor") extras->emplace_back("@class", argument_id(value, 1));
  if (argument(value, 3).type != Type::none) extras->emplace_back("@", argument_id(value, 3));
  return rebuilt(argument(value, 2), v3, extras);
}

std::optional<CheckpointTensor> TorchReader::tensor_of(const PickleValue& value, int depth, Extras* extras) const {
  if (value.type == Type::persistent) return bare_storage(value);
  const std::string_view call = pickle_.callable_name(value);
  if (call == "torch._utils._rebuild_tensor_v2") return rebuilt(at(value.arguments), false, extras);
  if (call == "torch._utils._rebuild_tensor_v3") return rebuilt(at(value.arguments), true, extras);
  if (call == "torch._tensor._rebuild_from_type_v2") return of_subclass(value, extras);
  const bool with_state = call == "torch._utils._rebuild_parameter_with_state";
  if ((call != "torch._utils._rebuild_parameter" && !with_state) || depth >= 2) return {};
  std::optional<CheckpointTensor> tensor = tensor_of(argument(value, 0), depth + 1, extras);
  if (!tensor) return {};
  if (argument(value, 1).type == Type::boolean) tensor->requires_grad = argument(value, 1).integer != 0;
  const PickleValue& hooks = argument(value, 2);
  if (!hooks.entries.empty() || !hooks.items.empty()) extras->emplace_back("@hooks", argument_id(value, 2));
  if (with_state) extras->emplace_back("@", argument_id(value, 3));
  return tensor;
}

std::string TorchReader::scalar_text(const PickleValue& value) const {
  switch (value.type) {
    case Type::none: return "None";
    case Type::boolean: return value.integer ? "True" : "False";
    case Type::integer: return fmt::format("{}", value.integer);
    case Type::big_integer: return bytes_text("int", value.text);
    case Type::real: {
      uint64_t bits = 0;
      std::memcpy(&bits, &value.real, sizeof(bits));
      if (std::isnan(value.real)) return fmt::format("nan (0x{:016x})", bits);
      return fmt::format("{}{}", value.real, std::trunc(value.real) == value.real && std::abs(value.real) < 1e16 ? ".0" : "");
    }
    case Type::text: return bytes_text("", value.text);
    case Type::bytes: return bytes_text("bytes", value.text);
    case Type::global: return fmt::format("<{}>", value.text);
    default: return {};
  }
}

std::string TorchReader::exact_list(std::string text, const std::vector<PickleId>& items, int depth) {
  text += '(';
  for (const PickleId id : items) text += exact_text(id, depth + 1) + ",";
  return text + ")";
}

// Of a key, or of what a set holds: equal only for what is equal. Throws where it holds a tensor.
std::string TorchReader::exact_text(PickleId id, int depth) {
  constexpr int kMaxKeyDepth = 20;
  if (depth > kMaxKeyDepth) fail("a key is nested too deeply");
  if (++steps_ > kMaxLeaves) fail(fmt::format("it holds more than {} values", kMaxLeaves));
  const PickleValue& value = at(id);
  switch (value.type) {
    case Type::text:
      return exact_quoted(value.text);
    case Type::persistent:
      fail("a key or an item of a set holds a tensor");
    case Type::tuple:
      return exact_list("", value.items, depth);
    case Type::list:
      return exact_list("list", value.items, depth);
    case Type::dict:
      return exact_list("dict", value.entries, depth);
    case Type::set: {
      std::vector<std::string> items;
      for (const PickleId item : value.items) items.push_back(exact_text(item, depth + 1));
      std::sort(items.begin(), items.end());
      return fmt::format("set({})", fmt::join(items, ","));
    }
    case Type::object: {
      std::string text = exact_list(exact_text(value.callable, depth + 1), at(value.arguments).items, depth);
      if (!value.items.empty()) text += exact_list("+", value.items, depth);
      if (!value.entries.empty()) text += exact_list("=", value.entries, depth);
      return value.state == 0 ? text : fmt::format("{}@{}", text, exact_text(value.state, depth + 1));
    }
    default:
      return scalar_text(value);
  }
}

// For people: as Python writes it, for the most part.
std::string TorchReader::key_text(PickleId id) {
  const PickleValue& value = at(id);
  if (value.type == Type::text) return value.text;
  if (value.type != Type::tuple) return exact_text(id, 0);
  std::string text = "(";
  for (const PickleId part : value.items) {
    const bool text_part = at(part).type == Type::text;
    text += fmt::format("{}{}", text.size() > 1 ? ", " : "", text_part ? scalar_text(at(part)) : exact_text(part, 0));
  }
  return text + ")";
}

// The order of a set of strings is another one in each process. false: it holds tensors.
bool TorchReader::walk_set(const PickleValue& value, const LeafPath& path) {
  std::vector<std::string> items;
  try {
    for (const PickleId id : value.items) items.push_back(exact_text(id, 0));
  } catch (const Error&) {
    return false;
  }
  std::sort(items.begin(), items.end());
  leaves_->value(path, bytes_text("set", fmt::format("{}", fmt::join(items, ", "))));
  return true;
}

void TorchReader::walk_children(const PickleValue& value, const LeafPath& path, int depth) {
  const std::string_view container = value.type == Type::tuple ? "tuple" : value.type == Type::set ? "set" : "list";
  for (size_t i = 0; i < value.items.size(); ++i) walk(value.items[i], path.item(container, i), depth + 1);
  for (size_t i = 0; i + 1 < value.entries.size(); i += 2) {
    const PickleId key = value.entries[i];
    walk(value.entries[i + 1], path.other(key_text(key), fmt::format("[{}]", exact_text(key, 0))), depth + 1);
  }
  if (value.items.empty() && value.entries.empty() && value.type != Type::object) {
    leaves_->value(path, value.type == Type::dict ? "{}" : value.type == Type::list ? "[]" : "()");
  }
}

void TorchReader::walk_object(const PickleValue& value, const LeafPath& path, int depth) {
  const std::string_view call = pickle_.callable_name(value);
  // numpy 2 moved its functions; what they make is the same.
  const std::string name(call.starts_with("numpy._core.") ? fmt::format("numpy.core.{}", call.substr(12))
                                                          : std::string(call));
  if (!call.empty()) {
    leaves_->opaque(call);
    leaves_->value(path, fmt::format("<{}>", name));
  } else {
    walk(value.callable, path.other("()", "()"), depth + 1);
  }
  const auto& arguments = at(value.arguments).items;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string place = fmt::format("({})", i);
    walk(arguments[i], path.other(place, place), depth + 1);
  }
}

void TorchReader::walk(PickleId id, const LeafPath& path, int depth) {
  if (depth > kMaxLeafDepth) {
    fail(fmt::format("`{}...` is nested more than {} deep, or holds itself", path.name.substr(0, 60), kMaxLeafDepth));
  }
  if (++steps_ > kMaxLeaves) fail(fmt::format("it holds more than {} values", kMaxLeaves));
  const PickleValue& value = at(id);
  Extras extras;
  if (auto tensor = tensor_of(value, 0, &extras)) {
    leaves_->tensor(path, std::move(*tensor));
    if (!value.items.empty() || !value.entries.empty())
      fail(fmt::format("the tensor `{}` is a container too", path.name));
    if (value.state != 0) extras.emplace_back("@state", value.state);
    for (const auto& [name, extra] : extras) walk(extra, path.other(name, fmt::format(".{}", name)), depth + 1);
    return;
  }
  if (std::string text = scalar_text(value); !text.empty()) {
    if (value.type == Type::global && !value.text.starts_with("torch.")) leaves_->opaque(value.text);
    return leaves_->value(path, std::move(text));
  }
  if (value.type == Type::set && walk_set(value, path)) return;
  if (value.type == Type::object) {
    const std::string_view call = pickle_.callable_name(value);
    // Protocol 2 calls set([...]), and encodes bytes.
    const bool set = call.ends_with("builtin__.set") || call.ends_with("builtin__.frozenset");
    if (set && walk_set(argument(value, 0), path)) return;
    if (call == "_codecs.encode" && !at(value.arguments).items.empty()) {
      return leaves_->value(path, bytes_text("bytes", argument(value, 0).text));
    }
    walk_object(value, path, depth);
  }
  walk_children(value, path, depth);
  if (value.state != 0)
    walk(value.state, path.other("@", ".@"), depth + 1);  // attributes, such as state_dict's _metadata
}

}  // namespace

bool torch_dtype(std::string_view name, DType* dtype) {
  if (name.starts_with("torch.")) name.remove_prefix(6);
  const auto* known = std::find_if(std::begin(kTypeNames), std::end(kTypeNames), [&](auto& t) { return t.torch == name; });
  if (known == std::end(kTypeNames)) return false;
  *dtype = known->dtype;
  return true;
}

void read_torch_file(const FileSlice& file, const std::string& prefix, LeafAdder* leaves) {
  TorchReader(file).add_all(prefix, leaves);
}

Pickle torch_pickle(const FileSlice& file) { return TorchReader(file).take_pickle(); }

CheckpointTensor read_torch_tensor(const FileSlice& file) {
  auto tensor = TorchReader(file).only_tensor();
  if (!tensor) throw Error(fmt::format("{}: at byte {}, expected one tensor of torch.save.", file.path(), file.file_offset()));
  if (!tensor->unread.empty())
    throw Error(fmt::format("{}: at byte {}, a tensor: {}.", file.path(), file.file_offset(), tensor->unread));
  return std::move(*tensor);
}

}  // namespace forkpoint
