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
