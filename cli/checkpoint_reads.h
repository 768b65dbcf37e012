// Whether a job has opened the checkpoint that it was given. One that has not began anew, whatever it was told: its
// steps are not those that a replay numbers them as.
#pragma once

#include <string>
#include <vector>

namespace forkpoint {

enum class Opened { yes, no, unknown };

// Watches from its making on. One thread.
class CheckpointReads {
 public:
  // Each a file, or a folder with all files below it: the copy that the job is given, and what it is a copy of. Links
  // are followed.
  explicit CheckpointReads(const std::vector<std::string>& checkpoints);
  ~CheckpointReads();
  CheckpointReads(const CheckpointReads&) = delete;
  CheckpointReads& operator=(const CheckpointReads&) = delete;

  // For reading, by any process of this machine; one that only writes over a file has not loaded it. unknown: the files
  // could not all be watched (inotify(7): fs.inotify.max_user_watches). A process of another machine is not seen.
  Opened opened() const;

 private:
  void watch_all(const std::string& checkpoint);
  void watch(const std::string& path);

  int descriptor_ = -1;
  bool all_watched_ = false;
};

}  // namespace forkpoint
