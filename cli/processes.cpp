#include "cli/processes.h"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <thread>

#include "cli/proc_file.h"
#include "lib/probe_contract.h"

namespace forkpoint {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kKillPatience{30'000};
constexpr milliseconds kPoll{20};

struct ProcessState {
  pid_t parent = 0;
  bool zombie = false;
};

// Nothing: there is no such process. The name, in parentheses, may hold anything.
std::optional<ProcessState> state_of(pid_t pid) {
  const std::string text = read_proc_file(fmt::format("/proc/{}/stat", pid));
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 4 > text.size()) return std::nullopt;
  const char state = text[name_end + 2];
  return ProcessState{static_cast<pid_t>(std::atol(text.c_str() + name_end + 4)), state == 'Z' || state == 'X'};
}

std::map<pid_t, ProcessState> all_processes() {
  std::map<pid_t, ProcessState> found;
  DIR* folder = opendir("/proc");
  if (!folder) return found;
  while (const dirent* entry = readdir(folder)) {
    pid_t pid = 0;
    const char* end = entry->d_name + std::strlen(entry->d_name);
    const auto [rest, error] = std::from_chars(entry->d_name, end, pid);
    if (error != std::errc() || rest != end) continue;
    if (const auto state = state_of(pid)) found[pid] = *state;
  }
  closedir(folder);
  return found;
}

bool carries(pid_t pid, const std::string& variable) {
  const std::string environment = read_proc_file(fmt::format("/proc/{}/environ", pid));
  for (size_t at = environment.find(variable); at != std::string::npos; at = environment.find(variable, at + 1)) {
    const bool begins = at == 0 || environment[at - 1] == '\0';
    const size_t end = at + variable.size();
    if (begins && (end == environment.size() || environment[end] == '\0')) return true;
  }
  return false;
}

std::set<pid_t> ancestors_of(pid_t pid, const std::map<pid_t, ProcessState>& processes) {
  std::set<pid_t> found;
  for (auto entry = processes.find(pid); entry != processes.end() && found.insert(entry->first).second;) {
    entry = processes.find(entry->second.parent);
  }
  return found;
}

}  // namespace

JobProcesses::JobProcesses(const std::string& run_directory, bool adopt)
    : variable_(
          fmt::format("{}={}", contract::kRun, std::filesystem::absolute(run_directory).lexically_normal().string())) {
  if (adopt) prctl(PR_SET_CHILD_SUBREAPER, 1);
  for (const auto& [pid, state] : all_processes()) {
    if (state.parent == getpid()) not_ours_.insert(pid);
  }
}

std::optional<int> JobProcesses::reap() {
  int status = 0;
  for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
    if (pid == command_) status_ = status;
  }
  return status_;
}

std::set<pid_t> JobProcesses::ancestors(pid_t pid) { return ancestors_of(pid, all_processes()); }

bool JobProcesses::is_alive(pid_t pid) {
  const auto state = state_of(pid);
  return state && !state->zombie;
}

// Parents before their children: a launcher that is ended first starts none of its ranks again.
std::vector<pid_t> JobProcesses::alive() const {
  const auto processes = all_processes();
  const std::set<pid_t> above = ancestors_of(getpid(), processes);
  std::vector<std::pair<size_t, pid_t>> found;
  for (const auto& [pid, state] : processes) {
    if (state.zombie || above.contains(pid)) continue;
    const std::set<pid_t> line = ancestors_of(pid, processes);
    const bool descends = line.contains(getpid()) && std::none_of(not_ours_.begin(), not_ours_.end(),
                                                                  [&](pid_t other) { return line.contains(other); });
    if (descends || carries(pid, variable_)) found.emplace_back(line.size(), pid);
  }
  std::sort(found.begin(), found.end());
  std::vector<pid_t> pids;
  for (const auto& [depth, pid] : found) pids.push_back(pid);
  return pids;
}

bool JobProcesses::wait_for_none(milliseconds limit, const std::function<bool()>& hurry, int repeated_signal) {
  const auto give_up = steady_clock::now() + limit;
  for (;;) {
    reap();
    const std::vector<pid_t> left = alive();
    if (left.empty()) return true;
    if (steady_clock::now() >= give_up || (hurry && hurry())) return false;
    if (repeated_signal) {
      for (const pid_t pid : left) kill(pid, repeated_signal);
    }
    std::this_thread::sleep_for(kPoll);
  }
}

size_t JobProcesses::send(const std::vector<pid_t>& pids, int signal) {
  size_t sent = 0;
  for (const pid_t pid : pids) {
    sent += kill(pid, signal) == 0 ? 1 : 0;
    kill(pid, SIGCONT);
  }
  return sent;
}

std::vector<pid_t> JobProcesses::end(milliseconds patience, const std::function<bool()>& hurry) {
  reap();
  send(alive(), SIGTERM);
  if (!wait_for_none(patience, hurry, 0)) wait_for_none(kKillPatience, nullptr, SIGKILL);
  reap();
  return alive();
}

}  // namespace forkpoint
