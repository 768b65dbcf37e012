// What only the shared library has: the exits of libc that run no destructors, and the library's own end.
//
// These may be called from a signal handler or in the child of a vfork, so they touch nothing but atomics and the futex
// of a session that this very process owns, and their wait is bounded.
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "probes/entry.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

using Exit = void (*)(int);
Exit real_exit_at_once = nullptr;  // _exit and _Exit are one function in libc, but an interposer behind us may tell them apart
Exit real_Exit = nullptr;
Exit real_quick_exit = nullptr;

// At load, and not when they are needed: dlsym may take locks.
__attribute__((constructor)) void on_load() {
  real_exit_at_once = reinterpret_cast<Exit>(dlsym(RTLD_NEXT, "_exit"));
  real_Exit = reinterpret_cast<Exit>(dlsym(RTLD_NEXT, "_Exit"));
  real_quick_exit = reinterpret_cast<Exit>(dlsym(RTLD_NEXT, "quick_exit"));
  ensure_environment_read();
  Dl_info own = {};
  if (dladdr(reinterpret_cast<void*>(&on_load), &own) != 0 && own.dli_fname) offer_to_libraries(own.dli_fname);
}

// Runs after the host's own exit handlers and static destructors, which may still record.
__attribute__((destructor)) void on_unload() { recorder.finish_at_exit(); }

[[noreturn]] void leave(Exit real, int status) {
  recorder.finish_at_exit();
  if (real) real(status);
  for (;;) syscall(SYS_exit_group, status);  // not loaded yet, or no libc behind us
}

}  // namespace
}  // namespace forkpoint

extern "C" {

__attribute__((visibility("default"), noreturn)) void _exit(int status) {
  forkpoint::leave(forkpoint::real_exit_at_once, status);
}
__attribute__((visibility("default"), noreturn)) void _Exit(int status) noexcept {
  forkpoint::leave(forkpoint::real_Exit, status);
}
__attribute__((visibility("default"), noreturn)) void quick_exit(int status) noexcept {
  forkpoint::leave(forkpoint::real_quick_exit, status);
}

// Static objects inside this library are never destroyed: the writer thread and late threads of the host use them until
// the process is gone, and exit handlers would run in the middle of that. Hidden: the host's __cxa_atexit is libc's.
__attribute__((visibility("hidden"))) int __cxa_atexit(void (*)(void*), void*, void*) { return 0; }

}  // extern "C"
