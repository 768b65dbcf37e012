// The CUDA driver calls of the host's program, through CUPTI's callbacks. Watching is for the window that is recorded only:
// another profiler cannot use CUPTI meanwhile.
#pragma once

#include <cstdint>

#include "probes/guard.h"
#include "probes/settings.h"

namespace forkpoint {

// under_way: another thread is about to start it, and will say what came of it. unusable: a child of a process that uses
// CUDA, which cannot use it, so that there is nothing to watch.
enum class Watching : uint8_t { on, under_way, unusable, absent, taken, refused };

// Any thread, outside of a CUDA call (or in InitializeInjection). What went wrong is said on stderr, once: it is not tried
// again, and later calls get the same answer.
Watching start_watching(const Token& token, const Settings& settings);
// Inside one of our own callbacks CUPTI cannot be given back: it is marked, and the next end_marked_watching does it.
void stop_watching(const Token& token);
// Any thread, at calls of the host that do not come through CUPTI, and when the process ends. Does nothing unless marked.
void end_marked_watching(const Token& token);
// libcuda is initialised in this process. In the child of a fork this proves that CUDA can be used in it.
void note_cuda_initialised();
bool is_watching();
// Has this thread launched, copied or set anything while we watched? One that only asks whether others' work is done is a
// watchdog: nothing waits for its answer.
bool thread_has_launched();
// In the child of a fork.
void forget_watching_in_child();

}  // namespace forkpoint
