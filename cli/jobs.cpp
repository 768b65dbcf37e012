#include "cli/jobs.h"

#include <dirent.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>

#include "cli/proc_file.h"
#include "cli/processes.h"
#include "lib/error.h"
#include "lib/probe_contract.h"

namespace forkpoint {
namespace fs = std::filesystem;
using control::Message;

namespace {

constexpr int kFirstAnswerMs = 5000;
constexpr int kMostTries = 100;
constexpr useconds_t kTryAgainMicroseconds = 10'000;

std::vector<std::string> words_of(const std::string& path) {
  const std::string text = read_proc_file(path);
  std::vector<std::string> words;
  for (size_t start = 0, end = 0; start < text.size(); start = end + 1) {
    end = std::min(text.find('\0', start), text.size());
    words.push_back(text.substr(start, end - start));
  }
  return words;
}

bool wait_for(int socket, short what, std::chrono::steady_clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd watched = {socket, what, 0};
    const int ready = poll(&watched, 1, static_cast<int>(std::max<int64_t>(left, 0)));
    if (ready > 0) return true;
    if (ready == 0 || errno != EINTR) return false;
  }
}

uint64_t own_pid_namespace() {
  struct stat status = {};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

void add_matches(const std::string& parent, const std::string& start, const std::string& below, std::set<std::string>* folders) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(parent, ignored)) {
    const std::string name = entry.path().filename().string();
    const std::string user = name.starts_with(start) ? name.substr(start.size()) : "";
    const bool is_user = !user.empty() && user.find_first_not_of("0123456789") == user.npos;
    // An empty `below` would leave a slash behind: the same folder by another name, and each job in it twice.
    const fs::path folder = below.empty() ? entry.path() : entry.path() / below;
    if (is_user && fs::is_directory(folder, ignored)) folders->insert(folder.string());
  }
}

std::string folder_for(const std::map<std::string, std::string>& environment, uint32_t uid) {
  const auto value = [&](const char* name) {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  };
  return control::socket_folder(value(contract::kSockets), value("XDG_RUNTIME_DIR"), uid);
}

// A job may have been started with other variables than we were: by a batch system, say. Who names a folder means that one.
std::set<std::string> folders_to_look_in() {
  const uint32_t uid = geteuid();
  if (const char* chosen = std::getenv(contract::kSockets); chosen && *chosen) return {chosen};
  std::set<std::string> folders{control::socket_folder(nullptr, std::getenv("XDG_RUNTIME_DIR"), uid),
                                fmt::format("/run/user/{}/forkpoint", uid), fmt::format("/tmp/forkpoint-{}", uid)};
  if (uid != 0) return folders;
  add_matches("/run/user", "", "forkpoint", &folders);
  add_matches("/tmp", "forkpoint-", "", &folders);
  return folders;
}

}  // namespace

// Looks into one folder.
class JobFinder {
 public:
  explicit JobFinder(FoundJobs* found) : found_(*found) {}

  // only: 0 for all.
  void look(const std::string& folder_path, int64_t only = 0) {
    struct stat status = {};
    if (lstat(folder_path.c_str(), &status) != 0) return;
    try {
      const uint32_t uid = geteuid() == 0 ? status.st_uid : geteuid();
      folder_ = control::open_socket_folder(folder_path, uid, false);
      for (const std::string& file : files()) {
        const auto name = control::parse_socket_name(file);
        if (name && (only == 0 || name->pid == only)) meet(file, *name, uid);
      }
      close(folder_);
    } catch (const Error& error) {
      found_.problems.push_back(error.what());
    }
  }

