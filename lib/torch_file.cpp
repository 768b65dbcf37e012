// torch.save's zip file (torch/csrc/jit/serialization, torch/serialization.py): NAME/data.pkl is a pickle in which storages are
// persistent ids ('storage', TYPE, KEY, LOCATION, ELEMENTS), their bytes NAME/data/KEY; NAME/byteorder says "little".
// Tensors are calls of torch._utils._rebuild_tensor_v2(storage, offset, size, stride, ...).
#include <fmt/format.h>

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
    walk(pickle_.root(), prefix, 0);
  }
  Pickle take_pickle() { return std::move(pickle_); }
  std::optional<CheckpointTensor> only_tensor() { return tensor_of(pickle_[pickle_.root()], 0); }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw Error(fmt::format("{}: {}.", file_.path(), what)); }
  const PickleValue& at(PickleId id) const { return pickle_[id]; }
  const PickleValue& argument(const PickleValue& call, size_t index) const {
    const auto& items = at(call.arguments).items;
    if (index >= items.size()) fail(fmt::format("{} has too few arguments", pickle_.callable_name(call)));
    return at(items[index]);
  }

  Storage storage_of(const PickleValue& id) const;
  std::vector<int64_t> numbers(const PickleValue& value) const;
  std::optional<CheckpointTensor> tensor_of(const PickleValue& value, int depth) const;
  CheckpointTensor rebuilt(const PickleValue& call, bool has_dtype) const;
  CheckpointTensor bare_storage(const PickleValue& value) const;
  std::string key_text(PickleId id) const;
  std::string scalar_text(const PickleValue& value) const;
  void walk(PickleId id, const std::string& path, int depth);
  void walk_children(const PickleValue& value, const std::string& path, int depth);
  bool walk_set(const PickleValue& value, const std::string& path);

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

// _rebuild_tensor_v2 and (with a dtype at the 7th place, an untyped storage and an offset in elements) _rebuild_tensor_v3.
CheckpointTensor TorchReader::rebuilt(const PickleValue& call, bool has_dtype) const {
  CheckpointTensor tensor;
  Storage storage = storage_of(argument(call, 0));
  tensor.dtype = storage.dtype;
  if (has_dtype) {
    const std::string& name = argument(call, 6).text;
    if (!torch_dtype(name, &tensor.dtype)) fail(fmt::format("tensors of the type {} are not known", name));
  } else if (storage.dtype == DType::raw) {
    fail("a tensor has an untyped storage and no type");
  }
  tensor.dtype_name = name(tensor.dtype);
  tensor.shape = numbers(argument(call, 2));
  const PickleValue& offset = argument(call, 1);
  if (offset.type != Type::integer || offset.integer < 0 || offset.integer > INT64_MAX / 16) fail("a tensor has no sensible offset");
  TensorPart part{storage.bytes, static_cast<uint64_t>(offset.integer) * static_cast<uint64_t>(size_bytes(tensor.dtype)),
                  tensor.shape, numbers(argument(call, 3)), std::vector<int64_t>(tensor.shape.size(), 0)};
  check_part(part, tensor.dtype, "a tensor");
  tensor.parts.push_back(std::move(part));
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

std::optional<CheckpointTensor> TorchReader::tensor_of(const PickleValue& value, int depth) const {
  if (value.type == Type::persistent) return bare_storage(value);
  const std::string_view call = pickle_.callable_name(value);
  if (call == "torch._utils._rebuild_tensor_v2") return rebuilt(value, false);
  if (call == "torch._utils._rebuild_tensor_v3") return rebuilt(value, true);
  const bool parameter = call == "torch._utils._rebuild_parameter" || call == "torch._utils._rebuild_parameter_with_state";
  if (parameter && depth < 2) return tensor_of(argument(value, 0), depth + 1);
  return {};
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

std::string TorchReader::key_text(PickleId id) const {
  const PickleValue& value = at(id);
  if (value.type == Type::text) return value.text;
  if (value.type != Type::tuple) return scalar_text(value);
  std::string text = "(";
  for (const PickleId item : value.items) {
    if (at(item).type == Type::tuple) fail("a key is nested too deeply");
    text += fmt::format("{}{}", text.size() > 1 ? ", " : "", scalar_text(at(item)));
  }
  return text + ")";
}

// The order of a set of strings is another one in each process.
bool TorchReader::walk_set(const PickleValue& value, const std::string& path) {
  std::vector<std::string> items;
  for (const PickleId id : value.items) {
    items.push_back(scalar_text(at(id)));
    if (items.back().empty()) return false;
  }
  std::sort(items.begin(), items.end());
  std::string text;
  for (const std::string& item : items) text += fmt::format("{}{}", text.empty() ? "" : ", ", item);
  leaves_->value(path, bytes_text("set", text));
  return true;
}

void TorchReader::walk_children(const PickleValue& value, const std::string& path, int depth) {
  for (size_t i = 0; i < value.items.size(); ++i) walk(value.items[i], joined(path, std::to_string(i)), depth + 1);
  for (size_t i = 0; i + 1 < value.entries.size(); i += 2) {
    walk(value.entries[i + 1], joined(path, key_text(value.entries[i])), depth + 1);
  }
  if (value.items.empty() && value.entries.empty() && value.type != Type::object) {
    leaves_->value(path, value.type == Type::dict ? "{}" : value.type == Type::list ? "[]" : "()");
  }
}

void TorchReader::walk(PickleId id, const std::string& path, int depth) {
  if (depth > kMaxLeafDepth) fail(fmt::format("`{}...` is nested more than {} deep, or holds itself", path.substr(0, 60), kMaxLeafDepth));
  if (++steps_ > kMaxLeaves) fail(fmt::format("it holds more than {} values", kMaxLeaves));
  const PickleValue& value = at(id);
  if (auto tensor = tensor_of(value, 0)) return leaves_->tensor(path, std::move(*tensor));
  if (std::string text = scalar_text(value); !text.empty()) {
    if (value.type == Type::global && !value.text.starts_with("torch.")) leaves_->opaque(value.text);
    return leaves_->value(path, std::move(text));
  }
  if (value.type == Type::set && walk_set(value, path)) return;
  // Protocol 2 calls set([...]).
  if (pickle_.callable_name(value).ends_with("builtin__.set") && walk_set(argument(value, 0), path)) return;
  if (value.type == Type::object) {
    const std::string_view call = pickle_.callable_name(value);
    // numpy 2 moved its functions; what they make is the same.
    std::string name(call.starts_with("numpy._core.") ? fmt::format("numpy.core.{}", call.substr(12)) : std::string(call));
    if (name == "_codecs.encode" && !at(value.arguments).items.empty()) {  // bytes in protocol 2
      return leaves_->value(path, bytes_text("bytes", at(at(value.arguments).items[0]).text));
    }
    if (!call.empty()) {
      leaves_->opaque(call);
      leaves_->value(path, fmt::format("<{}>", name));
    } else {
      walk(value.callable, joined(path, "()"), depth + 1);
    }
    const auto& arguments = at(value.arguments).items;
    for (size_t i = 0; i < arguments.size(); ++i) walk(arguments[i], joined(path, fmt::format("({})", i)), depth + 1);
  }
  walk_children(value, path, depth);
  if (value.state != 0) walk(value.state, joined(path, "@"), depth + 1);  // attributes, such as state_dict's _metadata
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
  return std::move(*tensor);
}

}  // namespace forkpoint
