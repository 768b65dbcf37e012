#include "lib/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "lib/error.h"

namespace forkpoint {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 1ull << 30;  // the reference implementation stops at 100 MB
constexpr size_t kMaxTensorDims = 64;

// The names of the format's own description (safetensors' Dtype). The 8-bit "FNUZ" and E8M0 kinds are not among our types:
// they are read as bytes.
constexpr std::pair<std::string_view, DType> kTypes[] = {
    {"BOOL", DType::boolean}, {"U8", DType::u8},         {"I8", DType::i8},           {"U16", DType::u16}, {"I16", DType::i16},
    {"U32", DType::u32},      {"I32", DType::i32},       {"U64", DType::u64},         {"I64", DType::i64}, {"F16", DType::f16},
    {"BF16", DType::bf16},    {"F32", DType::f32},       {"F64", DType::f64},         {"C64", DType::c64}, {"F8_E4M3", DType::f8e4m3},
    {"F8_E5M2", DType::f8e5m2}};

[[noreturn]] void damaged(const FileSlice& file, const std::string& what) {
  throw Error(fmt::format("{}: not a whole safetensors file: {}.", file.path(), what));
}

SafetensorsEntry entry_from(const FileSlice& file, const std::string& name, const Json& value, uint64_t data_offset) {
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype_name = value.at("dtype").get<std::string>();
  const auto* type = std::find_if(std::begin(kTypes), std::end(kTypes), [&](auto& t) { return t.first == entry.dtype_name; });
  entry.known_dtype = type != std::end(kTypes);
  if (entry.known_dtype) entry.dtype = type->second;
  entry.shape = value.at("shape").get<std::vector<int64_t>>();
  const auto offsets = value.at("data_offsets").get<std::vector<uint64_t>>();
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > UINT64_MAX / 2 || entry.shape.size() > kMaxTensorDims) {
    damaged(file, fmt::format("the header's entry of `{}` makes no sense", name));
  }
  entry.offset = data_offset + offsets[0];
  entry.size_bytes = offsets[1] - offsets[0];
  uint64_t expected = static_cast<uint64_t>(size_bytes(entry.dtype));
  for (const int64_t extent : entry.shape) {
    if (extent < 0 || __builtin_mul_overflow(expected, static_cast<uint64_t>(extent), &expected)) {
      damaged(file, fmt::format("`{}` has an impossible shape", name));
    }
  }
  if (entry.known_dtype && expected != entry.size_bytes) {
    damaged(file, fmt::format("`{}` has {} bytes, its shape says {}", name, entry.size_bytes, expected));
  }
  return entry;
}

Json header_of(const FileSlice& file, uint64_t* data_offset) {
  uint64_t header_bytes = 0;
  if (file.size_bytes() < sizeof(header_bytes)) damaged(file, fmt::format("it has {} bytes", file.size_bytes()));
  file.read(0, &header_bytes, sizeof(header_bytes));
  if (header_bytes > file.size_bytes() - sizeof(header_bytes) || header_bytes > kMaxHeaderBytes) {
    damaged(file, fmt::format("its header should have {} bytes, the file has {}", header_bytes, file.size_bytes()));
  }
  *data_offset = sizeof(header_bytes) + header_bytes;
  const std::string text = file.text(sizeof(header_bytes), header_bytes, "the header");
  // The parser recurses, and no header of this format is deeper than three levels.
  const auto shallow = [](int depth, Json::parse_event_t, Json&) {
    if (depth > 8) throw Error("too deep");
    return true;
  };
  try {
    Json header = Json::parse(text, shallow);
    if (header.is_object()) return header;
  } catch (const std::exception&) {
  }
  damaged(file, "its header is not a JSON object");
}

}  // namespace

SafetensorsFile read_safetensors(const FileSlice& file) {
  uint64_t data_offset = 0, end = 0;
  const Json header = header_of(file, &data_offset);
  SafetensorsFile result;
  for (const auto& [name, value] : header.items()) {
    try {
      if (name == "__metadata__") {
        for (const auto& [key, text] : value.items()) {
          result.metadata[key] = text.get<std::string>();  // the format has texts alone: "1" and 1 must not look alike
        }
        continue;
      }
      result.tensors.push_back(entry_from(file, name, value, data_offset));
    } catch (const nlohmann::json::exception&) {
      damaged(file, fmt::format("the header's entry of `{}` makes no sense", name));
    }
    end = std::max(end, result.tensors.back().offset + result.tensors.back().size_bytes - data_offset);
  }
  if (file.size_bytes() - data_offset != end) {
    damaged(file, fmt::format("its header speaks of {} bytes of tensors, there are {}", end, file.size_bytes() - data_offset));
  }
  // An empty tensor begins where the one behind it does.
  std::stable_sort(result.tensors.begin(), result.tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.offset, a.size_bytes) < std::pair(b.offset, b.size_bytes);
  });
  uint64_t next = data_offset;  // without gaps or overlaps, says the format
  for (const SafetensorsEntry& entry : result.tensors) {
    if (entry.offset != next) damaged(file, fmt::format("`{}` does not begin where the tensor before it ends", entry.name));
    next += entry.size_bytes;
  }
  return result;
}

}  // namespace forkpoint
