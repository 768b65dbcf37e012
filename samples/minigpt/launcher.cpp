#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>

#include "samples/minigpt/error.h"
#include "samples/minigpt/world.h"

namespace minigpt {
namespace {

constexpr int kGraceSeconds = 5;

// In the child. What torchrun would set, too.
[[noreturn]] void become_rank(int rank, int ranks, pid_t launcher, const std::string& job, const sigset_t& old_mask,
                              const std::vector<std::string>& arguments) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);  // no rank outlives its launcher
  if (getppid() != launcher) _exit(1);
  const std::map<std::string, std::string> variables = {{"RANK", std::to_string(rank)},
                                                        {"WORLD_SIZE", std::to_string(ranks)},
                                                        {"LOCAL_RANK", std::to_string(rank)},
                                                        {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
                                                        {"MINIGPT_JOB", job}};
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  char program[4096] = {};  // by its name, so that ps shows it
  if (readlink("/proc/self/exe", program, sizeof(program) - 1) < 0) _exit(1);
  std::vector<char*> argv = {program};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  sigprocmask(SIG_SETMASK, &old_mask, nullptr);
  execv(program, argv.data());
  fmt::print(stderr, "minigpt: rank {} could not be started: {}\n", rank, std::strerror(errno));
  _exit(1);
}

class Ranks {
 public:
  void add(pid_t pid, int rank) { rank_of_[pid] = rank; }
  bool empty() const { return rank_of_.empty(); }
  int status() const { return status_; }
  bool ending() const { return ending_; }
  void signal_all(int number) {
    for (const auto& [pid, rank] : rank_of_) kill(pid, number);
  }
  void end(int number) {
    ending_ = true;
    signal_all(number);
    alarm(kGraceSeconds);  // then SIGKILL
  }
  // Every rank that has ended. The first that failed decides the status and ends the others.
  void reap() {
    int status = 0;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
      const auto found = rank_of_.find(pid);
      if (found == rank_of_.end()) continue;
      const int rank = found->second;
      rank_of_.erase(found);
      if ((WIFEXITED(status) && WEXITSTATUS(status) == 0) || ending_) continue;
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      const std::string how = WIFEXITED(status) ? fmt::format("ended with status {}", status_)
                                                : fmt::format("was killed by signal {} ({})", WTERMSIG(status),
                                                              strsignal(WTERMSIG(status)));
      fmt::print(stderr, "minigpt: rank {} {}{}\n", rank, how, empty() ? "" : "; ending the other ranks");
      end(SIGTERM);
    }
  }
  void interrupted(int number) {
    if (!ending_) status_ = 128 + number;
    end(number);
  }

 private:
  std::map<pid_t, int> rank_of_;
  int status_ = 0;
  bool ending_ = false;
};

}  // namespace

int launch_ranks(int ranks, const std::vector<std::string>& arguments) {
  sigset_t awaited, old_mask;
  sigemptyset(&awaited);
  for (const int number : {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGALRM}) sigaddset(&awaited, number);
  sigprocmask(SIG_BLOCK, &awaited, &old_mask);
  fflush(nullptr);
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const std::string job = fmt::format("{}.{}.{}", getpid(), now.tv_sec, now.tv_nsec);
  const pid_t launcher = getpid();
  Ranks children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) become_rank(rank, ranks, launcher, job, old_mask, arguments);
    if (pid < 0) {
      children.signal_all(SIGKILL);
      throw Error(fmt::format("rank {} could not be started: {}", rank, std::strerror(errno)));
    }
    children.add(pid, rank);
  }
  while (!children.empty()) {
    const int number = sigwaitinfo(&awaited, nullptr);
    if (number == SIGCHLD) children.reap();
    if (number == SIGALRM) children.signal_all(SIGKILL);
    if (number == SIGTERM || number == SIGINT || number == SIGHUP) children.interrupted(number);
  }
  sigprocmask(SIG_SETMASK, &old_mask, nullptr);
  return children.status();
}

}  // namespace minigpt
