#include "probes/exits.h"

#include <dlfcn.h>

#include "probes/guard.h"
#include "probes/launch_level.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

void at_exit(void*) {
  const Guard guard;
  if (guard.entered()) launch_level_outside_callbacks(guard.token());
  recorder.drain_at_exit();
}

}  // namespace

void drain_before_libraries_go() {
  // Not atexit: that would bind the handler to this library and to our own __cxa_atexit (library_only.cpp).
  using Register = int (*)(void (*)(void*), void*, void*);
  const auto add = reinterpret_cast<Register>(dlsym(RTLD_NEXT, "__cxa_atexit"));
  if (add) add(at_exit, nullptr, nullptr);
}

}  // namespace forkpoint
