#include "probes/facts.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace forkpoint {

struct FactList::Node {
  Node* older;
  char* value;
  char name[1];
};

bool FactList::add(const char* name, const char* value) {
  // Told again, as at each of many recordings of one process: nothing new.
  for (const Node* node = newest_.load(std::memory_order_acquire); node; node = node->older) {
    if (strcmp(node->name, name) != 0) continue;
    if (strcmp(node->value, value) == 0) return true;
    break;
  }
  if (count_.fetch_add(1) >= kMost) return count_.fetch_sub(1), false;
  const size_t name_bytes = strlen(name) + 1;
  const size_t value_bytes = strlen(value) + 1;
  auto* node = static_cast<Node*>(malloc(sizeof(Node) + name_bytes + value_bytes));
  if (!node) return false;
  memcpy(node->name, name, name_bytes);
  node->value = node->name + name_bytes;
  memcpy(node->value, value, value_bytes);
  node->older = newest_.load(std::memory_order_relaxed);
  while (!newest_.compare_exchange_weak(node->older, node, std::memory_order_release, std::memory_order_relaxed)) {
  }
  return true;
}

std::vector<std::pair<std::string, std::string>> FactList::take_new(const void** known) const {
  const Node* newest = newest_.load(std::memory_order_acquire);
  std::vector<const Node*> nodes;
  for (const Node* node = newest; node && node != *known; node = node->older) nodes.push_back(node);
  *known = newest;
  std::reverse(nodes.begin(), nodes.end());
  std::vector<std::pair<std::string, std::string>> facts;
  for (const Node* node : nodes) {
    const auto at = std::find_if(facts.begin(), facts.end(), [&](const auto& fact) { return fact.first == node->name; });
    if (at != facts.end()) at->second = node->value;
    else facts.emplace_back(node->name, node->value);
  }
  return facts;
}

}  // namespace forkpoint
