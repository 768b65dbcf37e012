#include "samples/minigpt/rendezvous.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "samples/minigpt/error.h"

namespace minigpt {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw Error(fmt::format("{}: {}: {}", path, what, std::strerror(errno)));
}

struct flock lock_of(int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

bool is_locked(int file, int rank) {
  struct flock lock = lock_of(rank);
  return fcntl(file, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

bool take_lock(int file, int rank) {
  struct flock lock = lock_of(rank);
  return fcntl(file, F_SETLK, &lock) == 0;
}

}  // namespace

std::string rendezvous_path(const std::string& directory, const World& world) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const unsigned char c : world.job) hash = (hash ^ c) * 0x100000001b3;
  const std::string folder = !directory.empty() ? directory : access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
  return fmt::format("{}/minigpt-{}-{:016x}", folder, getuid(), hash);
}

RendezvousFile RendezvousFile::create(const std::string& path, const std::string& content, size_t size_bytes) {
  if (const int old = open(path.c_str(), O_RDWR | O_CLOEXEC); old >= 0) {
    const bool alive = is_locked(old, 0);
    close(old);
    if (alive)
      throw Error(fmt::format("{}: another job with this name is running; give this one another MASTER_PORT", path));
  }
  const std::string draft = fmt::format("{}.{}", path, getpid());
  const int file = open(draft.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) fail(draft, "cannot be made");
  RendezvousFile result(draft, file);
  // Space is taken now: a full /dev/shm would otherwise kill the ranks by SIGBUS later.
  if ((errno = posix_fallocate(file, 0, static_cast<off_t>(size_bytes))) != 0)
    fail(draft, fmt::format("no room for {} bytes", size_bytes));
  if (!take_lock(file, 0)) fail(draft, "cannot be locked");
  if (pwrite(file, content.data(), content.size(), 0) != static_cast<ssize_t>(content.size()))
    fail(draft, "cannot be written");
  if (rename(draft.c_str(), path.c_str()) != 0) fail(path, "cannot be made");
  result.path_ = path;
  return result;
}

RendezvousFile RendezvousFile::join(const std::string& path, int rank, int timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(timeout_s);
  for (;;) {
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file >= 0 && is_locked(file, 0)) {
      RendezvousFile result({}, file);
      if (!take_lock(file, rank)) throw Error(fmt::format("{}: another process is rank {} already", path, rank));
      return result;
    }
    if (file < 0 && errno != ENOENT) fail(path, "cannot be opened");
    if (file >= 0) close(file);
    if (std::chrono::steady_clock::now() > deadline)
      throw Error(fmt::format("rank 0 did not come within {} s (waited for {})", timeout_s, path));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

RendezvousFile::~RendezvousFile() {
  remove_name();
  if (file_ >= 0) close(file_);
}

std::string RendezvousFile::content(size_t size_bytes) const {
  std::string bytes(size_bytes, '\0');
  if (pread(file_, bytes.data(), size_bytes, 0) != static_cast<ssize_t>(size_bytes))
    fail("rendezvous file", "cannot be read");
  return bytes;
}

bool RendezvousFile::is_alive(int rank) const { return is_locked(file_, rank); }

void RendezvousFile::remove_name() {
  if (!path_.empty()) unlink(path_.c_str());
  path_.clear();
}

}  // namespace minigpt
