// Scenarios of probe_client that are about processes: their ends, their children, their descriptors and signals.
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <thread>

#include "probes/forkpoint.h"
#undef NDEBUG
#include <assert.h>
#include "tests/probe/client.h"

namespace {

int leave(const Arguments& arguments) {
  const std::string how = arguments.at(0);
  record_steps(0, 3);
  forkpoint_step_begin(3);
  forkpoint_scalar("half", FORKPOINT_ROLE_SCALAR, 1);
  if (how == "whole step") forkpoint_step_end();
  if (how == "_exit") _exit(5);
  if (how == "_Exit") _Exit(5);
  if (how == "quick_exit") quick_exit(5);
  if (how == "abort") {
    usleep(100'000);
    abort();
  }
  if (how == "abort at once") abort();
  if (how == "assert at once") assert(false);
  if (how == "kill at once") kill(getpid(), SIGKILL);
  if (how == "exit in a thread") std::thread([] { exit(5); }).join();
  if (how == "_exit in a handler") {
    signal(SIGUSR1, [](int) { _exit(5); });
    raise(SIGUSR1);
  }
  if (how == "main thread gone") {
    std::thread([] {
      usleep(50'000);
      forkpoint_scalar("late", FORKPOINT_ROLE_SCALAR, 1);
      exit(5);
    }).detach();
    pthread_exit(nullptr);
  }
  if (how == "static destructor") {
    static struct Late {
      ~Late() { forkpoint_scalar("late", FORKPOINT_ROLE_SCALAR, 1); }
    } late;
    exit(5);
  }
  return 5;
}

// Records for ever; the test kills it. Says so once the first steps should be on disk.
int forever(const Arguments&) {
  for (int step = 0;; ++step) {
    forkpoint::Step scope(step);
    for (int i = 0; i < 10; ++i) forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, i);
    usleep(20'000);
    if (step == 20) {
      puts("ready");
      fflush(stdout);
    }
  }
}

// One long step; the test kills it in its middle.
int long_step(const Arguments&) {
  forkpoint::Step scope(0);
  for (int i = 0;; ++i) {
    forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, i);
    usleep(5'000);
    if (i == 120) {
      puts("ready");
      fflush(stdout);
    }
  }
}

int wait_for(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) return 99;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 256; ++fd) count += fcntl(fd, F_GETFD) != -1;
  return count;
}

// ranks N: the parent records nothing and forks its ranks.
int fork_ranks(const Arguments& arguments) {
  const int count = number(arguments, 0, 4);
  forkpoint_fact("launcher", "fork");
  std::vector<pid_t> children;
  for (int rank = 0; rank < count; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      forkpoint_rank(rank, count);
      record_steps(0, 3);
      exit(0);
    }
    children.push_back(child);
  }
  int worst = 0;
  for (pid_t child : children) worst |= wait_for(child);
  return worst;
}

// The parent is a rank, its children are data-loader workers that try to record as well.
int fork_workers(const Arguments&) {
  const int before = open_descriptors();
  forkpoint_step_begin(0);
  forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, 1);
  usleep(50'000);
  for (int how = 0; how < 3; ++how) {
    const pid_t child = fork();
    if (child == 0) {
      record_steps(100, 2);
      if (open_descriptors() != before) _exit(77);
      if (how == 0) exit(0);
      if (how == 1) _exit(0);
      return 0;
    }
    if (const int status = wait_for(child)) return status;
  }
  forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, 2);
  forkpoint_step_end();
  return 0;
}

// The parent is rank 0 and forks rank 1 after it has begun to record.
int fork_other_rank(const Arguments&) {
  forkpoint_rank(0, 2);
  record_steps(0, 2);
  const pid_t child = fork();
  if (child == 0) {
    forkpoint_rank(1, 2);
    record_steps(0, 3);
    return 0;
  }
  const int status = wait_for(child);
  record_steps(2, 1);
  return status;
}

int fork_storm(const Arguments& arguments) {
  const int forks = number(arguments, 0, 200);
  std::atomic<bool> stop{false};
  std::vector<std::thread> recorders;
  forkpoint_step_begin(0);
  for (int t = 0; t < 2; ++t) {
    recorders.emplace_back([&, t] {
      const std::string layer = "recorder." + std::to_string(t);
      forkpoint::Layer scope(FORKPOINT_FORWARD, layer.c_str());
      for (int i = 0; !stop; ++i) {
        // New names all the time: the child must not find a table half changed.
        forkpoint_scalar(("v" + std::to_string(i % 997)).c_str(), FORKPOINT_ROLE_SCALAR, i);
        usleep(50);
      }
    });
  }
  int worst = 0;
  for (int i = 0; i < forks; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      forkpoint_scalar("child", FORKPOINT_ROLE_SCALAR, i);
      if (i % 2) exit(0);
      _exit(0);
    }
    worst = std::max(worst, wait_for(child));
  }
  stop = true;
  for (std::thread& recorder : recorders) recorder.join();
  forkpoint_step_end();
  return worst;
}

