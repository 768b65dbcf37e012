// A value of each thread that needs it: made when the thread first asks, freed when it ends (later destructors of that
// thread may ask again and get a new one). No lock, and no destructor that the host's exit would run.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <new>

namespace forkpoint {

// One for each T in the process.
template <typename T>
class PerThread {
 public:
  // The calling thread's; nullptr: no memory.
  static T* get() {
    if (!value_) {
      value_ = new (std::nothrow) T;
      pthread_key_t key;
      if (value_ && find_key(&key)) pthread_setspecific(key, value_);  // failing only leaks one value
    }
    return value_;
  }
  // nullptr: the thread never asked for it.
  static T* if_any() { return value_; }

 private:
  static void free_at_thread_end(void* value) {
    value_ = nullptr;
    delete static_cast<T*>(value);
  }
  // Without a lock: one that another thread held during a fork would never be free in the child.
  static bool find_key(pthread_key_t* key) {
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

  static inline thread_local T* value_ __attribute__((tls_model("initial-exec"))) = nullptr;
};

}  // namespace forkpoint
