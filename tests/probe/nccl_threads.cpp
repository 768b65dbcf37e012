// A library that calls back, from the caller's thread and from threads that it starts itself. Built twice: under NCCL's name,
// with a C++ library of its own as NCCL may have one, and as somebody else's (PREFIX).
#include <pthread.h>

#include <thread>

namespace {

struct Call {
  void (*function)(void*);
  void* argument;
};

int calls = 0;  // counted behind each, so that this library's frame stays on the stack meanwhile

void make(const Call& call) {
  call.function(call.argument);
  __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
}

}  // namespace

#define NAME_OF(prefix, name) prefix##name
#define NAMED(prefix, name) NAME_OF(prefix, name)

extern "C" {

void NAMED(PREFIX, call_here)(void (*function)(void*), void* argument) { make({function, argument}); }

void NAMED(PREFIX, call_on_thread)(void (*function)(void*), void* argument) {
  Call call{function, argument};
  pthread_t thread;
  const auto body = [](void* call) -> void* {
    make(*static_cast<Call*>(call));
    return nullptr;
  };
  if (pthread_create(&thread, nullptr, body, &call) == 0) pthread_join(thread, nullptr);
}

void NAMED(PREFIX, call_on_std_thread)(void (*function)(void*), void* argument) { std::thread([=] { make({function, argument}); }).join(); }
}
