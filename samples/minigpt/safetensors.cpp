#include "samples/minigpt/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "samples/minigpt/error.h"

namespace minigpt {

std::string to_safetensors(const NamedTensors& tensors) {
  nlohmann::ordered_json header;
  size_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {
        {"dtype", "F32"}, {"shape", tensor->shape()}, {"data_offsets", {offset, offset + tensor->size_bytes()}}};
    offset += tensor->size_bytes();
  }
  std::string json = header.dump();
  json.resize((json.size() + 7) / 8 * 8, ' ');
  const uint64_t json_size = json.size();
  std::string bytes(sizeof(json_size), '\0');
  std::memcpy(bytes.data(), &json_size, sizeof(json_size));
  bytes += json;
  for (const auto& [name, tensor] : tensors) {
    const std::vector<float> values = tensor->copy_out();
    bytes.append(reinterpret_cast<const char*>(values.data()), tensor->size_bytes());
  }
  return bytes;
}

void from_safetensors(const std::string& path, const std::vector<std::pair<std::string, Tensor*>>& tensors) {
  const std::string bytes = read_file(path);
  uint64_t json_size = 0;
  if (bytes.size() >= sizeof(json_size)) std::memcpy(&json_size, bytes.data(), sizeof(json_size));
  if (bytes.size() < sizeof(json_size) || json_size > bytes.size() - sizeof(json_size))
    throw Error(fmt::format("{}: {} bytes, too short for its header: the file is cut", path, bytes.size()));
  const char* data = bytes.data() + sizeof(json_size) + json_size;
  const size_t data_size = bytes.size() - sizeof(json_size) - json_size;
  const auto header = nlohmann::json::parse(bytes.begin() + sizeof(json_size),
                                            bytes.begin() + sizeof(json_size) + json_size, nullptr, false);
  for (const auto& [name, tensor] : tensors) {
    if (!header.is_object() || !header.contains(name))
      throw Error(fmt::format("{}: there is no tensor {}", path, name));
    try {
      const auto& entry = header.at(name);
      const auto shape = entry.at("shape").get<std::vector<int64_t>>();
      const auto offsets = entry.at("data_offsets").get<std::vector<uint64_t>>();
      if (entry.at("dtype") != "F32" || shape != tensor->shape())
        throw Error(fmt::format("{}: {} is {} {}, the model has F32 {}", path, name,
                                entry.at("dtype").get<std::string>(), shape, tensor->shape()));
      if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] - offsets[0] != tensor->size_bytes() ||
          offsets[1] > data_size)
        throw Error(fmt::format("{}: {} lies outside the file: the file is cut", path, name));
      std::vector<float> values(static_cast<size_t>(tensor->count()));
      std::memcpy(values.data(), data + offsets[0], tensor->size_bytes());
      tensor->copy_in(values.data());
    } catch (const nlohmann::json::exception& error) {
      throw Error(fmt::format("{}: the header's entry of {} is damaged: {}", path, name, error.what()));
    }
  }
}

namespace {
[[noreturn]] void fail(const std::string& path, const char* what) {
  throw Error(fmt::format("{}: {}: {}", path, what, std::strerror(errno)));
}
}  // namespace

void write_file(const std::string& path, const std::string& content) {
  const std::string draft = path + ".tmp";
  const int file = open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) fail(draft, "cannot be made");
  for (size_t done = 0; done < content.size();) {
    const ssize_t written = write(file, content.data() + done, content.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      close(file);
      unlink(draft.c_str());
      errno = error;
      fail(draft, "cannot be written");
    }
    done += static_cast<size_t>(written);
  }
  if (fsync(file) != 0) fail(draft, "cannot be written to disk");
  if (close(file) != 0) fail(draft, "cannot be written");
  if (rename(draft.c_str(), path.c_str()) != 0) fail(path, "cannot be made");
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (!file || !(content << file.rdbuf())) throw Error(fmt::format("{}: cannot be read, or is empty", path));
  return std::move(content).str();
}

}  // namespace minigpt
