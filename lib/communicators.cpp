#include "lib/communicators.h"

#include <algorithm>
#include <charconv>
#include <string_view>

namespace forkpoint {
namespace {

constexpr int kMostPlaces = 1 << 20;  // a damaged size must not make us allocate more

}  // namespace

std::vector<int> Communicators::Group::ranks() const {
  std::vector<int> known;
  for (const int member : members) {
    if (member != kUnknown) known.push_back(member);
  }
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  return known;
}

int Communicators::Group::rank_at(int place) const {
  return place >= 0 && static_cast<size_t>(place) < members.size() ? members[static_cast<size_t>(place)] : kUnknown;
}

Communicators::Communicators(const std::vector<std::unique_ptr<HashStreamReader>>& streams) {
  for (const auto& stream : streams) {
    for (const Communicator& entry : stream->communicators()) {
      if (entry.id == Digest{}) continue;
      const auto [at, fresh] = groups_.try_emplace({entry.id.a, entry.id.b});
      Group& group = at->second;
      const int size = std::clamp(entry.size, 0, kMostPlaces);
      if (fresh) group.members.assign(static_cast<size_t>(size), kUnknown);
      const bool fits =
          entry.own_rank >= 0 && entry.own_rank < size && group.members.size() == static_cast<size_t>(size);
      const int rank = stream->header().rank;
      if (fits && group.rank_at(entry.own_rank) == kUnknown) {
        group.members[static_cast<size_t>(entry.own_rank)] = rank;
      } else if (!fits || group.rank_at(entry.own_rank) != rank) {
        group.whole = false;
      }
    }
  }
  for (auto& [id, group] : groups_) {
    const bool all = std::find(group.members.begin(), group.members.end(), kUnknown) == group.members.end();
    group.whole = group.whole && all && !group.members.empty();
  }
}

const Communicators::Group* Communicators::find(const Digest& id) const {
  const auto found = id == Digest{} ? groups_.end() : groups_.find({id.a, id.b});
  return found == groups_.end() ? nullptr : &found->second;
}

CalledTensor called_tensor(const std::string& tensor) {
  CalledTensor called;
  std::string_view rest = tensor;
  const auto take_number = [](std::string_view text, int* number) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
    if (error == std::errc() && end == text.data() + text.size() && *number >= 0) return true;
    *number = -1;
    return false;
  };
  const size_t colon = rest.find(": ");
  if (rest.starts_with("rank ") && colon != std::string_view::npos &&
      take_number(rest.substr(5, colon - 5), &called.place)) {
    rest.remove_prefix(colon + 2);
  }
  for (const std::string_view side : {"input to ", "output from "}) {
    if (rest.starts_with(side) && take_number(rest.substr(side.size()), &called.peer)) {
      rest = rest.substr(0, rest.find(' '));
    }
  }
  called.base = rest;
  return called;
}

}  // namespace forkpoint
