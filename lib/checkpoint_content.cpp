#include "lib/checkpoint_content.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "lib/checkpoint_layouts.h"
#include "lib/checkpoint_readers.h"
#include "lib/error.h"
#include "lib/python_json.h"
#include "lib/safetensors.h"
#include "lib/zip_file.h"

namespace forkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr uint64_t kMaxJsonBytes = 4ull << 20;   // a longer one (a tokenizer's vocabulary) is compared by its bytes
constexpr uint64_t kMaxOpaqueBytes = 1ull << 40;

bool printable_text(std::string_view bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char c) { return static_cast<unsigned char>(c) >= 0x20 && c != 0x7F; });
}

Digest digest_of_file(const FileSlice& file) {
  std::string buffer(std::min<uint64_t>(file.size_bytes(), 4ull << 20), '\0');
  Digest digest;
  for (uint64_t at = 0; at < file.size_bytes(); at += buffer.size()) {
    const size_t size = std::min<uint64_t>(buffer.size(), file.size_bytes() - at);
    file.read(at, buffer.data(), size);
    digest += digest_only(buffer.data(), size, at);
  }
  return digest;
}

// "model-00001-of-00005.safetensors" and "model.safetensors" are both "model".
std::string group_of(const std::string& file) {
  const std::string stem = file.substr(0, file.size() - fs::path(file).extension().string().size());
  const auto numbered = numbered_file(stem);
  return numbered ? numbered->stem : stem;
}

bool has_torch_name(const std::string& file) {
  const std::string end = fs::path(file).extension().string();
  return end == ".pt" || end == ".pth" || end == ".bin" || end == ".ckpt";
}

std::string file_text(const FileSlice& file) {
  const Digest digest = digest_of_file(file);
  return fmt::format("file of {} bytes, digest {:016x}{:016x}", file.size_bytes(), digest.a, digest.b);
}

void read_file(const FileSlice& file, const std::string& name, CheckpointContent* content) {
  // The name of a file that is a checkpoint by itself is that of its step.
  LeafAdder leaves(content, group_of(name));
  const std::string end = fs::path(name.empty() ? file.path() : name).extension().string();
  if (end == ".safetensors") return read_safetensors_file(file, &leaves);
  if (ZipFile::begins(file)) return read_torch_file(file, "", &leaves);
  if (end == ".json" && name.find(".index.json") == name.npos && file.size_bytes() <= kMaxJsonBytes) {
    return read_json_file(file, &leaves);
  }
  if (has_torch_name(name.empty() ? file.path() : name)) {
    throw Error(fmt::format("{}: is no zip file of torch.save (the format of torch before 1.6, or something else).", file.path()));
  }
  content->values[{name, ""}] = {file_text(file)};
}

// Which file holds which tensor is not content, and which step was written last says the folder's name.
bool is_bookkeeping(const std::string& name) { return name.ends_with(".index.json"); }

}  // namespace

std::string to_string(const LeafName& name) {
  return name.first.empty() ? name.second : name.second.empty() ? name.first : fmt::format("{}: {}", name.first, name.second);
}

std::string joined(std::string_view path, std::string_view name) {
  return path.empty() ? std::string(name) : fmt::format("{}.{}", path, name);
}

std::string bytes_text(std::string_view type, std::string_view bytes) {
  constexpr size_t kShown = 200;
  if (type != "bytes" && type != "int" && bytes.size() <= kShown && printable_text(bytes)) return fmt::format("{}\"{}\"", type, bytes);
  const Digest digest = digest_only(bytes.data(), bytes.size());
  return fmt::format("{} of {} bytes, digest {:016x}{:016x}", type.empty() ? "text" : type, bytes.size(), digest.a, digest.b);
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) {
    if (__builtin_mul_overflow(strides[d], std::max<int64_t>(shape[d], 1), &strides[d - 1])) strides[d - 1] = INT64_MAX;
  }
  return strides;
}

