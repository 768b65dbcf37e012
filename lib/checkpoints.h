// Checkpoints on disk: where they lie, of which step, and whether they are whole. Of the layouts that training frameworks
// write (Megatron, DeepSpeed, HF Trainer, torchtitan and DCP, Lightning, minigpt), and of a pattern that the user gives.
// Checkpoints are read only. Safe from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace forkpoint {

struct Checkpoint {
  std::string path;     // the folder or file, as found under the directory that was asked for
  std::string kind;     // "megatron" | "deepspeed" | "hf-trainer" | "dcp" | "lightning" | "minigpt" | "pattern"
  int64_t step = 0;     // steps done when it was written: the number of the first step that a run resumed from it computes
  bool whole = false;
  std::string why_not;  // it is not whole: in one sentence; empty if whole
  uint64_t size_bytes = 0;  // of all its files
};

// All checkpoints in `directory`, by step and then by path. `pattern`: a file name with one `{step}` and any `*`, for layouts that are not
// known ("ckpt_{step}.pt"); empty: the known ones. A directory (or file) that is itself one checkpoint counts as one. Where
// there is none, the folders below are searched (lightning_logs/version_0/checkpoints); links are followed to a checkpoint, not to search.
// Whole: what the framework writes last is there, every file ends as its format says, every file that an index names is there,
// and no file changes while we look (which takes 0.2 s when one was changed within the last 10 s).
// Throws Error when the directory cannot be read, when several folders below it hold checkpoints (it names them), or the
// pattern has no `{step}`.
std::vector<Checkpoint> find_checkpoints(const std::string& directory, const std::string& pattern = {});

// Whether something in `directory` itself is named as a checkpoint of find_checkpoints is, whole or not. false where it
// cannot be read.
bool holds_checkpoints(const std::string& directory, const std::string& pattern = {});

// The newest whole one with step <= `at_most`. Nothing: there is none.
std::optional<Checkpoint> newest_checkpoint(const std::vector<Checkpoint>& checkpoints, int64_t at_most);

}  // namespace forkpoint
