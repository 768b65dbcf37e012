// How the ranks of a job find one another: a file whose name follows from the job. Rank 0 makes it and every rank holds
// a lock on one byte of it for as long as it lives, so that a file left by a job that died is not taken for a new one,
// and a rank that dies is noticed: the kernel gives its lock up, whatever ended it.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "samples/minigpt/world.h"

namespace minigpt {

// Where the file of this job lies. directory: as the user gave it; empty: /dev/shm, or /tmp where that is missing.
std::string rendezvous_path(const std::string& directory, const World& world);

class RendezvousFile {
 public:
  // Rank 0. The file begins with `content`, is filled up with zeros to size_bytes and appears whole. Throws Error.
  static RendezvousFile create(const std::string& path, const std::string& content, size_t size_bytes);
  // Any other rank. Waits for rank 0. Throws Error after timeout_s, or when this rank is there already.
  static RendezvousFile join(const std::string& path, int rank, int timeout_s);
  ~RendezvousFile();
  RendezvousFile(RendezvousFile&& other) noexcept
      : path_(std::exchange(other.path_, {})), file_(std::exchange(other.file_, -1)) {}
  RendezvousFile& operator=(RendezvousFile&&) = delete;

  int file() const { return file_; }
  std::string content(size_t size_bytes) const;
  bool is_alive(int rank) const;  // another rank than this
  void remove_name();             // rank 0, once all have joined; the destructor does it otherwise

 private:
  RendezvousFile(std::string path, int file) : path_(std::move(path)), file_(file) {}
  std::string path_;  // to be removed; empty: not by us, or not any more
  int file_;
};

}  // namespace minigpt
