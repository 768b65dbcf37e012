#include "lib/hash_stream_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

namespace forkpoint {
namespace {

std::string errno_text(int number) { return std::system_category().message(number); }

std::string read_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

struct ProcessStatus {
  char state = 'X';
  uint64_t start_ticks = 0;
};

// Fields 3 and 22 of /proc/PID/stat; the command before them may hold blanks and brackets.
std::optional<ProcessStatus> process_status(int64_t pid) {
  const std::string line = read_line(fmt::format("/proc/{}/stat", pid).c_str());
  const size_t bracket = line.rfind(')');
  if (bracket == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(bracket + 1));
  ProcessStatus status;
  std::string skipped;
  fields >> status.state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> status.start_ticks;
  if (!fields) return std::nullopt;
  return status;
}

std::string this_boot_id() { return read_line("/proc/sys/kernel/random/boot_id"); }

uint64_t this_pid_namespace() {
  struct stat status = {};
  return stat("/proc/self/ns/pid", &status) == 0 ? static_cast<uint64_t>(status.st_ino) : 0;
}

int open_retrying(const char* path, int flags) {
  int fd = -1;
  do fd = open(path, flags, 0666);
  while (fd < 0 && errno == EINTR);
  return fd;
}

}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

// O_NONBLOCK: opening a FIFO that someone left in the folder must not hang; it has no effect on a regular file.
InputFile::InputFile(const std::string& path)
    : path_(path), fd_(open_retrying(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (fd_.get() < 0) {
    const int error = errno;
    throw Error(fmt::format("{}: cannot be opened for reading: {}.", path, errno_text(error)),
                error == ENOENT ? "Check the path of the run." : "Check the permissions of the file and its folder.");
  }
  struct stat status = {};
  if (fstat(fd_.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    throw Error(fmt::format("{}: not a regular file; expected a hash stream.", path), "Check the path of the run.");
  }
  size_bytes_ = static_cast<uint64_t>(status.st_size);
}

size_t InputFile::read_at(uint64_t offset, void* data, size_t size_bytes) const {
  size_t done = 0;
  while (done < size_bytes) {
    const ssize_t got =
        pread(fd_.get(), static_cast<char*>(data) + done, size_bytes - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

// Through a descriptor of its own: an attempt on fd_ that succeeded would have to be undone before anyone else tries.
bool InputFile::is_locked() const {
  const FileDescriptor probe(open_retrying(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  return probe.get() >= 0 && flock(probe.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

AppendFile::AppendFile(const std::string& path)
    : path_(path), fd_(open_retrying(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC)) {
  if (fd_.get() < 0) {
    const int error = errno;
    if (error == EEXIST) throw FileExistsError(fmt::format("{}: exists already.", path), "Record to a new run folder.");
    throw Error(fmt::format("{}: cannot be created: {}.", path, errno_text(error)),
                "Check that the run folder exists and is writable.");
  }
  // A reader that looks for the lock at this very moment holds it (shared) for an instant: try a few times. File
  // systems without locks are fine; the reader then goes by the process id.
  for (int attempt = 0; attempt < 50; ++attempt) {
    if (flock(fd_.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) break;
    usleep(1000);
  }
}

void AppendFile::append(std::span<const uint8_t> bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t put = write(fd_.get(), bytes.data() + done, bytes.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      const int error = put < 0 ? errno : ENOSPC;
      const bool cut = done == 0 || ftruncate(fd_.get(), static_cast<off_t>(size_bytes_)) == 0;
      throw Error(fmt::format("{}: {} bytes could not be written at byte {}: {}{}.", path_, bytes.size(), size_bytes_,
                              errno_text(error), cut ? "" : ", nor could the partial frame be cut off"),
                  "Free space on this file system or record to another one; what was written before stays readable.");
    }
    done += static_cast<size_t>(put);
  }
  size_bytes_ += bytes.size();
}

void describe_this_process(StreamHeader* header) {
  char host[HOST_NAME_MAX + 1] = {};
  if (gethostname(host, sizeof(host) - 1) == 0) header->host = host;
  header->pid = getpid();
  header->boot_id = this_boot_id();
  header->pid_namespace = this_pid_namespace();
  if (const auto status = process_status(header->pid)) header->pid_start_ticks = status->start_ticks;
}

std::optional<bool> process_is_alive(const StreamHeader& header) {
  const bool same_kernel = !header.boot_id.empty() && header.boot_id == this_boot_id();
  if (!same_kernel || header.pid_namespace != this_pid_namespace()) return std::nullopt;
  const auto status = process_status(header.pid);
  return status && status->start_ticks == header.pid_start_ticks && status->state != 'Z' && status->state != 'X';
}

// A lock alone is not enough: a child that was forked (a data loader) keeps it after the writer has died. Nor is a live
// process alone: its writer may be gone. From another host or container only the lock can be seen.
bool writer_is_alive(const StreamHeader& header, const InputFile& file) {
  return file.is_locked() && process_is_alive(header).value_or(true);
}

std::string describe_writer(const StreamHeader& header) {
  return fmt::format("process {} on host {}", header.pid, header.host.empty() ? "(unknown)" : header.host);
}

}  // namespace forkpoint