int spawn(const Arguments&) {
  forkpoint_step_begin(0);
  forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, 1);
  const int status = system("/bin/true; exit 6");
  const pid_t child = vfork();
  if (child == 0) _exit(7);
  const int vforked = wait_for(child);
  forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, 2);
  forkpoint_step_end();
  return WEXITSTATUS(status) == 6 && vforked == 7 ? 0 : 1;
}

// Fills the disk: no file of this process may grow beyond so many bytes.
int limited_file(const Arguments& arguments) {
  const rlimit limit = {static_cast<rlim_t>(number(arguments, 0, 65536)), RLIM_INFINITY};
  setrlimit(RLIMIT_FSIZE, &limit);
  for (int step = 0; step < 40; ++step) {
    forkpoint::Step scope(step);
    for (int i = 0; i < 500; ++i) forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, i * 1.1 + step);
    usleep(2'000);
  }
  puts("trained");
  return 0;
}

int handlers(const Arguments&) {
  static int caught = 0;
  signal(SIGALRM, [](int) {
    ++caught;
    forkpoint_scalar("in handler", FORKPOINT_ROLE_SCALAR, caught);
  });
  const itimerval every = {{0, 500}, {0, 500}};
  setitimer(ITIMER_REAL, &every, nullptr);
  forkpoint::Step step(0);
  for (int i = 0; i < 200'000 && caught < 200; ++i) {
    errno = 1234;
    forkpoint_scalar("value", FORKPOINT_ROLE_SCALAR, i);
    if (errno != 1234) return 9;
  }
  const itimerval never = {};
  setitimer(ITIMER_REAL, &never, nullptr);
  printf("%d\n", caught);
  return 0;
}

int remove_run(const Arguments& arguments) {
  record_steps(0, 1);
  usleep(100'000);
  const std::string command = "rm -rf '" + arguments.at(0) + "'";
  if (system(command.c_str()) != 0) return 9;
  record_steps(1, 3);
  puts("trained");
  return 0;
}

int leak(const Arguments&) {
  record_steps(0, 1);
  usleep(50'000);
  const int before = open_descriptors();
  for (int i = 0; i < 20; ++i) {
    record_steps(1 + i, 1);
    std::thread([] { forkpoint::Layer scope(FORKPOINT_FORWARD, "x"); }).join();
  }
  return open_descriptors() - before;
}

// A host that closes every descriptor, and opens a file of its own that gets the stream's number.
int close_all(const Arguments& arguments) {
  record_steps(0, 1);
  usleep(50'000);
  for (int fd = 3; fd < 256; ++fd) close(fd);
  const int mine = open(arguments.at(0).c_str(), O_WRONLY | O_CREAT, 0600);
  record_steps(1, 3);
  usleep(300'000);
  const pid_t child = fork();
  if (child == 0) _exit(fcntl(mine, F_GETFD) == -1);
  return wait_for(child);
}

// Where the writer may run, if the thread that makes the first record is pinned.
int pinned(const Arguments&) {
  cpu_set_t before, one;
  if (sched_getaffinity(0, sizeof(before), &before) != 0) return 1;
  CPU_ZERO(&one);
  for (int cpu = 0; CPU_COUNT(&one) == 0; ++cpu) {
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  }
  sched_setaffinity(0, sizeof(one), &one);
  record_steps(0, 1);
  usleep(50'000);
  for (int tid = getpid(); tid < getpid() + 50; ++tid) {
    cpu_set_t set;
    const std::string comm = "/proc/self/task/" + std::to_string(tid) + "/comm";
    if (tid == getpid() || access(comm.c_str(), F_OK) != 0) continue;
    if (sched_getaffinity(tid, sizeof(set), &set) == 0) return CPU_EQUAL(&set, &before) ? 0 : 2;
  }
  return 3;
}

}  // namespace

const Scenarios& process_scenarios() {
  static const Scenarios scenarios = {
    {"leave", leave}, {"forever", forever}, {"long_step", long_step}, {"fork_ranks", fork_ranks},
    {"fork_workers", fork_workers}, {"fork_other_rank", fork_other_rank}, {"fork_storm", fork_storm},
    {"spawn", spawn}, {"limited_file", limited_file}, {"handlers", handlers}, {"remove_run", remove_run},
    {"leak", leak}, {"close_all", close_all}, {"pinned", pinned},
  };
  return scenarios;
}
