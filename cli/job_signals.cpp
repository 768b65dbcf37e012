#include "cli/job_signals.h"

#include <cerrno>
#include <ctime>

namespace forkpoint {
namespace {

constexpr int kEnding[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM};

}  // namespace

JobSignals::JobSignals() {
  sigemptyset(&awaited_);
  sigaddset(&awaited_, SIGCHLD);
  for (const int signal : kEnding) {
    struct sigaction action {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&awaited_, signal);  // nohup
  }
  // A parent that ignores SIGCHLD would make waitpid fail.
  struct sigaction plain {};
  plain.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &plain, &child_before_);
  sigaction(SIGPIPE, nullptr, &pipe_before_);
  sigprocmask(SIG_BLOCK, &awaited_, &mask_before_);
}

JobSignals::~JobSignals() {
  poll();
  sigaction(SIGCHLD, &child_before_, nullptr);
  sigaction(SIGPIPE, &pipe_before_, nullptr);
  sigprocmask(SIG_SETMASK, &mask_before_, nullptr);
}

void JobSignals::ignore_broken_pipe() {
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, nullptr);
}

bool JobSignals::wait(std::chrono::milliseconds limit) {
  const timespec time = {limit.count() / 1000, (limit.count() % 1000) * 1'000'000};
  const int signal = sigtimedwait(&awaited_, nullptr, &time);
  if (signal < 0) return false;
  if (signal != SIGCHLD) {
    if (first_ == 0) first_ = signal;
    ++count_;
  }
  return true;
}

void JobSignals::poll() {
  while (wait(std::chrono::milliseconds(0))) {
  }
}

}  // namespace forkpoint
