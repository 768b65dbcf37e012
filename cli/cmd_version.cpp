// forkpoint version: what this program is and what it was built from.
#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/probe_file.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "lib/hash_stream.h"
#include "lib/probe_contract.h"
#include "lib/run.h"

namespace forkpoint {
namespace {

std::string probe_path_or_empty() {
  for (const std::string& place : probe_candidates()) {
    std::error_code error;
    if (std::filesystem::is_regular_file(place, error)) return place;
  }
  return {};
}

std::string version_json(const std::string& probe) {
  nlohmann::ordered_json json;
  json["version"] = FORKPOINT_VERSION;
  json["stream_format"] = kFormatVersion;
  json["manifest_format"] = Manifest{}.format;
  json["probe_abi"] = contract::kProbeAbi;
  json["compiler"] = FORKPOINT_COMPILER;
  json["build_type"] = FORKPOINT_BUILD_TYPE;
  json["cuda"] = *FORKPOINT_CUDA_VERSION ? nlohmann::ordered_json(FORKPOINT_CUDA_VERSION) : nullptr;
  json["probe"] = probe.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(probe);
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

int version(const Arguments& arguments) {
  const std::string probe = probe_path_or_empty();
  if (arguments.has("json")) {
    print_answer(version_json(probe));
    return 0;
  }
  print_answer(fmt::format("forkpoint {}\n", FORKPOINT_VERSION));
  print_answer(fmt::format("  format    hash stream {}, manifest {}\n", kFormatVersion, Manifest{}.format));
  print_answer(fmt::format("  built     {}, {}\n", FORKPOINT_COMPILER, FORKPOINT_BUILD_TYPE));
  print_answer(fmt::format("  CUDA      {}\n", *FORKPOINT_CUDA_VERSION ? "yes, " FORKPOINT_CUDA_VERSION : "no"));
  print_answer(fmt::format("  probe     {}\n", probe.empty() ? "not found" : printable(probe)));
  return 0;
}

}  // namespace

const Verb& version_verb() {
  static const Verb verb{
      .name = "version",
      .summary = "version, format, build and probe of this program",
      .usage = "version [--json]",
      .about = "Prints what this program is, which files it reads and writes, and which probe it would load.",
      .options = {kJsonOption},
      .examples = {{"forkpoint version", "for a bug report"},
                   {"forkpoint version --json | jq -r .stream_format", "for a program"}},
      .run = version};
  return verb;
}

}  // namespace forkpoint
