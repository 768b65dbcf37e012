// What only the shared library has: the exits of libc that run no destructors, its abort, and the library's own end.
//
// These may be called from a signal handler or in the child of a vfork, so they touch nothing but atomics and the futex
// of a session that this very process owns, and their wait is bounded.
#include <dlfcn.h>
#include <signal.h>
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
void (*real_abort)() = nullptr;
void (*real_assert_fail)(const char*, const char*, unsigned, const char*) = nullptr;

// At load, and not when they are needed: dlsym may take locks.
__attribute__((constructor)) void on_load() {
  real_exit_at_once = reinterpret_cast<Exit>(dlsym(RTLD_NEXT, "_exit"));
  real_Exit = reinterpret_cast<Exit>(dlsym(RTLD_NEXT, "_Exit"));
  real_quick_exit = reinterpret_cast<Exit>(dlsym(RTLD_NEXT, "quick_exit"));
  real_abort = reinterpret_cast<decltype(real_abort)>(dlsym(RTLD_NEXT, "abort"));
  real_assert_fail = reinterpret_cast<decltype(real_assert_fail)>(dlsym(RTLD_NEXT, "__assert_fail"));
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

// The kernel's way of ending a process by SIGABRT, where libc's cannot be had.
[[noreturn]] void abort_at_once() {
  if (real_abort) real_abort();
  signal(SIGABRT, SIG_DFL);
  for (;;) syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), SIGABRT);
}

}  // namespace
}  // namespace forkpoint

extern "C" {

// std::terminate, Py_FatalError and failed checks end here. The stream stays one that died; what was recorded is in it.
__attribute__((visibility("default"), noreturn)) void abort() noexcept {
  forkpoint::recorder.save_before_death();
  forkpoint::abort_at_once();
}
// libc's calls its own abort, not ours.
__attribute__((visibility("default"), noreturn)) void __assert_fail(const char* assertion, const char* file, unsigned line,
                                                                    const char* function) noexcept {
  forkpoint::recorder.save_before_death();
  if (forkpoint::real_assert_fail) forkpoint::real_assert_fail(assertion, file, line, function);
  forkpoint::abort_at_once();
}

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
