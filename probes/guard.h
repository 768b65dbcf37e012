// The thread-local guard. Every way into the probe makes a Guard first; the recorder's functions ask for its Token, so
// code that has no Guard does not compile. A second entry on the same thread (a signal handler, an allocator hook, one of
// our own hooks seeing our own call) finds the guard taken and must return at once.
#pragma once

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
  Guard() : saved_errno_(errno), entered_(!inside_) { inside_ = true; }
  ~Guard() {
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
  static void reset_after_fork() { inside_ = false; }

 private:
  // initial-exec: a load from the thread pointer, never a call that may allocate.
  static inline thread_local bool inside_ __attribute__((tls_model("initial-exec"))) = false;
  Token token_;
  int saved_errno_;
  bool entered_;
};

}  // namespace forkpoint
