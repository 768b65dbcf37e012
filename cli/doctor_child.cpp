#include "cli/doctor_child.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace forkpoint {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr size_t kMostBytes = 1u << 20;  // of what a look may say
constexpr milliseconds kKillPatience{2000};
constexpr int kNotFound = 127;

void write_all(int file, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = write(file, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    done += static_cast<size_t>(count);
  }
}

// A process of its own, out of reach of whatever the look prints, dumps or leaves running.
void settle_child(int answers, pid_t parent, const EnvironmentChanges& changes) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kNotFound);
  const rlimit none = {0, 0};
  setrlimit(RLIMIT_CORE, &none);
  const int nothing = open("/dev/null", O_RDWR);
  for (const int file : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (file != answers) dup2(nothing, file);
  }
  for (const auto& [name, value] : changes) value ? setenv(name.c_str(), value->c_str(), 1) : unsetenv(name.c_str());
}

// Until the other side has closed, or the time is over. true: closed.
bool read_until(int file, steady_clock::time_point deadline, std::string* text) {
  char buffer[4096];
  for (;;) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now()).count();
    pollfd watched = {file, POLLIN, 0};
    const int ready = poll(&watched, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1000)));
    if (ready < 0 && errno != EINTR) return false;
    if (ready <= 0) {
      if (steady_clock::now() >= deadline) return false;
      continue;
    }
    const ssize_t count = read(file, buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return true;
    text->append(buffer, static_cast<size_t>(count));
    if (text->size() > kMostBytes) return false;
  }
}

// false: it does not end even so.
bool reap(pid_t child, steady_clock::time_point deadline, int* status) {
  for (;;) {
    const pid_t ended = waitpid(child, status, WNOHANG);
    if (ended == child) return true;
    if (ended < 0 && errno != EINTR) return false;
    if (steady_clock::now() >= deadline) return false;
    usleep(2000);
  }
}

std::string in_words(int status) {
  if (WIFSIGNALED(status))
    return fmt::format("was killed by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  return fmt::format("exited with status {}", WEXITSTATUS(status));
}

Look follow(pid_t child, int answers, milliseconds limit) {
  const auto deadline = steady_clock::now() + limit;
  std::string text;
  int status = 0;
  // Who holds the other end open may be a process that it started: its own end counts as well.
  bool ended = read_until(answers, deadline, &text) && reap(child, deadline, &status);
  close(answers);
  Look look = parse_look(text);
  if (!ended) {
    kill(-child, SIGKILL);
    kill(child, SIGKILL);
    reap(child, steady_clock::now() + kKillPatience, &status);
    look.trouble = text.size() > kMostBytes
                       ? "said too much"
                       : fmt::format("did not end within {} s", std::max<int64_t>(1, limit.count() / 1000));
    return look;
  }
  kill(-child, SIGKILL);  // what it may have left running
  look.whole = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (!look.whole) look.trouble = in_words(status);
  return look;
}

Look run_child(const std::function<void(int answers)>& body, const EnvironmentChanges& changes, milliseconds limit) {
  int answers[2];
  if (pipe2(answers, O_CLOEXEC) != 0) throw Error(fmt::format("cannot make a pipe: {}.", std::strerror(errno)));
  std::fflush(nullptr);
  const pid_t parent = getpid(), child = fork();
  if (child == 0) {
    settle_child(answers[1], parent, changes);
    body(answers[1]);
    _exit(0);
  }
  const int error = errno;
  close(answers[1]);
  if (child < 0) {
    close(answers[0]);
    throw Error(fmt::format("cannot start a process: {}.", std::strerror(error)), "See `ulimit -u` and free memory.");
  }
  setpgid(child, child);  // here as well: it may be killed before it has done so itself
  return follow(child, answers[0], limit);
}

}  // namespace

void LookWriter::say(const std::string& key, const std::string& value) const {
  std::string line = key + "=" + value;
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < ' '; }, ' ');
  write_all(file_, line + "\n");
}

Look look_in_child(const std::function<void(const LookWriter&)>& look, const EnvironmentChanges& changes,
                   milliseconds limit) {
  return run_child([&](int answers) { look(LookWriter(answers)); }, changes, limit);
}

Look look_by_program(const std::vector<std::string>& command, const EnvironmentChanges& changes, milliseconds limit) {
  const auto become = [&](int answers) {
    std::vector<std::string> words = command;
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    dup2(answers, STDOUT_FILENO);
    if (chdir("/") != 0) _exit(kNotFound);
    execvp(arguments[0], arguments.data());
    _exit(kNotFound);
  };
  return run_child(become, changes, limit);
}

}  // namespace forkpoint
