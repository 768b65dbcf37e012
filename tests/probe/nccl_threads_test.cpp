// Which threads are NCCL's own: told from who started them.
#include "probes/nccl_threads.h"

#include <doctest/doctest.h>

#include <thread>

extern "C" {
void call_here(void (*function)(void*), void* argument);
void call_on_thread(void (*function)(void*), void* argument);
void call_on_std_thread(void (*function)(void*), void* argument);
}

namespace forkpoint {
namespace {

using Caller = void (*)(void (*)(void*), void*);

// Asked twice: the second answer is the remembered one.
bool answer_through(Caller caller) {
  bool answer = false;
  caller(
      [](void* to) {
        const bool first = on_thread_of_nccl();
        *static_cast<bool*>(to) = first && on_thread_of_nccl() == first;
      },
      &answer);
  return answer;
}

bool answer_on_own_thread_through(Caller caller) {
  bool answer = true;
  std::thread([&] { answer = answer_through(caller); }).join();
  return answer;
}

TEST_CASE("a thread that a libnccl started is NCCL's, however it was started") {
  CHECK(answer_through(call_on_thread));
  CHECK(answer_through(call_on_std_thread));
}

TEST_CASE("the host's threads are not NCCL's, though they are in its code") {
  CHECK(!answer_through(call_here));
  CHECK(!answer_on_own_thread_through(call_here));
  CHECK(!answer_on_own_thread_through([](void (*function)(void*), void* argument) { function(argument); }));
}

TEST_CASE("a thread is NCCL's or not whoever has asked before") {
  CHECK(!answer_on_own_thread_through(call_here));
  CHECK(answer_through(call_on_thread));
  CHECK(!answer_on_own_thread_through(call_here));
}

}  // namespace
}  // namespace forkpoint