void check_part(const TensorPart& part, DType dtype, const std::string& what) {
  const auto fail = [&](const std::string& why) { throw Error(fmt::format("{}: {} {}.", part.storage.path(), what, why)); };
  if (part.strides.size() != part.shape.size() || part.global_offset.size() != part.shape.size()) fail("has strides for other dimensions");
  if (part.shape.size() > static_cast<size_t>(kMaxDims)) fail(fmt::format("has {} dimensions, over the limit of {}", part.shape.size(), kMaxDims));
  __int128 last = 0, elements = 1;
  for (size_t d = 0; d < part.shape.size(); ++d) {
    if (part.shape[d] < 0 || part.strides[d] < 0) fail("has a negative shape or stride");
    elements *= part.shape[d];
    if (elements > INT64_MAX / 16) fail("has an impossible shape");
    last += static_cast<__int128>(std::max<int64_t>(part.shape[d], 1) - 1) * part.strides[d];
    if (last > INT64_MAX / 16) fail("has an impossible shape");
  }
  const __int128 end = static_cast<__int128>(part.offset_bytes) + (last + 1) * size_bytes(dtype);
  if (elements > 0 && end > part.storage.size_bytes()) {
    fail(fmt::format("reaches to byte {} of its storage, which has {}", static_cast<uint64_t>(end), part.storage.size_bytes()));
  }
}

std::string exact_quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  quoted += '"';
  constexpr size_t kShown = 200;
  return text.size() <= kShown && printable_text(text) ? quoted : bytes_text("bytes", quoted);
}

bool keys_differ(const std::string& a, const std::string& b) {
  return !a.empty() && !b.empty() && a[0] == b[0] && a != b;
}

LeafPath LeafPath::other(std::string_view shown, std::string_view exact) const {
  return {joined(name, shown), fmt::format("{}{}", keys, exact)};
}
LeafPath LeafPath::key(std::string_view text) const { return other(text, fmt::format("[{}]", exact_quoted(text))); }
LeafPath LeafPath::item(std::string_view container, size_t index) const {
  return other(std::to_string(index), fmt::format("[{} {}]", container, index));
}

LeafName LeafAdder::free_name(const std::string& name) const {
  LeafName leaf{group_, name};
  for (int i = 2; content_->tensors.contains(leaf) || content_->values.contains(leaf); ++i) leaf.second = fmt::format("{}#{}", name, i);
  return leaf;
}

// Whether the name stands for leaves of different keys; the first of them gets another name then.
bool LeafAdder::separate(const LeafPath& path) {
  if (shared_.contains(path.name)) return true;
  const LeafName taken{group_, path.name};
  // Those of a distributed checkpoint's object do not tell of which object.
  const auto differs = [&](const std::string& keys) {
    return keys.starts_with("root") && path.keys.starts_with("root") && keys != path.keys;
  };
  if (const auto tensor = content_->tensors.find(taken);
      tensor != content_->tensors.end() && differs(tensor->second.keys)) {
    auto moved = content_->tensors.extract(tensor);
    moved.key() = free_name(moved.mapped().keys);
    content_->tensors.insert(std::move(moved));
  } else if (const auto value = content_->values.find(taken);
             value != content_->values.end() && differs(value->second.keys)) {
    auto moved = content_->values.extract(value);
    moved.key() = free_name(moved.mapped().keys);
    content_->values.insert(std::move(moved));
  } else {
    return false;
  }
  shared_.insert(path.name);
  return true;
}

LeafName LeafAdder::fresh(const LeafPath& path) {
  if (content_->tensors.size() + content_->values.size() > kMaxLeaves) {
    throw Error(fmt::format("{}: holds more than {} values.", content_->path, kMaxLeaves));
  }
  return free_name(separate(path) ? path.keys : path.name);
}

void LeafAdder::tensor(const LeafPath& path, CheckpointTensor tensor) {
  uint64_t bytes = static_cast<uint64_t>(size_bytes(tensor.dtype));
  for (const int64_t extent : tensor.shape) bytes *= static_cast<uint64_t>(extent);
  content_->tensor_bytes += bytes;
  tensor.keys = path.keys;
  content_->tensors.emplace(fresh(path), std::move(tensor));
}

