// Whether one file of a checkpoint is whole, by its own content.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "lib/checkpoint_layouts.h"
#include "lib/checkpoint_readers.h"
#include "lib/error.h"
#include "lib/input_file.h"
#include "lib/python_json.h"
#include "lib/safetensors.h"
#include "lib/zip_file.h"

namespace forkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr uint64_t kMaxJsonBytes = 4ull << 20;  // a tokenizer's vocabulary is longer

// One document, or one in each line, as some write logs in files that are called .json.
bool is_json(const std::string& text) {
  if (!parse_python_json(text).is_discarded()) return true;
  std::istringstream lines(text);
  int64_t documents = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    const Json document = parse_python_json(line);
    if (!document.is_object() && !document.is_array()) return false;
    ++documents;
  }
  return documents > 1;
}

// A file so short that it ends within the first bytes of what torch.save writes.
bool is_cut_signature(const FileSlice& slice) {
  constexpr std::string_view kZip("PK\3\4", 4);
  return slice.size_bytes() < kZip.size() && kZip.starts_with(slice.text(0, slice.size_bytes(), "the begin"));
}

}  // namespace

std::string why_file_not_whole(const std::string& folder, const ListedFile& file) {
  const std::string path = file.name.empty() ? folder : folder + "/" + file.name;
  const std::string shown = file.name.empty() ? fs::path(folder).filename().string() : file.name;
  const auto ends = {".pt", ".pth", ".bin", ".ckpt", ".distcp"};
  const bool torch_name = std::any_of(ends.begin(), ends.end(), [&](const char* end) { return path.ends_with(end); });
  const bool safetensors = path.ends_with(".safetensors");
  if ((torch_name || safetensors) && file.size_bytes == 0) {
    // DCP makes a file for each rank, also for one that has nothing to write.
    return path.ends_with(".distcp") ? "" : fmt::format("{} is empty", shown);
  }
  try {
    const FileSlice slice = open_slice(path);
    if (safetensors) read_safetensors(slice);
    // A .distcp file is a row of zip files, each as long as .metadata says.
    if (torch_name && !path.ends_with(".distcp") && ZipFile::begins(slice)) ZipFile{slice};
    if (torch_name && is_cut_signature(slice)) return fmt::format("{} has {} bytes: it is cut", shown, slice.size_bytes());
    if (path.ends_with(".json") && file.size_bytes <= kMaxJsonBytes && !is_json(slice.text(0, slice.size_bytes(), "the text"))) {
      return fmt::format("{} is no JSON: it is cut or damaged", shown);
    }
    if (torch_name && slice.size_bytes() >= 8 && slice.text(0, 8, "the begin") == std::string(8, '\0')) {
      return fmt::format("{} begins with zeros: its data never reached the disk", shown);
    }
  } catch (const Error& error) {
    std::string why = error.what();
    if (why.starts_with(path + ": ")) why = shown + ": " + why.substr(path.size() + 2);
    if (why.ends_with('.')) why.pop_back();
    return why;
  }
  return {};
}

}  // namespace forkpoint
