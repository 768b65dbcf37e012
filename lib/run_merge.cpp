// Joining the folders that the nodes of one job have left.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "lib/error.h"
#include "lib/run.h"

namespace forkpoint {
namespace {

std::string quoted(const std::vector<std::string>& words) { return fmt::format("`{}`", fmt::join(words, " ")); }

[[noreturn]] void throw_disagreement(const Run& first, const Run& other, std::string_view what,
                                     const std::string& found, const std::string& expected) {
  throw Error(fmt::format("{}: {} is {}, but in {} it is {}: these are not parts of one job.", other.directory(), what,
                          found, first.directory(), expected),
              "Merge only folders that the nodes of one job have recorded.");
}

void check_same_job(const Run& first, const Run& other) {
  const Manifest& a = first.manifest();
  const Manifest& b = other.manifest();
  if (a.command != b.command) throw_disagreement(first, other, "the command", quoted(b.command), quoted(a.command));
  if (first.world_size() != other.world_size()) {
    throw_disagreement(first, other, "the world size", std::to_string(other.world_size()),
                       std::to_string(first.world_size()));
  }
  if (a.level != b.level) {
    throw_disagreement(first, other, "the level", std::string(name(b.level)), std::string(name(a.level)));
  }
  if (a.every != b.every) {
    throw_disagreement(first, other, "--every", std::to_string(b.every), std::to_string(a.every));
  }
  if (a.names_masked != b.names_masked) {
    throw_disagreement(first, other, "--mask-names", b.names_masked ? "on" : "off", a.names_masked ? "on" : "off");
  }
}

void check_disjoint(const Run& first, const Run& other) {
  for (const auto& stream : other.streams()) {
    const int rank = stream->header().rank;
    if (first.stream_of(rank) == nullptr) continue;
    throw Error(fmt::format("{} and {} both hold rank {}.", first.directory(), other.directory(), rank),
                "Merge folders of different nodes of one job; leave one of these two out.");
  }
}

void check_mergeable(const std::vector<Run>& runs) {
  for (const Run& run : runs) {
    if (run.state() == RunState::recording) {
      throw Error(fmt::format("{}: the run is still being recorded.", run.directory()),
                  "Merge it when the job has ended.");
    }
    if (!run.problems().empty()) throw Error(run.problems().front(), "Repair or remove that file before merging.");
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      check_same_job(runs[k], runs[i]);
      check_disjoint(runs[k], runs[i]);
    }
  }
}

// Nodes may differ; every value that occurs is kept.
void join_values(const std::map<std::string, std::string>& from, std::map<std::string, std::string>* into) {
  for (const auto& [key, value] : from) {
    const auto [entry, is_new] = into->try_emplace(key, value);
    if (!is_new && (" | " + entry->second + " | ").find(" | " + value + " | ") == std::string::npos) {
      entry->second += " | " + value;
    }
  }
}

void join_lists(const std::vector<std::string>& from, std::vector<std::string>* into) {
  for (const std::string& item : from) {
    if (std::find(into->begin(), into->end(), item) == into->end()) into->push_back(item);
  }
}

Manifest joined_manifest(const std::vector<Run>& runs) {
  Manifest joined = runs.front().manifest();
  joined.recorder = {};
  joined.gpus.clear();
  joined.merged_from.clear();
  std::set<int> ranks;
  bool has_all_ranks = false, is_whole = true;
  for (const Run& run : runs) {
    const Manifest& part = run.manifest();
    join_values(part.environment, &joined.environment);
    join_values(part.versions, &joined.versions);
    join_lists(part.hosts, &joined.hosts);
    join_lists(part.notes, &joined.notes);
    joined.gpus.insert(joined.gpus.end(), part.gpus.begin(), part.gpus.end());
    if (!part.started_at.empty()) joined.started_at = std::min(joined.started_at, part.started_at);
    joined.ended_at = std::max(joined.ended_at, part.ended_at);
    if (joined.exit_status <= 0 && part.exit_status > joined.exit_status) {
      joined.exit_status = part.exit_status;
      joined.end_reason = part.end_reason;
    }
    is_whole = is_whole && part.state == RunState::whole;
    has_all_ranks = has_all_ranks || part.ranks.empty();
    ranks.insert(part.ranks.begin(), part.ranks.end());
    joined.merged_from.push_back(run.directory());
  }
  joined.world_size = runs.front().world_size();
  joined.ranks.clear();
  if (!has_all_ranks) joined.ranks.assign(ranks.begin(), ranks.end());
  joined.state = is_whole ? RunState::whole : RunState::died;
  return joined;
}

void copy_stream(const std::string& from, const std::string& to) {
  std::error_code error;
  std::filesystem::copy_file(from, to, error);
  if (error) {
    throw Error(fmt::format("{}: cannot be copied to {}: {}.", from, to, error.message()),
                "Free space on this file system or choose another output folder.");
  }
}

}  // namespace

void merge_runs(const std::vector<std::string>& run_directories, const std::string& output_directory) {
  if (run_directories.empty())
    throw Error("No run to merge was given.", "Name the folders that the nodes have recorded.");
  std::vector<Run> runs;
  for (const std::string& directory : run_directories) runs.push_back(Run::open(directory));
  check_mergeable(runs);
  const Manifest joined = joined_manifest(runs);
  create_run(output_directory, joined);
  std::vector<std::string> copied;
  try {
    for (const Run& run : runs) {
      for (const auto& stream : run.streams()) {
        copied.push_back(output_directory + "/" + stream_file_name(stream->header().rank));
        copy_stream(stream->path(), copied.back());
      }
    }
    write_manifest(output_directory, joined);
  } catch (const Error&) {
    // Half a run must not look like one.
    std::error_code ignored;
    for (const std::string& path : copied) std::filesystem::remove(path, ignored);
    std::filesystem::remove(output_directory + "/run.json", ignored);
    throw;
  }
}

}  // namespace forkpoint
