// A library of NCCL's name that calls back, from the caller's thread and from threads that it starts itself.
#include <pthread.h>

#include <thread>

namespace {

struct Call {
  void (*function)(void*);
  void* argument;
};

}  // namespace

extern "C" {

void call_here(void (*function)(void*), void* argument) { function(argument); }

void call_on_thread(void (*function)(void*), void* argument) {
  Call call{function, argument};
  pthread_t thread;
  const auto body = [](void* call) -> void* {
    static_cast<Call*>(call)->function(static_cast<Call*>(call)->argument);
    return nullptr;
  };
  if (pthread_create(&thread, nullptr, body, &call) == 0) pthread_join(thread, nullptr);
}

void call_on_std_thread(void (*function)(void*), void* argument) { std::thread(function, argument).join(); }
}
