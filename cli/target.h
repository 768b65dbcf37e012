// Runs somebody else's command as if it had been started in our place: stdin, stdout and stderr untouched, signals
// passed on, its exit status ours.
#pragma once

#include <csignal>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lib/error.h"

namespace forkpoint {

// The command could not be started. exit_status() is what a shell would say: 126 not executable, 127 not found.
class CannotRun : public Error {
 public:
  CannotRun(const std::string& message, std::string hint, int exit_status)
      : Error(message, std::move(hint)), exit_status_(exit_status) {}
  int exit_status() const { return exit_status_; }

 private:
  int exit_status_;
};

// Variables to set (or, without a value, to remove) in the command's environment.
using EnvironmentChanges = std::map<std::string, std::optional<std::string>>;

struct TargetEnd {
  int exit_status = 0;           // 128 + n: signal n
  int signal = 0;                // that killed it; 0: it exited
  bool interrupted = false;      // by Ctrl-C on our terminal
  std::string stopped;           // "stopped by forkpoint after step 43": we ended it on purpose; empty: we did not
  std::string reason() const;    // "exited with status 0", "killed by signal 9 (Killed)"
  std::string sentence() const;  // "the command exited with status 0", "the command was killed by signal 9 (Killed)"
};

// Starts command (found through PATH) and waits for its end; throws CannotRun, or Error when no process can be made.
//
// Signals: what the terminal sends (Ctrl-C, Ctrl-\, hang-up) reaches the command by itself, since it stays in our
// process group; what another process sends to us alone (kill, a batch system) is passed on to the command. Signals
// that we were started with ignored stay ignored. None of them ends us before the command has ended. REQUIRES: a single
// thread. On return these signals stay blocked, so that an impatient second Ctrl-C does not cut what is left to do.
// Has the commands that this process starts from now on run at the same addresses each time: no randomised address space,
// and an environment of one size whatever is in it. Parameter blocks of kernels hold padding in which old addresses are left;
// two runs at other addresses would differ in it. false: the system does not allow it (some containers).
bool fix_addresses();

// A command in a process group of its own, out of reach of the terminal's Ctrl-C: nothing to read on stdin, stdout and stderr
// go to `output`. It gets SIGTERM when this process dies, and `mask` for its signal mask. Returns its pid; throws as run_target.
// REQUIRES: the caller reaps it.
int start_in_background(const std::vector<std::string>& command, const EnvironmentChanges& changes, int output, const sigset_t& mask);
TargetEnd target_end(int wait_status);

// started: called once the command runs; a thread that it starts takes no signal that is waited for here.
TargetEnd run_target(const std::vector<std::string>& command, const EnvironmentChanges& changes,
                     const std::function<void()>& started = {});

// Ends this process the way the command ended: after a Ctrl-C by SIGINT, so that a shell's loop around us stops too.
[[noreturn]] void exit_like(const TargetEnd& end);

}  // namespace forkpoint
