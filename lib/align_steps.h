// Second half of align(): pairs the steps of every rank pair. Internal to align.
#pragma once

#include "lib/align.h"

namespace forkpoint {

// Fills ranks[].steps, start, begin, loaded, prologue_compared and the blockers and notes about steps.
void align_steps(const Run& a, const Run& b, const DiffOptions& options, Alignment* out);

}  // namespace forkpoint
