// Steps that begin with a kernel or a range of the host's: FORKPOINT_STEP_ON, a POSIX extended regular expression. A
// name that matches begins the next step, numbered from FORKPOINT_FIRST_STEP or 0; a kernel that is launched within a range
// that matches begins none of its own. In a program that tells its own
// steps (forkpoint.h, the torch bridge) whoever begins a step first goes on doing so, and the other is ignored.
#pragma once

#include <cstddef>

#include "probes/guard.h"

namespace forkpoint {

struct Settings;

// When the environment is read. false: not a regular expression; *problem (of problem_bytes) says why.
bool set_step_mark(const char* expression, char* problem, size_t problem_bytes);

// Any thread; false in all but the programs that have FORKPOINT_STEP_ON set.
bool has_step_mark();
// name: a kernel's, mangled or not, or a range's. A mangled one matches in its readable form too. Allocates, and takes
// a lock of libc's: to be asked once a name.
bool is_step_mark(const char* name);
// Something matched. Any thread.
void begin_marked_step(const Token& token);

// The program begins a step itself: false, when steps begin with marks already (said once on stderr).
bool may_begin_own_step();
// How the steps of this process are numbered, for the stream's header.
const char* step_base();
// Where the program's own numbers come from; unset: from the program. base must live for ever.
void set_program_step_base(const char* base);

void forget_steps_in_child();

}  // namespace forkpoint
