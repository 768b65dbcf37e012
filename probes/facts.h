// Facts for the stream's header, or to be added to it later. A list that only grows, without a lock: the child of a fork sees it as it was.
#pragma once

#include <atomic>
#include <string>
#include <utility>
#include <vector>

namespace forkpoint {

class FactList {
 public:
  // Any thread. Of two facts with one name the later one counts. false: no memory.
  bool add(const char* name, const char* value);
  // In the order in which the names came. *upto: newest() as it was then.
  std::vector<std::pair<std::string, std::string>> all(const void** upto) const;
  const void* newest() const { return newest_.load(std::memory_order_acquire); }  // another one with each that was added

 private:
  struct Node;
  std::atomic<Node*> newest_{nullptr};
};

}  // namespace forkpoint
