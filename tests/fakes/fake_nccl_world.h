// What the ranks of the fake NCCL share, and how their work comes to their streams.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/fakes/fake_nccl.h"

namespace forkpoint::fake_nccl {

inline constexpr int kMostRanks = 8;
inline constexpr size_t kMostBytes = 64 << 10;
inline constexpr int kMostSplits = 16;
inline constexpr int kMailboxes = 8;  // messages on their way from one rank to another
inline constexpr size_t kMostMessageBytes = 128 << 10;

// In a shared file, zero at first.
struct Shared {
  struct Member {
    std::atomic<uint32_t> attached;
    std::atomic<uint64_t> posted, taken;  // calls whose input lies in data; whose output was computed
    char data[kMostBytes];
  };
  struct Choice {
    std::atomic<uint32_t> made;
    int color, key;
  };
  struct Channel {
    std::atomic<uint32_t> asked;  // for a connection, by its first
    std::atomic<uint64_t> posted, taken;
    char data[kMailboxes][kMostMessageBytes];
  };
  Member member[kMostRanks];
  Choice split[kMostSplits][kMostRanks];
  Channel channel[kMostRanks][kMostRanks];  // from, to
};

// One call of one rank, as it will be done. input and output are not overlapping ranges except where they are equal.
struct Call {
  const char* name = "";
  int place = 0;
  void* stream = nullptr;
  const void* input = nullptr;
  size_t input_bytes = 0;  // 0: it gives nothing
  void* output = nullptr;
  // Computes the output from what each rank gave.
  std::function<void(const std::vector<const char*>& given)> finish;
  int send_to = -1, receive_from = -1;
  size_t message_bytes = 0;
};

// The ranks of one communicator that this process holds.
struct Family {
  std::string name;
  int size = 0;
  Shared* shared = nullptr;
  std::vector<int> places;
  std::atomic<bool> aborted{false};  // by one of them: nobody waits any more
  // Events behind what was enqueued last: calls on a communicator are done in order, on whatever stream. Of messages at
  // each place: two places of one process are two communicators.
  void* last = nullptr;
  std::map<int, void*> last_messages;
};

struct Comm {
  std::shared_ptr<Family> family;
  int place = 0;
  bool blocking = true;
  std::atomic<int> in_progress{0};
  std::atomic<int> error{0};
  int splits = 0;
  uint64_t calls = 0;
  struct Operator {
    bool used;
    int type;
    bool on_device;
    double value;
    const void* address;
  };
  std::vector<Operator> operators;
};

std::string new_name();
// Joins; the place counts from now on. wait: until all ranks have joined; false: they did not within 20 s.
std::shared_ptr<Family> attach(const std::string& name, int size, int place);
bool wait_for_all(Family& family);

struct Issued {
  std::shared_ptr<Family> family;
  Call call;
};
// Enqueues the calls of a group (or one call). Calls of other threads of this process on the same communicator are
// waited for.
void launch(std::vector<Issued> calls);

}  // namespace forkpoint::fake_nccl
