#include "cli/checkpoint_reads.h"

#include <sys/inotify.h>
#include <unistd.h>

#include <filesystem>

namespace forkpoint {
namespace fs = std::filesystem;
namespace {
constexpr uint32_t kRead = IN_ACCESS | IN_CLOSE_NOWRITE;  // the second: of files that are mapped, when they are let go
}

CheckpointReads::CheckpointReads(const std::vector<std::string>& checkpoints)
    : descriptor_(inotify_init1(IN_NONBLOCK | IN_CLOEXEC)), all_watched_(descriptor_ >= 0) {
  for (const std::string& checkpoint : checkpoints) watch_all(checkpoint);
}

void CheckpointReads::watch_all(const std::string& checkpoint) {
  std::error_code error;
  if (!fs::is_directory(checkpoint, error)) {
    watch(checkpoint);
    return;
  }
  for (fs::recursive_directory_iterator entry(checkpoint, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code unreadable;
    if (!entry->is_directory(unreadable)) watch(entry->path().string());
  }
  all_watched_ = all_watched_ && !error;
}

CheckpointReads::~CheckpointReads() {
  if (descriptor_ >= 0) close(descriptor_);
}

// Each file tells of its first reading alone, so that the queue of events does not overflow.
void CheckpointReads::watch(const std::string& path) {
  if (descriptor_ < 0 || inotify_add_watch(descriptor_, path.c_str(), kRead | IN_ONESHOT) < 0) all_watched_ = false;
}

Opened CheckpointReads::opened() const {
  alignas(inotify_event) char events[4096];
  ssize_t got = 0;
  while (descriptor_ >= 0 && (got = read(descriptor_, events, sizeof(events))) > 0) {
    for (ssize_t at = 0; at < got;) {
      const auto* event = reinterpret_cast<const inotify_event*>(events + at);
      if (event->mask & (kRead | IN_Q_OVERFLOW)) return Opened::yes;
      at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
    }
  }
  return all_watched_ ? Opened::no : Opened::unknown;
}

}  // namespace forkpoint
