// The members of a run's communicators, where no rank knew them all: each rank's stream has the hash of what a
// communicator was made from (NCCL's unique id) and the rank's own place in it; together they give the members.
// Immutable once made.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lib/hash_stream.h"

namespace forkpoint {

class Communicators {
 public:
  struct Group {
    std::vector<int> members;  // world rank by place; kUnknown: no stream of the run holds that place
    bool whole = true;         // every place is known, and no two streams contradict each other

    std::vector<int> ranks() const;  // known members, ascending, each once (a process may hold several places)
    int rank_at(int place) const;    // kUnknown: not known
  };
  static constexpr int kUnknown = -1;

  Communicators() = default;
  explicit Communicators(const std::vector<std::unique_ptr<HashStreamReader>>& streams);

  // nullptr: no stream has a communicator of that id, or id is zero.
  const Group* find(const Digest& id) const;

 private:
  std::map<std::pair<uint64_t, uint64_t>, Group> groups_;
};

// A tensor of a call on NCCL: "input", "output", "input to 3" (of a send), "output from 1"; "rank 2: output" where a
// process has several places in the communicator and this is not the lowest of them. -1: none named.
struct CalledTensor {
  std::string base;  // "output"
  int place = -1;    // 2
  int peer = -1;
};
CalledTensor called_tensor(const std::string& tensor);

}  // namespace forkpoint
