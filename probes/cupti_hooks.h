// The CUDA driver calls of the host's program, through CUPTI's callbacks. Watching is for the window that is recorded only:
// another profiler cannot use CUPTI meanwhile.
#pragma once

#include <cstdint>

#include "probes/guard.h"
#include "probes/settings.h"

namespace forkpoint {

enum class Watching : uint8_t { on, absent, taken, refused };

// Any thread, outside of a CUDA call (or in InitializeInjection). What went wrong is said on stderr.
Watching start_watching(const Token& token, const Settings& settings);
// Does nothing inside one of our own callbacks: the next call outside of one ends it.
void stop_watching(const Token& token);
bool is_watching();
// In the child of a fork.
void forget_watching_in_child();

}  // namespace forkpoint
