// A folder of the job's own in place of the user's checkpoint folder, with the one checkpoint in it that a job is to
// resume from. So a job that always takes the newest one takes this one, and what the job saves lands here and not
// among the user's checkpoints, which are only read.
//
// The copy shares its blocks with the original where the file system can (reflink). Elsewhere files are copied; of a
// checkpoint larger than kMostCopied the large ones are symbolic links, and whether the job has written through one of
// them is looked at in the end (changed()). Markers that name the newest checkpoint (Megatron's
// latest_checkpointed_iteration.txt, DeepSpeed's `latest`) are written anew.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lib/checkpoints.h"

namespace forkpoint {

class CheckpointView {
 public:
  static constexpr uint64_t kMostCopied = 4ull << 30;

  // Makes `folder`, which must not exist. Throws Error (no space, unreadable checkpoint); nothing is left then.
  CheckpointView(const Checkpoint& checkpoint, const std::string& folder);
  ~CheckpointView();  // removes the folder
  CheckpointView(const CheckpointView&) = delete;
  CheckpointView& operator=(const CheckpointView&) = delete;

  const std::string& directory() const { return folder_; }       // absolute
  const std::string& checkpoint() const { return checkpoint_; }  // within it
  // Files of the user's that are not as they were when the view was made.
  std::vector<std::string> changed() const;

 private:
  struct Seen {
    uint64_t size_bytes = 0, inode = 0;
    int64_t modified_ns = 0;
    bool operator==(const Seen&) const = default;
  };
  static Seen look_at(const std::string& path);
  void copy_tree(const std::string& from, const std::string& to);
  void copy_file(const std::string& from, const std::string& to);
  void write_marker(const Checkpoint& checkpoint);
  void remove() noexcept;

  std::string folder_, checkpoint_;
  uint64_t left_bytes_ = kMostCopied;
  std::map<std::string, Seen> originals_;
};

}  // namespace forkpoint
