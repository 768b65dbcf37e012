#include "probes/scopes.h"

#include <pthread.h>

#include <atomic>
#include <new>

namespace forkpoint {
namespace {

thread_local ScopeStack* thread_stack __attribute__((tls_model("initial-exec"))) = nullptr;

void free_at_thread_end(void* stack) {
  // Later destructors of this thread may still record: they get a new stack.
  thread_stack = nullptr;
  delete static_cast<ScopeStack*>(stack);
}

// Made at first use without a lock: one that another thread held during a fork would never be free in the child.
bool stack_key(pthread_key_t* key) {
  static std::atomic<uint64_t> made{0};  // key + 1
  uint64_t known = made.load(std::memory_order_acquire);
  if (known == 0) {
    if (pthread_key_create(key, free_at_thread_end) != 0) return false;
    if (made.compare_exchange_strong(known, uint64_t{*key} + 1, std::memory_order_acq_rel)) return true;
    pthread_key_delete(*key);
  }
  *key = static_cast<pthread_key_t>(known - 1);
  return true;
}

}  // namespace

const ScopeFrame ScopeStack::kNone;

ScopeStack* ScopeStack::of_thread(const Token&) {
  if (!thread_stack) {
    thread_stack = new (std::nothrow) ScopeStack;
    pthread_key_t key;
    if (thread_stack && stack_key(&key)) pthread_setspecific(key, thread_stack);  // failing only leaks one stack
  }
  if (thread_stack) thread_stack->keep_up();
  return thread_stack;
}

ScopeStack* ScopeStack::of_thread_if_any(const Token&) {
  if (thread_stack) thread_stack->keep_up();
  return thread_stack;
}

bool ScopeStack::push(const ScopeFrame& frame) {
  if (depth_ == kMaxScopeDepth) {
    ++too_deep_;
    return false;
  }
  frames_[depth_++] = frame;
  return true;
}

bool ScopeStack::pop() {
  if (too_deep_ > 0) {
    --too_deep_;
  } else if (depth_ > 0) {
    --depth_;
  } else {
    return false;
  }
  return true;
}

}  // namespace forkpoint
