// Reads a hash stream from end to end and checks what must hold of any bytes at all. Shared by the tests and the fuzz
// target.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lib/hash_stream.h"

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
};

struct Exercise {
  std::string error;  // open threw it; all else is empty then
  StreamState state = StreamState::died;
  std::string damage;  // what verify says
  std::vector<ReadStep> steps;
  std::vector<Gap> gaps;
  std::vector<CoverageLimit> limits;
  uint64_t rows() const;
  size_t complete_steps() const;
  bool looks_perfect() const { return error.empty() && state == StreamState::whole && damage.empty() && gaps.empty(); }
};

// Throws std::logic_error when the reader contradicts itself: sizes that do not match, ids out of range, an Error
// without a file name, a step that verifies but cannot be read. forged: the checksums were made to fit, so sums may be
// lies.
Exercise exercise_stream(const std::string& path, bool forged = false);

bool equal_rows(const StepColumns& a, const StepColumns& b);

std::vector<uint8_t> read_bytes(const std::string& path);
void write_bytes(const std::string& path, std::span<const uint8_t> bytes);

}  // namespace forkpoint
