#include "probes/agent.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>

#include "lib/error.h"
#include "lib/hash_stream.h"
#include "lib/hash_stream_file.h"
#include "probes/attachment.h"
#include "probes/guard.h"
#include "probes/os.h"
#include "probes/torch_bridge.h"

namespace forkpoint {
namespace {

constexpr size_t kThreadStackBytes = 512u << 10;
constexpr int kMostClients = 16;
constexpr int kBusyPeriodMs = 5;
constexpr int kHighDescriptor = 400;  // out of the way of programs that count on low numbers

// A descriptor of ours, and which file it is: a host that becomes a daemon closes every descriptor, and the next file that
// it opens may get our number.
struct OwnDescriptor {
  int number = -1;
  dev_t device = 0;
  ino_t inode = 0;

  bool take(int opened) {
    if (opened < 0) return false;
    number = fcntl(opened, F_DUPFD_CLOEXEC, kHighDescriptor);
    if (number >= 0) close(opened);
    else number = opened;
    struct stat status = {};
    if (fstat(number, &status) != 0) return false;
    device = status.st_dev;
    inode = status.st_ino;
    return true;
  }
  bool is_ours() const {
    struct stat status = {};
    return number >= 0 && fstat(number, &status) == 0 && status.st_dev == device && status.st_ino == inode;
  }
  void drop() {
    if (is_ours()) close(number);
    number = -1;
  }
};

struct Client {
  OwnDescriptor socket;
  AgentClient who;
  uint64_t turn = 0;  // of the last message, in a count over all
};

enum class Life : uint32_t { none, starting, running, paused, failed };
constinit std::atomic<Life> life{Life::none};
constinit std::atomic<bool> fork_handlers{false};
constinit std::atomic<bool> stop{false};
constinit std::atomic<pid_t> owner_pid{0};
const Settings* base = nullptr;
OwnDescriptor listener, waker;
Client clients[kMostClients];
uint64_t turns = 0;
char socket_path[4096 + 64] = "";  // to be removed at the end
pthread_t thread;
std::atomic<int> thread_id{0};

// ---- Clients; the agent's thread

bool is_allowed(int socket, int64_t* pid) {
  ucred peer = {};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return false;
  *pid = peer.pid;
  return peer.uid == geteuid() || peer.uid == 0;
}

void drop(Client& client) {
  const bool was_owner = client.who.is_owner;
  client.socket.drop();
  client.who = {};
  if (was_owner) owner_has_gone();
}

// A free place, else that of the client that has been silent for the longest; never the owner's.
Client* place_for_client() {
  Client* oldest = nullptr;
  for (Client& client : clients) {
    if (client.socket.number < 0) return &client;
    if (!client.who.is_owner && (!oldest || client.turn < oldest->turn)) oldest = &client;
  }
  if (oldest) drop(*oldest);
  return oldest;
}

void accept_client() {
  const int opened = accept4(listener.number, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (opened < 0) return;
  int64_t pid = 0;
  Client* client = is_allowed(opened, &pid) ? place_for_client() : nullptr;
  if (!client || !client->socket.take(opened)) {
    close(opened);
    return;
  }
  client->who.pid = pid;
  client->turn = ++turns;
}

void serve(Client& client) {
  static char buffer[control::kMaxBytes + 1];  // one thread
  if (!client.socket.is_ours()) {
    client.socket.number = -1;
    return drop(client);
  }
  const ssize_t bytes = recv(client.socket.number, buffer, sizeof(buffer), MSG_DONTWAIT);
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (bytes <= 0) return drop(client);
  const auto request = control::decode({buffer, static_cast<size_t>(bytes)});
  if (!request) return drop(client);
  bool owned = false;
  for (const Client& other : clients) owned = owned || other.who.is_owner;
  const std::string reply = control::encode(answer_request(*request, &client.who, owned));
  client.turn = ++turns;
  if (send(client.socket.number, reply.data(), reply.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) drop(client);
}

bool has_owner() {
  for (const Client& client : clients) {
    if (client.who.is_owner) return true;
  }
  return false;
}

// false: our sockets are not ours any more.
bool turn_once() {
  pollfd watched[kMostClients + 2] = {{listener.number, POLLIN, 0}, {waker.number, POLLIN, 0}};
  for (int i = 0; i < kMostClients; ++i) watched[i + 2] = {clients[i].socket.number, POLLIN, 0};
  poll(watched, kMostClients + 2, attachment.is_busy() ? kBusyPeriodMs : -1);
  if (!listener.is_ours() || !waker.is_ours()) return false;
  if (stop.load()) return true;
  for (int i = 0; i < kMostClients; ++i) {
    if (watched[i + 2].revents != 0 && clients[i].socket.number == watched[i + 2].fd) serve(clients[i]);
  }
  if (watched[0].revents != 0) accept_client();
  attachment.tick();
  // What was left by an owner that has gone.
  if (!has_owner() && (attachment.state() == AttachState::done || attachment.state() == AttachState::listening)) attachment.release();
  return true;
}

void* run(void*) {
  const Guard guard(Guard::OwnThread::yes);
  thread_id.store(static_cast<int>(syscall(SYS_gettid)));
  prctl(PR_SET_NAME, "forkpoint-agent");
  if (base->cpus_bytes > 0) syscall(SYS_sched_setaffinity, 0, base->cpus_bytes, base->cpus);
  try {
    while (!stop.load()) {
      if (turn_once()) continue;
      life.store(Life::failed);
      break;
    }
  } catch (const std::exception& error) {
    say("the agent ended, the job goes on and cannot be attached: %s", error.what());
    life.store(Life::failed);
  }
  return nullptr;
}

// ---- Its life; threads of the host

// The variables may name a folder that is not this process's (after su, under a batch system): then the one that
// `forkpoint ps` always looks into, too.
int open_folder(std::string* path) {
  const uint32_t user = geteuid();
  *path = control::socket_folder(base->sockets, nullptr, user);
  try {
    return control::open_socket_folder(*path, user, true);
  } catch (const Error&) {
    if (!base->sockets[0]) throw;
  }
  *path = control::socket_folder(nullptr, nullptr, user);
  return control::open_socket_folder(*path, user, true);
}

bool open_sockets() {
  StreamHeader self;
  describe_this_process(&self);
  std::string folder_path;
  const int folder = open_folder(&folder_path);
  const std::string file = control::socket_name({self.pid, self.pid_start_ticks}), hidden = "." + file;
  answer_for(*base, {self.pid, self.pid_start_ticks});
  const std::string hidden_path = control::path_within(folder, hidden), path = control::path_within(folder, file);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  snprintf(address.sun_path, sizeof(address.sun_path), "%s", hidden_path.c_str());
  unlink(hidden_path.c_str());
  const int opened = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  // Its name appears when it answers: one that does not is taken for that of a dead process, and removed.
  const bool bound = listener.take(opened) && bind(listener.number, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
                     listen(listener.number, kMostClients) == 0 && rename(hidden_path.c_str(), path.c_str()) == 0 &&
                     waker.take(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  const int error = errno;
  if (!bound) unlink(hidden_path.c_str());
  close(folder);
  errno = error;
  snprintf(socket_path, sizeof(socket_path), "%s/%s", folder_path.c_str(), file.c_str());
  return bound;
}

bool start_thread() {
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setstacksize(&attributes, kThreadStackBytes);
  const AllSignalsBlocked blocked;
  stop.store(false);
  thread_id.store(0);
  const bool started = pthread_create(&thread, &attributes, run, nullptr) == 0;
  pthread_attr_destroy(&attributes);
  return started;
}

// Returns when the kernel does not count the thread any more: Python 3.12 warns when a process with threads forks.
void before_fork() {
  Life running = Life::running;
  if (!life.compare_exchange_strong(running, Life::paused)) return;
  stop.store(true);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(waker.number, &one, sizeof(one));
  pthread_join(thread, nullptr);
  const int64_t give_up = now_ns() + 10'000'000;
  while (syscall(SYS_tgkill, getpid(), thread_id.load(), 0) == 0 && now_ns() < give_up) sched_yield();
  uint64_t taken = 0;
  [[maybe_unused]] const ssize_t got = read(waker.number, &taken, sizeof(taken));
}

int resume(void*) {
  Life paused = Life::paused;
  if (life.compare_exchange_strong(paused, Life::starting)) life.store(start_thread() ? Life::running : Life::failed);
  return 0;
}

// Python looks for threads when fork has returned: there it goes on behind that.
void after_fork_in_parent() {
  if (life.load() == Life::paused && !call_on_interpreter(resume)) resume(nullptr);
}

}  // namespace

void start_agent(const Settings& settings) {
  Life known = life.load(std::memory_order_acquire);
  if (known == Life::paused) resume(nullptr);
  if (known != Life::none || !life.compare_exchange_strong(known, Life::starting)) return;
  base = &settings;
  owner_pid.store(getpid());
  Guard::count_users();
  bool started = false;
  try {
    started = open_sockets() && start_thread();
    if (!started) say("this job cannot be attached: its socket %s could not be made: %s", socket_path, strerror(errno));
  } catch (const Error& error) {
    say("this job cannot be attached: %s %s", error.what(), error.hint().c_str());
  } catch (const std::exception& error) {
    say("this job cannot be attached: %s", error.what());
  }
  if (!fork_handlers.exchange(true)) pthread_atfork(before_fork, after_fork_in_parent, nullptr);
  life.store(started ? Life::running : Life::failed, std::memory_order_release);
}

void leave_agent() {
  if (owner_pid.load() == getpid() && socket_path[0]) unlink(socket_path);
}

void agent_in_child() {
  for (OwnDescriptor* socket : {&listener, &waker}) socket->drop();
  for (Client& client : clients) client.socket.drop(), client.who = {};
  owner_pid.store(0);
  socket_path[0] = '\0';
  life.store(Life::none);
}

}  // namespace forkpoint
