// Around what a call of the host's asks of the recorder: the guard, and nothing thrown.
#pragma once

#include <exception>

#include "probes/launch_level.h"
#include "probes/recorder.h"

namespace forkpoint {

// body(token), unless the thread is in the probe already. A failure is a Gap, never the host's.
template <typename Body>
void enter(Body body) {
  const Guard guard;
  if (!guard.entered()) return recorder.refuse_reentrant();
  try {
    launch_level_outside_callbacks(guard.token());
    body(guard.token());
  } catch (const std::exception& error) {
    recorder.refuse_broken(error.what());
  }
}

}  // namespace forkpoint
