#include "cli/knob_options.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <set>

#include "cli/terminal.h"

namespace forkpoint {
namespace {

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r"), last = text.find_last_not_of(" \t\r");
  return first == text.npos ? "" : text.substr(first, last - first + 1);
}

// Lines NAME=VALUE; # begins a comment. What is in the environment already, or was in a file before, counts.
void add_nccl_file(const std::string& path, std::map<std::string, std::string>* variables) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    line = trimmed(line.substr(0, line.find('#')));
    const size_t equals = line.find('=');
    if (equals == line.npos) continue;
    const std::string name = trimmed(line.substr(0, equals));
    if (name.starts_with("NCCL_")) variables->emplace(name, trimmed(line.substr(equals + 1)));
  }
}

// What the user has set, wherever.
std::map<std::string, std::string> users_settings() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text(*entry);
    const size_t equals = text.find('=');
    if (equals != text.npos) variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  const char *chosen = std::getenv("NCCL_CONF_FILE"), *home = std::getenv("HOME");
  if (chosen && *chosen) add_nccl_file(chosen, &variables);
  else if (home && *home) add_nccl_file(std::string(home) + "/.nccl.conf", &variables);
  add_nccl_file("/etc/nccl.conf", &variables);
  return variables;
}

}  // namespace

std::optional<Knobs> read_knobs(const Arguments& arguments, std::string_view verb) {
  const auto list = arguments.value("deterministic");
  if (!list) return std::nullopt;
  try {
    return parse_knobs(*list);
  } catch (const Error& error) {
    throw UsageError(fmt::format("{}: --deterministic={}: {}", verb, *list, error.what()), error.hint());
  }
}

std::optional<Knobs> knobs_of(const Manifest& manifest) {
  std::string list;
  for (const RecordedKnob& knob : recorded_knobs(manifest)) {
    if (find_knob(knob.name)) list += (list.empty() ? "" : ",") + knob.name;
  }
  if (list.empty()) return std::nullopt;
  return parse_knobs(list);
}

std::string knob_list(const Knobs& knobs) { return knobs.empty() ? "none" : knob_names(knobs); }

std::optional<KnobPlan> knob_plan(const RecordingRequest& request) {
  if (!request.knobs || request.knobs->empty()) return std::nullopt;
  return resolve(*request.knobs, users_settings());
}

std::vector<RecordedKnob> recorded_knobs(const KnobPlan& plan) {
  std::vector<RecordedKnob> knobs;
  for (const KnobOutcome& outcome : plan.outcomes) {
    knobs.push_back({std::string(outcome.knob->name), std::string(name(outcome.state)), outcome.value, outcome.problem});
  }
  return knobs;
}

void say_not_deterministic(const Recorded& recorded) {
  static std::set<std::string> said;
  for (const std::string& text : recorded.not_deterministic) {
    if (said.insert(text).second) print_warning(text);
  }
}

void say_knobs(const RecordingRequest& request) {
  static std::set<std::string> said;
  const auto plan = knob_plan(request);
  if (!plan) return;
  for (const KnobOutcome& outcome : plan->outcomes) {
    if (!outcome.in_force() && said.insert(outcome.problem).second) print_warning(outcome.problem);
  }
  const std::string note = fmt::format("deterministic: {}", plan->in_force().empty() ? "no knob is in force" : plan->in_force());
  if (said.insert(note).second) print_note(note);
}

}  // namespace forkpoint
