#include "lib/operand_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "lib/error.h"

namespace forkpoint {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

constexpr uint64_t kMostHeaderBytes = 100'000'000;  // as the format's own readers have it
constexpr char kHint[] = "Was the disk full, or the job killed while it wrote? Save the operands again.";

// As the format spells them. What it does not know is kept as bytes; the metadata have our own name of the type.
const char* format_name(DType dtype) {
  switch (dtype) {
    case DType::i8: return "I8";
    case DType::u16: return "U16";
    case DType::i16: return "I16";
    case DType::u32: return "U32";
    case DType::i32: return "I32";
    case DType::u64: return "U64";
    case DType::i64: return "I64";
    case DType::boolean: return "BOOL";
    case DType::f16: return "F16";
    case DType::bf16: return "BF16";
    case DType::f32: return "F32";
    case DType::f64: return "F64";
    case DType::f8e4m3: return "F8_E4M3";
    case DType::f8e5m2: return "F8_E5M2";
    case DType::c64: return "C64";
    default: return "U8";
  }
}

std::string list_text(const std::vector<int64_t>& values) { return json(values).dump(); }

std::vector<int64_t> list_from(const json& metadata, const char* key) {
  if (!metadata.contains(key)) return {};
  return json::parse(metadata.at(key).get<std::string>()).get<std::vector<int64_t>>();
}

Role role_from(const std::string& text) {
  for (int i = 0; i < kRoleCount; ++i) {
    if (name(static_cast<Role>(i)) == text) return static_cast<Role>(i);
  }
  throw std::invalid_argument("role");
}

[[noreturn]] void refuse(const fs::path& file, const std::string& found) {
  throw Error(fmt::format("{}: {}, expected one saved operand (a safetensors file).", file.string(), found), kHint);
}

uint64_t size_in_bytes(const Operand& operand) {
  uint64_t elements = 1;
  for (const int64_t extent : operand.shape) {
    if (extent < 0 || (extent > 0 && elements > UINT64_MAX / 16 / static_cast<uint64_t>(extent))) return UINT64_MAX;
    elements *= static_cast<uint64_t>(extent);
  }
  return elements * static_cast<uint64_t>(size_bytes(operand.dtype));
}

Operand operand_from(const json& header) {
  const json& metadata = header.at("__metadata__");
  const auto text = [&](const char* key) { return metadata.at(key).get<std::string>(); };
  Operand operand;
  operand.key.rank = std::stoi(text("rank"));
  operand.key.step = std::stoll(text("step"));
  operand.key.micro_step = std::stoi(text("micro_step"));
  operand.key.phase = phase_from_name(text("phase")).value();
  operand.key.role = role_from(text("role"));
  operand.key.layer = text("layer");
  operand.key.op = text("op");
  operand.key.tensor = text("tensor");
  operand.dtype = dtype_from_name(text("dtype")).value();
  operand.shape = list_from(metadata, "shape");
  operand.global_shape = list_from(metadata, "global_shape");
  operand.global_offset = list_from(metadata, "global_offset");
  operand.size_bytes = size_in_bytes(operand);
  return operand;
}

Operand read_header(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) refuse(file, "it cannot be opened");
  uint64_t header_bytes = 0;
  in.read(reinterpret_cast<char*>(&header_bytes), sizeof(header_bytes));
  if (!in || header_bytes > kMostHeaderBytes) refuse(file, "no header was found");
  std::string text(header_bytes, '\0');
  in.read(text.data(), static_cast<std::streamsize>(header_bytes));
  if (!in) refuse(file, fmt::format("it ends within its header of {} bytes", header_bytes));
  Operand operand;
  try {
    operand = operand_from(json::parse(text));
  } catch (const std::exception&) {
    refuse(file, "its header says not what it is");
  }
  operand.file = file;
  operand.data_at = sizeof(header_bytes) + header_bytes;
  const uint64_t found = fs::file_size(file) - operand.data_at;
  if (found != operand.size_bytes) {
    refuse(file, fmt::format("{} bytes of values were found and {} are in its header", found, operand.size_bytes));
  }
  return operand;
}

}  // namespace

std::string operand_header(const OperandKey& key, const Layout& layout, uint64_t size_bytes) {
  json metadata = {{"format", "forkpoint operand 1"},
                   {"rank", std::to_string(key.rank)},
                   {"step", std::to_string(key.step)},
                   {"micro_step", std::to_string(key.micro_step)},
                   {"phase", name(key.phase)},
                   {"role", name(key.role)},
                   {"layer", key.layer},
                   {"op", key.op},
                   {"tensor", key.tensor},
                   {"dtype", name(layout.dtype)},
                   {"shape", list_text(layout.shape)}};
  if (layout.is_shard()) {
    metadata["global_shape"] = list_text(layout.global_shape);
    metadata["global_offset"] = list_text(layout.global_offset);
  }
  const bool has_name = std::string_view(format_name(layout.dtype)) != "U8" || layout.dtype == DType::u8;
  const json tensor = {{"dtype", format_name(layout.dtype)},
                       {"shape", has_name ? json(layout.shape) : json::array({size_bytes})},
                       {"data_offsets", {0, size_bytes}}};
  json header = {{"__metadata__", metadata}};
  header[key.tensor.empty() ? "tensor" : key.tensor] = tensor;
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception&) {
    throw Error("an operand's name is no UTF-8, so that it cannot be saved.");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the bytes behind it are aligned
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

std::string operand_file_name(int rank, uint64_t number) { return fmt::format("rank-{:04}-{:06}.safetensors", rank, number); }

std::vector<Operand> list_operands(const fs::path& run_directory) {
  std::vector<fs::path> files;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(run_directory / kOperandFolder, none)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  // Shorter first: a number beyond its six digits is later.
  std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) {
    const std::string left = a.filename().string(), right = b.filename().string();
    return left.size() != right.size() ? left.size() < right.size() : left < right;
  });
  std::vector<Operand> operands;
  std::map<OperandKey, uint32_t> calls;
  for (const fs::path& file : files) {
    operands.push_back(read_header(file));
    operands.back().call = calls[operands.back().key]++;
  }
  return operands;
}

std::vector<std::byte> load_operand(const Operand& operand) {
  std::ifstream in(operand.file, std::ios::binary);
  std::vector<std::byte> bytes(operand.size_bytes);
  in.seekg(static_cast<std::streamoff>(operand.data_at));
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!in) refuse(operand.file, "its values cannot be read");
  return bytes;
}

}  // namespace forkpoint
