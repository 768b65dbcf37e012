// The communicators of a run, a line each: RANK PLACE SIZE MEMBERS NAME (MEMBERS: world ranks by place, "0,1"; "?" where
// no stream of the run holds that place, or for all of them). `forkpoint show` names them only.
// Usage: list_communicators RUN
#include <cstdio>
#include <exception>
#include <string>

#include "lib/communicators.h"
#include "lib/run.h"

using namespace forkpoint;

namespace {

std::string members_of(const Run& run, const Communicator& communicator) {
  const Communicators::Group* group = run.communicators().find(communicator.id);
  const std::vector<int>& members = group ? group->members : communicator.members;
  std::string text;
  for (const int member : members) {
    text += (text.empty() ? "" : ",") + (member == Communicators::kUnknown ? "?" : std::to_string(member));
  }
  return text.empty() ? "?" : text;
}

}  // namespace

int main(int count, char** words) {
  if (count != 2) return fprintf(stderr, "usage: list_communicators RUN\n"), 2;
  try {
    const Run run = Run::open(words[1]);
    for (const auto& stream : run.streams()) {
      for (const Communicator& one : stream->communicators()) {
        printf("%d %d %d %s %s\n", stream->header().rank, one.own_rank, one.size, members_of(run, one).c_str(),
               one.name.c_str());
      }
    }
  } catch (const std::exception& error) {
    return fprintf(stderr, "list_communicators: %s\n", error.what()), 1;
  }
  return 0;
}
