#include "lib/knobs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "lib/error.h"
#include "lib/nearest.h"

namespace forkpoint {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    if (end > 0) parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

std::string joined(const std::vector<std::string_view>& words, std::string_view separator) {
  std::string text;
  for (std::string_view word : words) text += (text.empty() ? "" : std::string(separator)) + std::string(word);
  return text;
}

// What one variable of a knob comes to.
struct VariableOutcome {
  KnobState state = KnobState::set;
  std::string value;  // of the variable, as the command will see it
  std::string problem;
};

std::string_view flag_name(std::string_view flag) { return flag.substr(0, flag.find('=')); }

// The user's flags with one more, unless they name it: the last mention counts, as in the program.
VariableOutcome resolve_flag(const KnobVariable& variable, std::string_view users, std::string_view so_far) {
  std::string_view mention;
  for (std::string_view flag : split(users, ' ')) {
    if (flag_name(flag) == flag_name(variable.value)) mention = flag;
  }
  if (mention.empty()) {
    std::string value(so_far);
    value += (value.empty() ? "" : " ") + std::string(variable.value);
    return {KnobState::set, std::move(value), ""};
  }
  const bool bare = mention.find('=') == std::string_view::npos;  // "--flag" is "--flag=true"
  const bool good = mention == variable.value || (bare && variable.value.ends_with("=true")) ||
                    (variable.is_as_good != nullptr && !bare && variable.is_as_good(mention.substr(mention.find('=') + 1)));
  if (good) return {KnobState::kept, std::string(so_far), ""};
  return {KnobState::conflict, std::string(so_far),
          fmt::format("{} says {}; {} would be needed.", variable.name, mention, variable.value)};
}

VariableOutcome resolve_variable(const KnobVariable& variable, const std::map<std::string, std::string>& users,
                                 const std::map<std::string, std::string>& so_far) {
  const std::string key(variable.name);
  const auto own = users.find(key);
  if (variable.is_flag) {
    const std::string users_flags = own == users.end() ? "" : own->second;
    const auto planned = so_far.find(key);
    return resolve_flag(variable, users_flags, planned == so_far.end() ? users_flags : planned->second);
  }
  if (own == users.end()) return {KnobState::set, std::string(variable.value), ""};
  const bool good = own->second == variable.value ||
                    (variable.is_as_good != nullptr && !own->second.empty() && variable.is_as_good(own->second));
  if (good) return {KnobState::kept, own->second, ""};
  return {KnobState::conflict, own->second,
          fmt::format("{}={} is set; {} would be needed.", variable.name, own->second,
                      variable.as_good.empty() ? variable.value : variable.as_good)};
}

std::string value_text(const Knob& knob, const std::map<std::string, std::string>& values) {
  std::string text;
  std::vector<std::string_view> seen;
  for (const KnobVariable& variable : knob.variables) {
    if (std::find(seen.begin(), seen.end(), variable.name) != seen.end()) continue;
    seen.push_back(variable.name);
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", variable.name, values.at(std::string(variable.name)));
  }
  if (knob.in_process) text += text.empty() ? "in process" : "; in process";
  return text;
}

KnobOutcome resolve_knob(const Knob& knob, const std::map<std::string, std::string>& users,
                         std::map<std::string, std::string>* changes) {
  KnobOutcome outcome{&knob, KnobState::set, "", ""};
  std::map<std::string, std::string> mine = *changes, values;
  size_t kept = 0;
  for (const KnobVariable& variable : knob.variables) {
    const VariableOutcome one = resolve_variable(variable, users, mine);
    values[std::string(variable.name)] = one.value;
    if (one.state == KnobState::set) mine[std::string(variable.name)] = one.value;
    if (one.state == KnobState::kept) ++kept;
    if (one.state == KnobState::conflict) outcome.problem += (outcome.problem.empty() ? "" : " ") + one.problem;
  }
  outcome.value = value_text(knob, values);
  if (!outcome.problem.empty()) {
    outcome.state = KnobState::conflict;
    // Only what is the user's: the rest of the knob is not set either.
    outcome.value.clear();
    for (const KnobVariable& variable : knob.variables) {
      const auto own = users.find(std::string(variable.name));
      const std::string mention = own == users.end() ? "" : fmt::format("{}={}", own->first, own->second);
      if (mention.empty() || outcome.value.find(mention) != std::string::npos) continue;
      outcome.value += (outcome.value.empty() ? "" : " ") + mention;
    }
    outcome.problem = fmt::format("The knob {} is not in force: {}", knob.name, outcome.problem);
    return outcome;
  }
  if (kept > 0 && kept == knob.variables.size()) outcome.state = KnobState::kept;
  *changes = std::move(mine);
  return outcome;
}

std::vector<std::string_view> all_names() {
  std::vector<std::string_view> names;
  for (const Knob& knob : knob_table()) names.push_back(knob.name);
  return names;
}

const Knob& named(std::string_view word) {
  if (const Knob* knob = find_knob(word)) return *knob;
  const std::string near = nearest(word, all_names());
  throw Error(fmt::format("There is no knob \"{}\".", word),
              fmt::format("{}The knobs: {}.", near.empty() ? "" : fmt::format("Did you mean {}? ", near),
                          joined(all_names(), ", ")));
}

// The words of a list, as marks on the table.
struct Chosen {
  std::vector<bool> wanted = std::vector<bool>(knob_table().size());
  std::vector<bool> left_out = std::vector<bool>(knob_table().size());
  static size_t place(const Knob& knob) { return static_cast<size_t>(&knob - knob_table().data()); }

