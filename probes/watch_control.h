// What the program that watches a run asks of its ranks while they run (lib/probe_contract.h, kControlFile): to record
// some steps finer. State of the process; asked for by settings, else nothing is ever read.
#pragma once

#include <cstdint>

#include "lib/record.h"

namespace forkpoint {

struct Settings;

// Writer thread: looks at the file where it is time to (every 50 ms).
void look_at_control(const Settings& settings, int64_t now_ns);
// True while somebody reads what is written, and wants it soon.
bool is_watched(const Settings& settings);

// A step begins: at which level are its records made? Until the next one begins.
Level begin_step_level(const Settings& settings, int64_t step);
// The level of the step that began last. Any thread.
Level level_now(const Settings& settings);

void forget_control_in_child();

}  // namespace forkpoint
