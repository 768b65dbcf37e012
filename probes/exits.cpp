#include "probes/exits.h"

#include <dlfcn.h>

#include "probes/recorder.h"

namespace forkpoint {

void drain_before_libraries_go() {
  // Not atexit: that would bind the handler to this library and to our own __cxa_atexit (library_only.cpp).
  using Register = int (*)(void (*)(void*), void*, void*);
  const auto add = reinterpret_cast<Register>(dlsym(RTLD_NEXT, "__cxa_atexit"));
  if (add) add([](void*) { recorder.drain_at_exit(); }, nullptr, nullptr);
}

}  // namespace forkpoint
