// What the tests of replay and resume share: minigpt, its checkpoints, and what is left of a job.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/cli/program.h"
#include "tests/support/temporary_folder.h"

namespace forkpoint {

inline const std::vector<std::string> kMinigpt = {MINIGPT,    "--ranks", "4", "--layers", "2",       "--dim", "16", "--heads",
                                                  "2",        "--seq",   "16", "--batch", "2",       "--seed", "5"};

inline std::vector<std::string> words(std::vector<std::string> begin, const std::vector<std::string>& more) {
  begin.insert(begin.end(), more.begin(), more.end());
  return begin;
}

inline std::string file_content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Every file of a folder, with what is in it and when it was last written to.
inline std::map<std::string, std::string> tree_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const auto written = entry.last_write_time().time_since_epoch().count();
    files[entry.path().string()] = std::to_string(written) + (entry.is_regular_file() ? file_content(entry.path().string()) : "");
  }
  return files;
}

// Processes (no zombies) that have `text` in their environment.
inline std::vector<std::string> processes_with(const std::string& text) {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string folder = entry.path().string();
    if (!std::isdigit(static_cast<unsigned char>(entry.path().filename().string()[0]))) continue;
    if (file_content(folder + "/environ").find(text) != std::string::npos) found.push_back(folder + " " + file_content(folder + "/cmdline"));
  }
  return found;
}

inline nlohmann::json parsed(const ProgramResult& result) { return nlohmann::json::parse(result.out, nullptr, false); }

}  // namespace forkpoint
