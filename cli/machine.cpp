#include "cli/machine.h"

#include <gnu/libc-version.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <regex>
#include <string_view>

#include "lib/run.h"

namespace forkpoint {
namespace {

// The value of the first line "KEY : value" of a /proc file.
std::string proc_field(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (!line.starts_with(key) || colon == line.npos) continue;
    const size_t start = line.find_first_not_of(" \t", colon + 1);
    return start == line.npos ? "" : line.substr(start);
  }
  return {};
}

std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  std::smatch match;
  static const std::regex kVersion(R"((\d+\.\d+(\.\d+)?))");
  return std::regex_search(line, match, kVersion) ? match[1].str() : "";
}

}  // namespace

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

std::map<std::string, std::string> machine_versions() {
  std::map<std::string, std::string> versions;
  utsname system{};
  if (uname(&system) == 0) versions["kernel"] = std::string(system.release) + " " + system.machine;
  versions["libc"] = std::string("glibc ") + gnu_get_libc_version();
  versions["cpu"] = proc_field("/proc/cpuinfo", "model name");
  versions["nvidia_driver"] = driver_version();
  std::erase_if(versions, [](const auto& entry) { return entry.second.empty(); });
  return versions;
}

std::vector<std::string> gpu_names() {
  std::error_code error;
  std::vector<std::string> folders, names;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", error)) {
    folders.push_back(entry.path().string());
  }
  std::sort(folders.begin(), folders.end());
  for (const std::string& folder : folders) {
    const std::string model = proc_field(folder + "/information", "Model");
    if (!model.empty()) names.push_back(model);
  }
  return names;
}

std::map<std::string, std::string> numeric_environment() {
  std::map<std::string, std::string> kept;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals == text.npos || !is_numeric_environment(text.substr(0, equals))) continue;
    kept.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return kept;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace forkpoint
