// A run: a folder with a manifest (run.json) and one hash stream a rank (rank-00000.fkp ...).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lib/communicators.h"
#include "lib/hash_stream.h"

namespace forkpoint {

enum class RunState { recording, died, whole };
std::string_view name(RunState state);

// The process that keeps the manifest: by it a run that is being recorded is told from one whose recorder died.
struct RecorderProcess {
  std::string host;
  int64_t pid = 0;
  std::string boot_id;
  uint64_t pid_start_ticks = 0;
  uint64_t pid_namespace = 0;
};

// run.json. Unknown fields survive a read and a write.
struct Manifest {
  int format = 1;
  RunState state = RunState::recording;
  std::string forkpoint_version;
  std::vector<std::string> command;
  std::string working_directory;
  std::map<std::string, std::string> environment;  // the numeric environment: variables that can change results
  std::map<std::string, std::string> versions;     // "cuda_driver", "nccl", "torch", ...
  std::vector<std::string> gpus;
  int world_size = 0;                              // 0: not known (yet)
  std::vector<int> ranks;                          // recorded on purpose (--ranks); empty: all
  Level level = Level::step;
  std::string step_base;
  int64_t every = 1;
  bool names_masked = false;
  std::string started_at;                          // ISO 8601, UTC
  std::string ended_at;
  std::vector<std::string> hosts;
  int exit_status = -1;                            // of the command; -1: not known; 128 + n: signal n
  std::string end_reason;                          // "exited with status 0", "killed by signal 9", ...
  std::vector<std::string> notes;                  // sentences of `record`: what came of --retry
  std::vector<std::string> merged_from;
  RecorderProcess recorder;                        // create_run fills it in where pid is 0: the calling process
  std::string unknown_fields;                      // a JSON object: what this version does not know
};

// A note of `attach`, whose manifest holds the environment of a rank; that of `record`, the one that the command was
// given, before a launcher such as torchrun set more for its ranks.
inline constexpr char kAttachedNote[] = "attached to a running job: ";
// A note of a replay whose job began anew: its steps are not those that they were numbered as.
inline constexpr char kUnopenedCheckpoint[] = "its job opened no file of the checkpoint that it was given";

// Throws Error with file, what was found and what to do.
Manifest read_manifest(const std::string& run_directory);
// Written to a temporary file and renamed, so that a reader sees the old or the new one.
void write_manifest(const std::string& run_directory, const Manifest& manifest);

// Creates a new run folder (and the folders above it) with a manifest in state recording. Throws Error when it exists
// and is not empty, or cannot be made. Of several processes that try at once, one succeeds.
void create_run(const std::string& run_directory, const Manifest& manifest);

std::string stream_file_name(int rank);  // "rank-00003.fkp"
// A process that could open no stream of its own (another one has its rank) leaves its reason in such a file of the run.
std::string refusal_file_name(int rank, int64_t pid);  // "refused-00003-12345.txt"

// Variables of the process environment that can change numerical results or the course of a run: what the manifest
// keeps.
bool is_numeric_environment(std::string_view variable);

// An opened run. Opening reads headers and summaries only. Thread rule as HashStreamReader.
class Run {
 public:
  // Throws Error when the folder is not a run or holds no readable stream at all. A stream of it that cannot be opened
  // is listed in problems(), not fatal.
  static Run open(const std::string& run_directory);
  // Of streams that somebody else has opened, by ascending rank (a run that is being watched). take_streams gives them
  // back; the run is then empty.
  static Run of(std::string run_directory, Manifest manifest, std::vector<std::unique_ptr<HashStreamReader>> streams);
  std::vector<std::unique_ptr<HashStreamReader>> take_streams() { return std::move(streams_); }

  const std::string& directory() const { return directory_; }
  const Manifest& manifest() const { return manifest_; }
  // Decided from manifest and streams: whole only if the manifest says so and every expected stream is there and whole;
  // recording only while a process that writes a stream or the manifest is alive.
  RunState state() const { return state_; }
  const std::vector<std::unique_ptr<HashStreamReader>>& streams() const { return streams_; }  // by ascending rank
  const HashStreamReader* stream_of(int rank) const;                                          // nullptr: missing
  int world_size() const;                  // manifest's, else the streams'
  std::vector<int> missing_ranks() const;  // of those that should be there (Manifest::ranks)
  const Communicators& communicators() const { return communicators_; }  // joined over the streams
  const std::vector<std::string>& problems() const { return problems_; }  // full sentences

 private:
  std::string directory_;
  Manifest manifest_;
  RunState state_ = RunState::died;
  std::vector<std::unique_ptr<HashStreamReader>> streams_;
  Communicators communicators_;
  std::vector<std::string> problems_;
};

// Joins runs of the same job that were recorded to separate folders (one a node) into a new folder: streams are copied,
// never moved. Throws Error when two hold the same rank, or command, world size or level do not agree.
void merge_runs(const std::vector<std::string>& run_directories, const std::string& output_directory);

}  // namespace forkpoint
