// The knobs of deterministic mode, as data: what each does and why, how it is set from outside, and which settings of the
// user's own are as good. Nothing here touches the process: resolve() says what the environment of a command is to be.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace forkpoint {

// One environment variable of a knob.
struct KnobVariable {
  std::string_view name;   // "CUBLAS_WORKSPACE_CONFIG"
  std::string_view value;  // what is set where the user set nothing
  // Of the user's own value (never empty). nullptr: only `value` itself is as good.
  bool (*is_as_good)(std::string_view users_value) = nullptr;
  bool is_flag = false;    // name is a list of flags ("--flag=value", by blanks): value is one flag, appended if it is not there
  std::string_view as_good = {};  // in words, for messages; empty: `value`
};

struct Knob {
  std::string_view name;   // "cublas"; what --deterministic=LIST and FORKPOINT_DETERMINISTIC say
  std::string_view area;   // "cuBLAS"
  std::string_view does;   // one sentence, no full stop: what changes in the job
  std::string_view why;    // one or two sentences: what is not repeatable without it, and where that is known from
  std::vector<KnobVariable> variables = {};  // empty: set in the process alone
  bool in_process = false;  // the probe acts on it where it is named in FORKPOINT_DETERMINISTIC
  bool by_default = true;   // of plain --deterministic
  bool costly = false;      // known to cost more than a percent or two of a step
  std::string_view needs = {};  // another knob without which this one does nothing; empty: none
};

using Knobs = std::vector<const Knob*>;  // in the table's order, each once

const std::vector<Knob>& knob_table();
const Knob* find_knob(std::string_view name);  // nullptr: there is none
Knobs default_knobs();

// "" or "default": the default set; "all"; "none"; "NAME,NAME": these, and what they need; a list that begins with -NAME or
// +NAME starts from the default set; "all,-NAME". Throws Error: an unknown name (hint: the nearest, and all names), or one
// left out that a named one needs.
Knobs parse_knobs(std::string_view list);
std::string knob_names(const Knobs& knobs);  // "cublas,nccl"
std::string knob_list_help();                // for --help: "cublas nccl ...; by default all but tf32 ..."

// What the probe writes into a run as a coverage limit, though it says nothing of what was seen: an op of the job that repeats
// in no way that we know; and what became of a knob in the process. Compared, it never forbids the word identical.
inline constexpr std::string_view kNotDeterministic = "not deterministic: ", kDeterministicMode = "deterministic mode: ";

enum class KnobState {
  set,       // by forkpoint: in the environment, or in the process
  kept,      // the user's own value is there and as good
  conflict,  // the user's own value is there and is not: it stays, and the knob is not in force
};
std::string_view name(KnobState state);

struct KnobOutcome {
  const Knob* knob = nullptr;
  KnobState state = KnobState::set;
  std::string value;    // "CUBLAS_WORKSPACE_CONFIG=:4096:8"; "in process"; both with "; "
  std::string problem;  // conflict: a full sentence, what the user's value is and what would do; else empty
  bool in_force() const { return state != KnobState::conflict; }
};

struct KnobPlan {
  std::map<std::string, std::string> changes;  // to the environment of the command; nothing that the user set is in here,
                                               // but for lists of flags, which begin with the user's own
  std::vector<KnobOutcome> outcomes;           // one a knob asked for, in the table's order
  std::string in_force() const;                // names, by commas: FORKPOINT_DETERMINISTIC
};

// users: the environment in which the command would run. A knob with several variables is set as a whole or not at all.
// An empty value counts as set where the program would read it so: it is a conflict, not an absence.
KnobPlan resolve(const Knobs& knobs, const std::map<std::string, std::string>& users);

}  // namespace forkpoint