  void take_set(std::string_view set) {
    for (const Knob& knob : knob_table()) wanted[place(knob)] = set == "all" || (set == "default" && knob.by_default);
  }
  void take(std::string_view word) {
    if (word == "default" || word == "all" || word == "none") return take_set(word);
    const bool out = word.front() == '-';
    const size_t at = place(named(word.front() == '-' || word.front() == '+' ? word.substr(1) : word));
    wanted[at] = !out;
    left_out[at] = out;
  }
  void take_needed() {
    for (const Knob& knob : knob_table()) {
      if (!wanted[place(knob)] || knob.needs.empty()) continue;
      const size_t needed = place(named(knob.needs));
      if (left_out[needed]) {
        throw Error(fmt::format("The knob {} does nothing without {}, which is left out.", knob.name, knob.needs),
                    fmt::format("Leave out {} as well: -{}.", knob.name, knob.name));
      }
      wanted[needed] = true;
    }
  }
};

}  // namespace

const Knob* find_knob(std::string_view name) {
  for (const Knob& knob : knob_table()) {
    if (knob.name == name) return &knob;
  }
  return nullptr;
}

Knobs default_knobs() { return parse_knobs("default"); }

Knobs parse_knobs(std::string_view list) {
  Chosen chosen;
  const std::vector<std::string_view> words = split(list, ',');
  if (words.empty() || words.front().front() == '-' || words.front().front() == '+') chosen.take_set("default");
  for (std::string_view word : words) chosen.take(word);
  chosen.take_needed();
  Knobs knobs;
  for (const Knob& knob : knob_table()) {
    if (chosen.wanted[Chosen::place(knob)]) knobs.push_back(&knob);
  }
  return knobs;
}

std::string knob_names(const Knobs& knobs) {
  std::vector<std::string_view> names;
  for (const Knob* knob : knobs) names.push_back(knob->name);
  return joined(names, ",");
}

std::string knob_list_help() {
  std::vector<std::string_view> off;
  for (const Knob& knob : knob_table()) {
    if (!knob.by_default) off.push_back(knob.name);
  }
  return fmt::format("{}; by default all but {}", joined(all_names(), ", "), joined(off, ", "));
}

std::string_view name(KnobState state) {
  switch (state) {
    case KnobState::set:
      return "set";
    case KnobState::kept:
      return "kept";
    case KnobState::conflict:
      return "conflict";
  }
  return "unknown";
}

std::string KnobPlan::in_force() const {
  std::vector<std::string_view> names;
  for (const KnobOutcome& outcome : outcomes) {
    if (outcome.in_force()) names.push_back(outcome.knob->name);
  }
  return joined(names, ",");
}

KnobPlan resolve(const Knobs& knobs, const std::map<std::string, std::string>& users) {
  KnobPlan plan;
  for (const Knob* knob : knobs) plan.outcomes.push_back(resolve_knob(*knob, users, &plan.changes));
  return plan;
}

}  // namespace forkpoint