void LeafAdder::value(const LeafPath& path, std::string text) {
  content_->values.emplace(fresh(path), CheckpointValue{std::move(text), path.keys});
}

void LeafAdder::unread(const std::string& name, const std::string& why) { content_->unread.emplace(to_string({group_, name}), why); }

void read_safetensors_file(const FileSlice& file, LeafAdder* leaves) {
  const SafetensorsFile safetensors = read_safetensors(file);
  for (const SafetensorsEntry& entry : safetensors.tensors) {
    CheckpointTensor tensor;
    tensor.dtype = entry.dtype;
    tensor.dtype_name = entry.known_dtype ? std::string(name(entry.dtype)) : entry.dtype_name;
    tensor.shape = entry.shape;
    if (!entry.known_dtype) {
      tensor.dtype_name += fmt::format("[{}]", fmt::join(entry.shape, ", "));
      tensor.shape = {static_cast<int64_t>(entry.size_bytes)};
    }
    TensorPart part{file.part(entry.offset, entry.size_bytes, entry.name), 0, tensor.shape, contiguous_strides(tensor.shape),
                    std::vector<int64_t>(tensor.shape.size(), 0)};
    check_part(part, tensor.dtype, fmt::format("`{}`", entry.name));
    tensor.parts.push_back(std::move(part));
    leaves->tensor(entry.name, std::move(tensor));
  }
  for (const auto& [key, text] : safetensors.metadata) leaves->value(joined("__metadata__", key), bytes_text("", text));
}

void read_json_file(const FileSlice& file, LeafAdder* leaves) {
  const std::string text = file.text(0, file.size_bytes(), "the text");
  const Json json = parse_python_json(text);
  if (json.is_discarded()) throw Error(fmt::format("{}: is no JSON: it is cut or damaged.", file.path()));
  const auto walk = [&](const auto& self, const Json& value, const LeafPath& path, int depth) -> void {
    if (depth > kMaxLeafDepth)
      throw Error(
          fmt::format("{}: `{}...` is nested more than {} deep.", file.path(), path.name.substr(0, 60), kMaxLeafDepth));
    if (std::string number = not_finite(value); !number.empty()) return leaves->value(path, number);
    if (!value.is_structured() || value.empty()) {
      return leaves->value(path, value.is_string() ? bytes_text("", value.get<std::string>()) : value.dump());
    }
    size_t index = 0;
    for (const auto& [key, item] : value.items()) {
      self(self, item, value.is_array() ? path.item("list", index++) : path.key(key), depth + 1);
    }
  };
  walk(walk, json, {"", "root"}, 0);
}

CheckpointContent read_content(const std::string& path) {
  CheckpointContent content;
  content.path = path;
  const std::vector<ListedFile> files = list_files(path);
  content.fingerprint = fingerprint(files);
  if (std::string why = why_content_not_whole(path, files); !why.empty()) content.unread["(not whole)"] = why;
  for (const ListedFile& listed : files) {
    if (is_bookkeeping(listed.name) || listed.name.ends_with(".distcp")) continue;
    const std::string file = listed.name.empty() ? path : path + "/" + listed.name;
    try {
      if (fs::path(listed.name).filename() == ".metadata") {
        const std::string below = fs::path(listed.name).parent_path().string();
        LeafAdder leaves(&content, below);
        read_distributed(below.empty() ? path : path + "/" + below, &leaves);
      } else {
        read_file(open_slice(file), listed.name, &content);
      }
    } catch (const Error& error) {
      content.unread[listed.name.empty() ? fs::path(path).filename().string() : listed.name] = error.what();
    }
  }
  const bool data = std::any_of(files.begin(), files.end(), [](const auto& f) { return f.name.ends_with(".distcp") && f.size_bytes > 0; });
  const bool index = std::any_of(files.begin(), files.end(), [](const auto& f) { return fs::path(f.name).filename() == ".metadata"; });
  if (data && !index) content.unread[".metadata"] = "is missing: without it nothing in the .distcp files has a name";
  return content;
}

}  // namespace forkpoint