 private:
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    DIR* listing = opendir(control::path_within(folder_, ".").c_str());
    while (const dirent* entry = listing ? readdir(listing) : nullptr) names.emplace_back(entry->d_name);
    if (listing) closedir(listing);
    std::sort(names.begin(), names.end());
    return names;
  }

  void meet(const std::string& file, const control::SocketName& name, uint32_t uid) {
    const std::string path = control::path_within(folder_, file);
    const int opened = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    bool connected = false;
    for (int i = 0; i < kMostTries && !connected; ++i) {  // EAGAIN: many others are about to
      connected = connect(opened, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
      if (!connected && errno != EAGAIN) break;
      if (!connected) usleep(kTryAgainMicroseconds);
    }
    if (!connected) {
      // Nobody listens: the process is gone.
      if (errno == ECONNREFUSED) unlink(path.c_str());
      else if (errno != ENOENT) found_.problems.push_back(fmt::format("process {} does not take connections: {}.", name.pid, std::strerror(errno)));
      close(opened);
      return;
    }
    std::unique_ptr<Job> job(new Job(opened, name, uid));
    if (const std::string problem = why_not(job.get(), opened); !problem.empty()) {
      found_.problems.push_back(problem);
    } else if (!job->is_gone()) {
      found_.jobs.push_back(std::move(job));
    }
  }

  std::string why_not(Job* job, int opened) const {
    ucred peer = {};
    socklen_t bytes = sizeof(peer);
    if (getsockopt(opened, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 || peer.uid != job->uid()) {
      return fmt::format("the socket of process {} is held by a process of user {}, not of user {}: it is left alone.", job->pid(),
                         peer.uid, job->uid());
    }
    if (!job->refresh(kFirstAnswerMs)) {
      return job->is_gone() ? "" : fmt::format("process {} does not answer: is it stopped?", job->pid());
    }
    if (job->status().version != control::kVersion) {
      return fmt::format("process {} has a probe that speaks version {} of the protocol, and this program version {}: use the "
                         "forkpoint that the job was started with.", job->pid(), job->status().version, control::kVersion);
    }
    if (job->status().number("abi") != contract::kProbeAbi) {
      return fmt::format("process {} has a probe {} of another build (ABI {}, expected {}): use the forkpoint that the job was "
                         "started with.", job->pid(), job->status().text("probe"), job->status().text("abi"), contract::kProbeAbi);
    }
    const auto space = static_cast<uint64_t>(job->status().number("namespace").value_or(0));
    if (space != own_pid_namespace() || peer.pid != job->pid()) {
      return fmt::format("process {} runs in another container (pid namespace): run forkpoint in there.", job->pid());
    }
    return "";
  }

  FoundJobs& found_;
  int folder_ = -1;
};

Job::~Job() { close(socket_); }

std::string Job::who() const {
  return rank() >= 0 ? fmt::format("rank {} (process {})", rank(), pid()) : fmt::format("process {}", pid());
}

std::optional<Message> Job::ask(const Message& request, int timeout_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  const std::string bytes = control::encode(request);
  char buffer[control::kMaxBytes + 1];
  for (bool sent = false; !gone_;) {
    if (!sent && !owes_reply_) {
      sent = send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL) >= 0;
      if (!sent && errno != EAGAIN) return gone_ = true, std::nullopt;
      owes_reply_ = sent;
    }
    if (!wait_for(socket_, sent || owes_reply_ ? POLLIN : POLLOUT, deadline)) return std::nullopt;
    if (!owes_reply_) continue;
    const ssize_t got = recv(socket_, buffer, sizeof(buffer), 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    const auto reply = got > 0 ? control::decode({buffer, static_cast<size_t>(got)}) : std::nullopt;
    if (!reply) return gone_ = true, std::nullopt;
    owes_reply_ = false;
    // The reply to a request that came too late for its own is passed over.
    if (!sent) continue;
    if (reply->word == "status" || reply->version != control::kVersion) status_ = *reply;
    return reply;
  }
  return std::nullopt;
}

bool Job::refresh(int timeout_ms) { return ask(Message("status"), timeout_ms).has_value(); }

namespace {

// torchrun and its like import torch as their ranks do, and train nothing.
void leave_out_launchers(FoundJobs* found) {
  std::set<pid_t> above_ranks;
  for (const auto& job : found->jobs) {
    if (job->rank() >= 0) above_ranks.merge(JobProcesses::ancestors(static_cast<pid_t>(job->pid())));
  }
  std::erase_if(found->jobs, [&](const auto& job) {
    return job->rank() < 0 && !job->step() && above_ranks.contains(static_cast<pid_t>(job->pid()));
  });
}

}  // namespace

FoundJobs find_jobs() {
  FoundJobs found;
  JobFinder finder(&found);
  for (const std::string& folder : folders_to_look_in()) finder.look(folder);
  leave_out_launchers(&found);
  std::sort(found.jobs.begin(), found.jobs.end(), [](const auto& a, const auto& b) { return a->pid() < b->pid(); });
  return found;
}

std::unique_ptr<Job> find_job(int64_t pid) {
  struct stat process = {};
  if (stat(fmt::format("/proc/{}", pid).c_str(), &process) != 0) {
    throw Error(fmt::format("there is no process {}.", pid), "`forkpoint ps` lists the jobs that can be attached.");
  }
  if (geteuid() != 0 && process.st_uid != geteuid()) {
    throw Error(fmt::format("process {} belongs to user {}: only this user and root may attach it.", pid, process.st_uid));
  }
  FoundJobs found;
  JobFinder finder(&found);
  std::set<std::string> folders = folders_to_look_in();
  folders.insert(folder_for(environment_of(pid), process.st_uid));
  folders.insert(control::socket_folder(nullptr, nullptr, process.st_uid));
  for (const std::string& folder : folders) finder.look(folder, pid);
  if (!found.jobs.empty()) {
    if (found.jobs.front()->rank() < 0 && !found.jobs.front()->step()) {
      const FoundJobs all = find_jobs();
      const bool has_ranks = std::any_of(all.jobs.begin(), all.jobs.end(), [&](const auto& job) {
        return job->rank() >= 0 && JobProcesses::ancestors(static_cast<pid_t>(job->pid())).contains(static_cast<pid_t>(pid));
      });
      if (has_ranks) {
        throw Error(fmt::format("process {} has started the ranks of a job and trains nothing itself.", pid),
                    "`forkpoint ps` lists the ranks; --job NAME takes all of them.");
      }
    }
    return std::move(found.jobs.front());
  }
  if (!found.problems.empty()) throw Error(found.problems.front());
  if (read_proc_file(fmt::format("/proc/{}/maps", pid)).find(contract::kProbeFile) == std::string::npos) {
    throw Error(fmt::format("process {} was started without the probe, and it cannot be loaded later.", pid),
                "Start the job with `forkpoint run -- CMD`, or with LD_PRELOAD set to libforkpoint.so.");
  }
  if (environment_of(pid).contains(contract::kRun)) {
    throw Error(fmt::format("process {} is recorded already: it was started by `forkpoint record`.", pid));
  }
  throw Error(fmt::format("process {} has the probe and does not train so far: it has neither imported torch nor begun a step of forkpoint.h.", pid),
              "Ranks have processes of their own: `forkpoint ps` lists them.");
}

std::vector<std::string> command_of(int64_t pid) { return words_of(fmt::format("/proc/{}/cmdline", pid)); }

std::map<std::string, std::string> environment_of(int64_t pid) {
  std::map<std::string, std::string> variables;
  for (const std::string& entry : words_of(fmt::format("/proc/{}/environ", pid))) {
    const size_t equals = entry.find('=');
    if (equals != std::string::npos) variables[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  return variables;
}

std::string working_directory_of(int64_t pid) {
  std::error_code error;
  return fs::read_symlink(fmt::format("/proc/{}/cwd", pid), error).string();
}

}  // namespace forkpoint
