// Facts for the stream's header. A list that only grows, without a lock: the child of a fork sees it as it was.
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
  std::vector<std::pair<std::string, std::string>> all() const;  // in the order in which the names came

 private:
  struct Node;
  std::atomic<Node*> newest_{nullptr};
};

}  // namespace forkpoint
