#include "cli/target.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace forkpoint {
namespace {

constexpr int kPassedOn[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
constexpr int kNotExecutable = 126, kNotFound = 127;

// What the child must get back before exec: ours change so that we can wait for signals one by one.
struct Inherited {
  sigset_t mask;
  struct sigaction child_action;
  int background_output = -1;  // -1: in the foreground, with our files
};

sigset_t block_signals(Inherited* inherited) {
  sigset_t waited;
  sigemptyset(&waited);
  sigaddset(&waited, SIGCHLD);
  for (const int signal : kPassedOn) {
    struct sigaction action {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&waited, signal);
  }
  // A parent that ignores SIGCHLD would make waitpid fail and the exit status be lost.
  struct sigaction plain {};
  plain.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &plain, &inherited->child_action);
  sigprocmask(SIG_BLOCK, &waited, &inherited->mask);
  return waited;
}

std::vector<std::string> environment_with(const EnvironmentChanges& changes) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text(*entry);
    if (!changes.contains(std::string(text.substr(0, text.find('='))))) result.emplace_back(text);
  }
  for (const auto& [name, value] : changes) {
    if (value) result.push_back(name + "=" + *value);
  }
  return result;
}

// The stack begins below the strings of arguments and environment: filled up, so that it begins at one place in runs whose
// folders have names of different lengths.
void pad(const std::vector<std::string>& command, std::vector<std::string>* environment) {
  constexpr size_t kGrain = 32u << 10;
  const std::string name = "FORKPOINT_PADDING=";
  size_t used = name.size() + 1 + sizeof(char*);
  for (const auto* words : {&command, static_cast<const std::vector<std::string>*>(environment)}) {
    for (const std::string& word : *words) used += word.size() + 1 + sizeof(char*);
  }
  environment->push_back(name + std::string(kGrain - used % kGrain, '.'));
}

constinit bool addresses_fixed = false;

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> result;
  for (std::string& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

void go_to_background(int output, pid_t parent) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(kNotFound);
  const int nothing = open("/dev/null", O_RDONLY);
  dup2(nothing, STDIN_FILENO);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  if (nothing > STDERR_FILENO) close(nothing);
}

[[noreturn]] void become(char** arguments, char** environment, const Inherited& inherited, int report) {
  sigaction(SIGCHLD, &inherited.child_action, nullptr);
  sigprocmask(SIG_SETMASK, &inherited.mask, nullptr);
  execvpe(arguments[0], arguments, environment);
  const int error = errno;
  [[maybe_unused]] const ssize_t written = write(report, &error, sizeof(error));
  _exit(kNotFound);
}

CannotRun cannot_run(const std::string& program, int error) {
  const std::string message = fmt::format("cannot run `{}`: {}.", program, std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) {
    const bool searched = program.find('/') == std::string::npos;
    return {message, searched ? "It is not on the PATH." : "There is no such file, or its interpreter is missing.",
            kNotFound};
  }
  return {message, error == EACCES ? "It is a folder or not marked executable (chmod +x)." : "", kNotExecutable};
}

// The pipe closes by itself when exec succeeds.
pid_t start(std::vector<std::string> command, const EnvironmentChanges& changes, const Inherited& inherited) {
  std::vector<std::string> environment = environment_with(changes);
  if (addresses_fixed) pad(command, &environment);
  const std::vector<char*> arguments = pointers(command), variables = pointers(environment);
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) throw Error(fmt::format("cannot make a pipe: {}.", std::strerror(errno)));
  std::fflush(nullptr);
  const pid_t parent = getpid(), child = fork();
  if (child == 0) {
    if (inherited.background_output >= 0) go_to_background(inherited.background_output, parent);
    become(const_cast<char**>(arguments.data()), const_cast<char**>(variables.data()), inherited, report[1]);
  }
  const int fork_error = errno;
  close(report[1]);
  int exec_error = 0;
  const bool failed = child > 0 && read(report[0], &exec_error, sizeof(exec_error)) == sizeof(exec_error);
  close(report[0]);
  if (child < 0) {
    throw Error(fmt::format("cannot start a process: {}.", std::strerror(fork_error)),
                "See `ulimit -u` and free memory.");
  }
  if (failed) {
    waitpid(child, nullptr, 0);
    throw cannot_run(command.front(), exec_error);
  }
  return child;
}

// True when the terminal's signal has reached the child already.
bool shares_terminal_signal(pid_t child, const siginfo_t& info) {
  return info.si_code == SI_KERNEL && getpgid(child) == getpgrp();
}

void pass_on(pid_t child, const siginfo_t& info) {
  if (info.si_pid == child || shares_terminal_signal(child, info)) return;
  // A command that leads a group of its own (setsid) has its children there.
  kill(getpgid(child) == child ? -child : child, info.si_signo);
}

}  // namespace

TargetEnd target_end(int wait_status) {
  TargetEnd end;
  if (WIFSIGNALED(wait_status)) {
    end.signal = WTERMSIG(wait_status);
    end.exit_status = 128 + end.signal;
  } else {
    end.exit_status = WEXITSTATUS(wait_status);
  }
  return end;
}

int start_in_background(const std::vector<std::string>& command, const EnvironmentChanges& changes, int output,
                        const sigset_t& mask) {
  Inherited inherited{};
  inherited.background_output = output;
  struct sigaction plain {};
  plain.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &plain, &inherited.child_action);
  inherited.mask = mask;
  return start(command, changes, inherited);
}

std::string TargetEnd::reason() const {
  if (!stopped.empty()) return stopped;
  if (signal) return fmt::format("killed by signal {} ({})", signal, strsignal(signal));
  return fmt::format("exited with status {}", exit_status);
}

std::string TargetEnd::sentence() const { return fmt::format("the command {}{}", signal || !stopped.empty() ? "was " : "", reason()); }

bool fix_addresses() {
  const int now = personality(0xffffffff);
  addresses_fixed = now != -1 && personality(static_cast<unsigned long>(now) | ADDR_NO_RANDOMIZE) != -1;
  return addresses_fixed;
}

TargetEnd run_target(const std::vector<std::string>& command, const EnvironmentChanges& changes,
                     const std::function<void()>& started) {
  Inherited inherited{};
  const sigset_t waited = block_signals(&inherited);
  const pid_t child = start(command, changes, inherited);
  // From here on our own lines on stderr must not kill us, whoever has stopped reading.
  std::signal(SIGPIPE, SIG_IGN);
  if (started) started();
  bool interrupted = false;
  for (;;) {
    siginfo_t info{};
    const int signal = sigwaitinfo(&waited, &info);
    if (signal < 0) continue;  // stopped and continued (Ctrl-Z, fg)
    if (signal != SIGCHLD) {
      interrupted |= signal == SIGINT && info.si_code == SI_KERNEL;
      pass_on(child, info);
      continue;
    }
    int status = 0;
    if (waitpid(child, &status, WNOHANG) != child) continue;
    TargetEnd end = target_end(status);
    end.interrupted = interrupted && end.signal == SIGINT;
    return end;
  }
}

void exit_like(const TargetEnd& end) {
  std::fflush(nullptr);
  if (end.interrupted) {
    std::signal(SIGINT, SIG_DFL);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_UNBLOCK, &set, nullptr);
    raise(SIGINT);
  }
  std::exit(end.exit_status);
}

}  // namespace forkpoint
