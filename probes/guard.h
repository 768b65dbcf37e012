// The thread-local guard. Every way into the probe makes a Guard first; the recorder's functions ask for its Token, so
// code that has no Guard does not compile. A second entry on the same thread (a signal handler, an allocator hook, one of
// our own hooks seeing our own call) finds the guard taken and must return at once.
#pragma once

#include <atomic>
#include <cerrno>

namespace forkpoint {

class Token {
 public:
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;

 private:
  friend class Guard;
  Token() = default;
};

class Guard {
 public:
  Guard() : saved_errno_(errno), entered_(!inside_) {
    inside_ = true;
    if (entered_ && counting_.load(std::memory_order_relaxed)) counted_ = true, users_.fetch_add(1);
  }
  // Of a thread of ours, for its whole life: whatever hooks see of it is ours. It is in no count.
  enum class OwnThread { yes };
  explicit Guard(OwnThread) : saved_errno_(errno), entered_(!inside_) { inside_ = true; }
  ~Guard() {
    if (counted_) users_.fetch_sub(1);
    if (entered_) inside_ = false;
    errno = saved_errno_;
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  bool entered() const { return entered_; }
  // REQUIRES: entered().
  const Token& token() const { return token_; }

  // Is this thread inside the probe's code?
  static bool inside() { return inside_; }
  // The child of a fork has one thread, and it is not in our code.
  static void reset_after_fork() {
    inside_ = false;
    users_.store(0);
  }

  // Threads of the host inside the probe are counted from here on: where recordings end before the process does, what they
  // used may go only when nobody is inside any more.
  static void count_users() { counting_.store(true); }
  static bool has_users() { return users_.load() > 0; }
  // For code without a Guard (the ends of a process). Async-signal-safe.
  class Use {
   public:
    Use() { users_.fetch_add(1); }
    ~Use() { users_.fetch_sub(1); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
  };

 private:
  static inline std::atomic<bool> counting_{false};
  static inline std::atomic<int> users_{0};
  // initial-exec: a load from the thread pointer, never a call that may allocate.
  static inline thread_local bool inside_ __attribute__((tls_model("initial-exec"))) = false;
  Token token_;
  int saved_errno_;
  bool entered_;
  bool counted_ = false;
};

}  // namespace forkpoint
