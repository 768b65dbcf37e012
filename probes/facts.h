// Facts for the stream's header, or to be added to it later. A list that only grows, without a lock: the child of a fork
// sees it as it was.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace forkpoint {

class FactList {
 public:
  static constexpr uint32_t kMost = 4096;
  // Any thread. Of two facts with one name the later one counts. false: no memory, or kMost of them came.
  bool add(const char* name, const char* value);
  // Those that came since *known was set here (nullptr: all), in the order in which their names came. Of facts that are
  // taken in parts the later one counts as well.
  std::vector<std::pair<std::string, std::string>> take_new(const void** known) const;

 private:
  struct Node;
  std::atomic<Node*> newest_{nullptr};
  std::atomic<uint32_t> count_{0};
};

}  // namespace forkpoint
