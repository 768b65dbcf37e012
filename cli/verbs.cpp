#include "cli/verbs.h"

#include <fmt/format.h>

namespace forkpoint {

const std::vector<const Verb*>& verbs() {
  static const std::vector<const Verb*> table{
      &record_verb(), &diff_verb(),        &replay_verb(), &bisect_verb(), &resume_verb(), &check_verb(),  &price_verb(), &doctor_verb(), &show_verb(),
      &merge_verb(),  &checkpoints_verb(), &run_verb(),    &ps_verb(),     &attach_verb(), &detach_verb(), &version_verb()};
  return table;
}

const Verb* find_verb(std::string_view name) {
  for (const Verb* verb : verbs()) {
    if (verb->name == name) return verb;
  }
  return nullptr;
}

std::string program_help() {
  std::string text =
      "usage: forkpoint VERB ...\n\n"
      "Two training runs should be equal to the last bit and are not: forkpoint says where they forked, and why.\n\n"
      "verbs:\n";
  for (const Verb* verb : verbs()) text += fmt::format("  {:<11} {}\n", verb->name, verb->summary);
  text +=
      "\nexamples:\n"
      "  forkpoint record -o runs/good --level layer -- ./train --seed 1\n"
      "  forkpoint record -o runs/bad  --level layer -- ./train --seed 1\n"
      "  forkpoint diff runs/good runs/bad\n"
      "\n`forkpoint VERB -h` explains a verb. Exit status of diff: 0 identical, 1 diverged, 2 trouble or\n"
      "incomparable; record passes on the status of the command that it ran.\n";
  return text;
}

}  // namespace forkpoint
