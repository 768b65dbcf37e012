#include "cli/probe_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <filesystem>

#include "lib/error.h"
#include "lib/probe_contract.h"

namespace forkpoint {
namespace fs = std::filesystem;

namespace {
constexpr char kProbeVariable[] = "FORKPOINT_PROBE";
constexpr char kSeparators[] = " :";  // of LD_PRELOAD; there is no way to quote them
}  // namespace

std::vector<std::string> probe_candidates() {
  if (const char* chosen = std::getenv(kProbeVariable); chosen && *chosen) return {fs::absolute(chosen).string()};
  std::error_code error;
  const fs::path folder = fs::read_symlink("/proc/self/exe", error).parent_path();
  std::vector<std::string> places;
  for (const char* relative : {".", FORKPOINT_LIBRARY_FOLDER_FROM_PROGRAM, "../lib", "../lib64"}) {
    const std::string place = (folder / relative / contract::kProbeFile).lexically_normal().string();
    if (places.empty() || places.back() != place) places.push_back(place);
  }
  return places;
}

std::string find_probe() {
  const std::vector<std::string> places = probe_candidates();
  for (const std::string& place : places) {
    std::error_code error;
    if (!fs::is_regular_file(place, error)) continue;
    if (place.find_first_of(kSeparators) != place.npos) {
      throw Error(
          fmt::format("the probe lies at `{}`, and LD_PRELOAD cannot name a path with blanks or colons.", place),
          "Copy it elsewhere and set FORKPOINT_PROBE to its path.");
    }
    return place;
  }
  throw Error(fmt::format("the probe {} was not found (looked at: {}).", contract::kProbeFile, fmt::join(places, ", ")),
              "Build or install it, or set FORKPOINT_PROBE to its path.");
}

std::string preload_with(const std::string& probe, const char* existing) {
  std::string result;
  const std::string_view text = existing ? existing : "";
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find_first_of(kSeparators, start), text.size());
    const std::string_view entry = text.substr(start, end - start);
    if (!entry.empty() && entry != probe) result += std::string(entry) + ":";
    start = end + 1;
  }
  // Last: allocators and sanitizers insist on being first.
  return result + probe;
}

}  // namespace forkpoint
