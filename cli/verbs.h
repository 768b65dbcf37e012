// The verbs of the program, in the order in which `forkpoint -h` lists them.
#pragma once

#include "cli/arguments.h"

namespace forkpoint {

const Verb& record_verb();
const Verb& diff_verb();
const Verb& replay_verb();
const Verb& bisect_verb();
const Verb& resume_verb();
const Verb& check_verb();
const Verb& price_verb();
const Verb& doctor_verb();
const Verb& show_verb();
const Verb& merge_verb();
const Verb& checkpoints_verb();
const Verb& run_verb();
const Verb& ps_verb();
const Verb& attach_verb();
const Verb& detach_verb();
const Verb& version_verb();

const std::vector<const Verb*>& verbs();
const Verb* find_verb(std::string_view name);  // nullptr: no such verb
std::string program_help();

}  // namespace forkpoint
