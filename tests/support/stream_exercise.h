// Reads a hash stream from end to end and checks what must hold of any bytes at all. Shared by the tests and the fuzz
// target.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lib/hash_stream_frames.h"

namespace forkpoint {

// Bytes as a file that lies in memory only.
class MemoryFile {
 public:
  explicit MemoryFile(std::span<const uint8_t> bytes);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  int fd_;
  std::string path_;
};

struct ReadStep {
  StepSummary summary;
  StepColumns rows;
  std::string error;  // read_step threw it
  LaunchColumns launches;
  std::string launch_error;  // read_launches threw it
};

struct Exercise {
  std::string error;  // open threw it; all else is empty then
  StreamState state = StreamState::died;
  std::string damage;  // what verify says
  std::vector<ReadStep> steps;
  std::vector<Gap> gaps;
  std::vector<CoverageLimit> limits;
  uint64_t rows() const;
  uint64_t launches() const;
  size_t complete_steps() const;
  bool looks_perfect() const { return error.empty() && state == StreamState::whole && damage.empty() && gaps.empty(); }
};

// Throws std::logic_error when the reader contradicts itself: sizes that do not match, ids out of range, an Error
// without a file name, a step that verifies but cannot be read. forged: the checksums were made to fit, so sums may be
// lies.
Exercise exercise_stream(const std::string& path, bool forged = false);

bool equal_rows(const StepColumns& a, const StepColumns& b);
bool equal_rows(const LaunchColumns& a, const LaunchColumns& b);
// Whether b begins with all that a holds.
bool is_prefix(const LaunchColumns& a, const LaunchColumns& b);

// The frames of one type of an undamaged file, in its order.
std::vector<Frame> frames_of(const std::string& path, FrameType type);

std::vector<uint8_t> read_bytes(const std::string& path);
void write_bytes(const std::string& path, std::span<const uint8_t> bytes);

}  // namespace forkpoint
