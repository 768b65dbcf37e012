// The stack of open scopes of each thread. Allocated when a thread opens its first scope, freed when it ends.
#pragma once

#include <atomic>
#include <cstdint>

#include "probes/guard.h"
#include "probes/names.h"

namespace forkpoint {

inline constexpr int kMaxScopeDepth = 64;

struct ScopeFrame {
  int8_t phase = -1;             // -1: none given by any enclosing scope
  bool collective = false;
  uint8_t flags = 0;             // RecordFlags of what is recorded in it
  const Name* layer = nullptr;   // nullptr: none
  const Name* op = nullptr;
  const CommunicatorEntry* communicator = nullptr;
  friend bool operator==(const ScopeFrame&, const ScopeFrame&) = default;
};

class ScopeStack {
 public:
  // The calling thread's; nullptr: no memory.
  static ScopeStack* of_thread(const Token& token);
  // As of_thread, but does not allocate: nullptr when the thread never opened a scope.
  static ScopeStack* of_thread_if_any(const Token& token);

  // All threads: what is open now is not open any more. Any thread.
  static void forget_all() { epoch_now_.fetch_add(1, std::memory_order_relaxed); }

  // The innermost scope; what it inherits is already filled in.
  const ScopeFrame& top() const { return depth_ == 0 ? kNone : frames_[depth_ - 1]; }
  // false: deeper than kMaxScopeDepth; the scope is counted, and top() stays.
  bool push(const ScopeFrame& frame);
  // false: no scope is open.
  bool pop();

  // What launches stand under while no scope is open: of a thread on which autograd runs one node after the other, where
  // nothing tells when a layer's part ends. frame: nullptr for nothing; else it must live for ever.
  void set_backward(const ScopeFrame* frame) { backward_ = frame; }
  const ScopeFrame& of_launches() const { return depth_ == 0 && backward_ ? *backward_ : top(); }

 private:
  static const ScopeFrame kNone;
  static inline std::atomic<uint32_t> epoch_now_{0};
  void keep_up() {
    const uint32_t now = epoch_now_.load(std::memory_order_relaxed);
    if (epoch_ != now) epoch_ = now, depth_ = too_deep_ = 0, backward_ = nullptr;
  }
  uint32_t epoch_ = 0;
  int depth_ = 0;
  int too_deep_ = 0;
  const ScopeFrame* backward_ = nullptr;
  ScopeFrame frames_[kMaxScopeDepth];
};

}  // namespace forkpoint
