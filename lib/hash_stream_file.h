// The files and processes behind a hash stream. Not for callers outside lib.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lib/error.h"
#include "lib/hash_stream.h"

namespace forkpoint {

class FileExistsError : public Error {
 public:
  using Error::Error;
};

// Owns a file descriptor.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

// A regular file that is only read by pread, never mapped: it may be cut by others while we look at it, and a mapped
// page that is gone kills the reader. Thread-safe.
class InputFile {
 public:
  // Throws Error when path is not a regular file that can be read. The size is that of this moment.
  explicit InputFile(const std::string& path);
  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_bytes_; }
  // How many bytes could be read; fewer than asked for at the end of the file or on an error.
  size_t read_at(uint64_t offset, void* data, size_t size_bytes) const;
  // True when some process (this one included) holds the writer's lock.
  bool is_locked() const;

 private:
  std::string path_;
  FileDescriptor fd_;
  uint64_t size_bytes_ = 0;
};

// A new file that only grows. Each append is kept whole or not at all.
class AppendFile {
 public:
  // Throws FileExistsError, or Error when the file cannot be made. Locks it (where the file system can).
  explicit AppendFile(const std::string& path);
  // Throws Error (file, errno's text, bytes wanted) after cutting the file back to what it was before.
  void append(std::span<const uint8_t> bytes);
  uint64_t size_bytes() const { return size_bytes_; }

 private:
  std::string path_;
  FileDescriptor fd_;
  uint64_t size_bytes_ = 0;
};

// Fills in host, pid, boot_id, pid_start_ticks and pid_namespace of the calling process.
void describe_this_process(StreamHeader* header);
// Whether the process of pid, start time, boot and namespace runs; empty when it cannot be told from this host or
// container.
std::optional<bool> process_is_alive(const StreamHeader& header);
// Whether the process that wrote `header` still writes `file`.
bool writer_is_alive(const StreamHeader& header, const InputFile& file);
// "process 4711 on host node7"
std::string describe_writer(const StreamHeader& header);

}  // namespace forkpoint
