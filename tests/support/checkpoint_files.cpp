#include "tests/support/checkpoint_files.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace forkpoint {

void put_file(const std::string& path, const std::string& content) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
}

std::string get_file(const std::string& path) {
  std::ostringstream content;
  content << std::ifstream(path, std::ios::binary).rdbuf();
  return content.str();
}

std::string made_safetensors(const std::vector<MadeTensor>& tensors) {
  nlohmann::ordered_json header;
  std::string data;
  for (const MadeTensor& tensor : tensors) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(tensor.values.data()), tensor.values.size() * sizeof(float));
    header[tensor.name] = {{"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t size = text.size();
  return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + text + data;
}

namespace {

std::string little(uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> 8 * i & 0xFF);
  return text;
}

// The opcodes of protocol 2.
std::string pickled(const nlohmann::json& value) {
  if (value.is_null()) return "N";
  if (value.is_boolean()) return value.get<bool>() ? "\x88" : "\x89";
  if (value.is_number_integer()) return "J" + little(static_cast<uint64_t>(value.get<int64_t>()), 4);
  if (value.is_string()) return "X" + little(value.get<std::string>().size(), 4) + value.get<std::string>();
  std::string text = value.is_array() ? "](" : "}(";
  std::string before, after;
  for (const auto& [key, item] : value.items()) {
    if (key == "@class") {
      const std::string name = item.get<std::string>();
      before = "c" + name.substr(0, name.rfind('.')) + "\n" + name.substr(name.rfind('.') + 1) + "\n)\x81";
      after = "b";
      continue;
    }
    if (value.is_object()) text += pickled(key);
    text += pickled(item);
  }
  return before + text + (value.is_array() ? "e" : "u") + after;
}

}  // namespace

std::string made_torch_file(const nlohmann::json& value) {
  const std::string name = "archive/data.pkl", data = "\x80\x02" + pickled(value) + ".";
  const std::string sizes = little(0, 4) + little(data.size(), 4) + little(data.size(), 4) + little(name.size(), 2);
  const std::string local = "PK\3\4" + little(0, 10) + sizes + little(0, 2) + name + data;
  const std::string entry = "PK\1\2" + little(0, 12) + sizes + little(0, 16) + name;
  return local + entry + "PK\5\6" + little(0, 4) + little(1, 2) + little(1, 2) + little(entry.size(), 4) + little(local.size(), 4) +
         little(0, 2);
}

// torch.save's begin (a local header) and end.
std::string empty_zip() {
  std::string entry(30, '\0');
  std::memcpy(entry.data(), "PK\3\4", 4);
  std::string directory(46, '\0');
  std::memcpy(directory.data(), "PK\1\2", 4);
  std::string end(22, '\0');
  std::memcpy(end.data(), "PK\5\6", 4);
  end[8] = end[10] = 1;
  end[12] = static_cast<char>(directory.size());
  end[16] = static_cast<char>(entry.size());
  return entry + directory + end;
}

}  // namespace forkpoint
