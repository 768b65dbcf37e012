// The few things that the probe needs of the operating system, in a form that is safe in other people's processes: no
// cancellation points, no signals raised in the host, nothing that allocates.
#pragma once

#include <signal.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace forkpoint {

int64_t now_ns();  // monotonic

// One line on stderr, "forkpoint: ...". Cut at 1,000 bytes. Never raises a signal, never fails.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Sleeps until *word != expected, a wake, or timeout_ns (negative: at once).
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns);
void futex_wake(const std::atomic<uint32_t>& word);

// Around the start of a thread of ours: the host must not see its signals go to it.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// Zeroed pages that are not backed before they are touched; nullptr when there are none.
void* map_zeroed(size_t size_bytes);
void unmap(void* address, size_t size_bytes);

}  // namespace forkpoint
