// Which threads are NCCL's own: told from who started them.
#include "probes/nccl_threads.h"

#include <doctest/doctest.h>

#include <initializer_list>

extern "C" {
void nccl_call_here(void (*function)(void*), void* argument);
void nccl_call_on_thread(void (*function)(void*), void* argument);
void nccl_call_on_std_thread(void (*function)(void*), void* argument);
void host_call_here(void (*function)(void*), void* argument);
void host_call_on_thread(void (*function)(void*), void* argument);
void host_call_on_std_thread(void (*function)(void*), void* argument);
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

// On a thread that `starter` makes, `caller` asks.
struct Ways {
  Caller caller;
  bool answer = true;
};
bool answer_on_thread_of(Caller starter, Caller caller) {
  Ways ways{caller};
  starter([](void* ways) { static_cast<Ways*>(ways)->answer = answer_through(static_cast<Ways*>(ways)->caller); }, &ways);
  return ways.answer;
}

TEST_CASE("a thread that a libnccl started is NCCL's, however it was started") {
  CHECK(answer_through(nccl_call_on_thread));
  CHECK(answer_through(nccl_call_on_std_thread));
}

TEST_CASE("the host's threads are not NCCL's, though they are in its code") {
  CHECK(!answer_through(nccl_call_here));
  for (const Caller starter : {host_call_on_thread, host_call_on_std_thread}) {
    CHECK(!answer_on_thread_of(starter, host_call_here));
    CHECK(!answer_on_thread_of(starter, nccl_call_here));
  }
}

TEST_CASE("a thread on which NCCL calls the host back is not taken for NCCL's") {
  CHECK(!answer_on_thread_of(nccl_call_on_thread, host_call_here));
}

TEST_CASE("a thread is NCCL's or not whoever has asked before") {
  CHECK(!answer_on_thread_of(host_call_on_thread, nccl_call_here));
  CHECK(answer_through(nccl_call_on_thread));
  CHECK(!answer_on_thread_of(host_call_on_thread, nccl_call_here));
}

}  // namespace
}  // namespace forkpoint
