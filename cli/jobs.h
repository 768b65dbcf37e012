// Processes that can be attached: found by the sockets of their probes, on this machine only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/control.h"

namespace forkpoint {

// A connection to the probe of one process. Not copied; closed at its end, and then the process ends what was asked of it.
class Job {
 public:
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int64_t pid() const { return name_.pid; }
  uint32_t uid() const { return uid_; }
  // Sends and waits for the reply. Nothing: none came in time, or the process is gone (is_gone()).
  std::optional<control::Message> ask(const control::Message& request, int timeout_ms);
  bool is_gone() const { return gone_; }
  std::string who() const;                         // "rank 3 (process 4711)"
  const control::Message& status() const { return status_; }  // as it was last asked
  bool refresh(int timeout_ms);                    // asks again. false: no answer
  int rank() const { return static_cast<int>(status_.number("rank").value_or(-1)); }
  std::optional<int64_t> step() const { return status_.number("step"); }
  std::string state() const { return status_.text("state"); }

 private:
  friend class JobFinder;
  Job(int socket, control::SocketName name, uint32_t uid) : socket_(socket), name_(name), uid_(uid) {}
  int socket_;
  control::SocketName name_;
  uint32_t uid_;
  bool gone_ = false;
  bool owes_reply_ = false;
  control::Message status_;
};

struct FoundJobs {
  std::vector<std::unique_ptr<Job>> jobs;  // by pid
  std::vector<std::string> problems;       // sentences: what is there and cannot be spoken to
};
// All that this user may attach (root: everybody's). Sockets that dead processes have left are removed.
FoundJobs find_jobs();
// Of one process. Throws Error, in words, when there is none, it has no probe, it does not train, or it is another user's.
std::unique_ptr<Job> find_job(int64_t pid);

// Of /proc. Empty where it cannot be read.
std::vector<std::string> command_of(int64_t pid);
std::map<std::string, std::string> environment_of(int64_t pid);
std::string working_directory_of(int64_t pid);

}  // namespace forkpoint
