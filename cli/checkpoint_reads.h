// Whether a job has opened the checkpoint that it was given. One that has not began anew, whatever it was told: its
// steps are not those that a replay numbers them as.
#pragma once

#include <string>

namespace forkpoint {

enum class Opened { yes, no, unknown };

// Watches from its making on. One thread.
class CheckpointReads {
 public:
  // checkpoint: a file, or a folder with all files below it. Links are followed.
  explicit CheckpointReads(const std::string& checkpoint);
  ~CheckpointReads();
  CheckpointReads(const CheckpointReads&) = delete;
  CheckpointReads& operator=(const CheckpointReads&) = delete;

  // By any process of this machine, for reading or writing. unknown: the files could not all be watched (inotify(7):
  // fs.inotify.max_user_watches). A process of another machine is not seen.
  Opened opened() const;

 private:
  void watch(const std::string& path);

  int descriptor_ = -1;
  bool all_watched_ = false;
};

}  // namespace forkpoint
