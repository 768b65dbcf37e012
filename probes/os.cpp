#include "probes/os.h"

#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace forkpoint {
namespace {

// A write to a closed pipe raises SIGPIPE in the host, one to a file at its size limit SIGXFSZ: block both, and take back
// what we caused.
class NoWriteSignals {
 public:
  NoWriteSignals() {
    sigemptyset(&ours_);
    sigset_t pending;
    if (sigpending(&pending) != 0) sigemptyset(&pending);
    for (int number : {SIGPIPE, SIGXFSZ}) {
      if (sigismember(&pending, number) == 0) sigaddset(&ours_, number);
    }
    blocked_ = pthread_sigmask(SIG_BLOCK, &ours_, &before_) == 0;
  }
  ~NoWriteSignals() {
    if (!blocked_) return;
    const timespec at_once = {};
    if (failed_) syscall(SYS_rt_sigtimedwait, &ours_, nullptr, &at_once, size_t{8});
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  void saw_failure() { failed_ = true; }

 private:
  sigset_t ours_;  // those that were not pending already
  sigset_t before_;
  bool blocked_ = false;
  bool failed_ = false;
};

}  // namespace

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000ll + time.tv_nsec;
}

void say(const char* format, ...) {
  const int saved_errno = errno;
  char line[1024] = "forkpoint: ";
  const size_t prefix = strlen(line);
  va_list arguments;
  va_start(arguments, format);
  const int wanted = vsnprintf(line + prefix, sizeof(line) - prefix - 1, format, arguments);
  va_end(arguments);
  size_t size = prefix + (wanted < 0 ? 0 : std::min<size_t>(static_cast<size_t>(wanted), sizeof(line) - prefix - 2));
  line[size++] = '\n';
  NoWriteSignals guard;
  // The raw call: write() is a cancellation point.
  if (syscall(SYS_write, STDERR_FILENO, line, size) < 0) guard.saw_failure();
  errno = saved_errno;
}

void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns) {
  if (timeout_ns <= 0) return;
  const timespec timeout = {timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, &timeout, nullptr, 0);
}

void futex_wake(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

void* map_zeroed(size_t size_bytes) {
  void* address = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

void unmap(void* address, size_t size_bytes) {
  if (address) munmap(address, size_bytes);
}

}  // namespace forkpoint
