#include "probes/stop_board.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "lib/step_times.h"
#include "probes/os.h"
#include "probes/settings.h"

namespace forkpoint {
namespace {

using contract::StopBoard;
using contract::TimedStopBoard;

constexpr int64_t kLongestHoldNs = 10'000'000'000;
constexpr int64_t kSliceNs = 50'000'000;

template <typename T>
T load(const T& field) {
  return __atomic_load_n(&field, __ATOMIC_ACQUIRE);
}
template <typename T>
void store(T& field, T value) {
  __atomic_store_n(&field, value, __ATOMIC_RELEASE);
}

// false: a signal came. A raw call: no point at which the host's thread can be cancelled.
bool sleep_slice() {
  const timespec slice = {0, kSliceNs};
  return syscall(SYS_nanosleep, &slice, nullptr) == 0 || errno != EINTR;
}

void* map_new_file(const char* path) {
  const int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return nullptr;
  // Written and not only made longer: on a full disk a page without a place behind it would raise SIGBUS in the host.
  const TimedStopBoard empty = {};
  const bool sized = write(file, &empty, sizeof(empty)) == static_cast<ssize_t>(sizeof(empty));
  void* memory = sized ? mmap(nullptr, sizeof(empty), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  const int error = errno;
  close(file);
  if (memory == MAP_FAILED) unlink(path);
  errno = error;
  return memory == MAP_FAILED ? nullptr : memory;
}

// The first time that it begins counts.
void note_time(StopBoard* board, int64_t step) {
  static_assert(offsetof(TimedStopBoard, board) == 0);
  int64_t& begun_ns = reinterpret_cast<TimedStopBoard*>(board)->begun_ns[step % TimedStopBoard::kTimes];
  if (load(board->step) != step || load(begun_ns) == 0) store(begun_ns, now_ns());
}

}  // namespace

StopBoard* Stop::make(const Settings& settings, int rank, int world_size, int64_t step) const {
  char path[sizeof(settings.run_directory) + 64];
  snprintf(path, sizeof(path), "%s/%s%05d-%d", settings.run_directory, StopBoard::kPrefix, rank, getpid());
  auto* file = static_cast<TimedStopBoard*>(map_new_file(path));
  if (!file) {
    say("%s cannot be made (%s): behind step %ld this rank goes on unrecorded", path, strerror(errno),
        static_cast<long>(settings.stop_after));
    return nullptr;
  }
  StopBoard* board = &file->board;
  board->rank = rank;
  board->world_size = world_size;
  board->pid = getpid();
  board->first_step = board->step = step;
  board->stop_after = settings.stop_after;
  store(board->magic, StopBoard::kMagic);
  return board;
}

void Stop::begin_step(const Settings& settings, int rank, int world_size, int64_t step) {
  if (!tried_.exchange(true)) {
    board_.store(make(settings, rank, world_size, step), std::memory_order_release);
    last_.store(settings.stop_after);
  }
  StopBoard* board = board_.load(std::memory_order_acquire);
  if (!board) return;
  note_time(board, step);
  store(board->step, step);
}

int64_t Stop::stop_after() const {
  const StopBoard* board = board_.load(std::memory_order_acquire);
  return board ? load(board->stop_after) : last_.load(std::memory_order_relaxed);
}

bool Stop::begin_stopping() {
  if (stopping_.exchange(true)) return false;
  StopBoard* board = board_.load(std::memory_order_acquire);
  uint32_t running = StopBoard::running;
  if (board)
    __atomic_compare_exchange_n(&board->state, &running, StopBoard::ending, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return true;
}

void Stop::set_rank(int rank, int world_size) {
  StopBoard* board = board_.load(std::memory_order_acquire);
  if (!board) return;
  store(board->rank, rank);
  store(board->world_size, world_size);
}

void Stop::note_end(bool whole) {
  StopBoard* board = board_.load(std::memory_order_acquire);
  if (!board) return;
  const uint32_t state = load(board->state);
  const bool open = state == StopBoard::running || state == StopBoard::ending;
  if (open && !whole) store(board->state, static_cast<uint32_t>(StopBoard::lost));
  // A process that ends by itself before the last step is over ends its stream as well, and says nothing here.
  if (state == StopBoard::ending && whole) store(board->state, static_cast<uint32_t>(StopBoard::written));
}

void Stop::hold() const {
  if (!board_.load(std::memory_order_acquire)) return;
  const int64_t give_up_ns = now_ns() + kLongestHoldNs;
  while (now_ns() < give_up_ns && sleep_slice()) {
  }
}

void Stop::forget_in_child() {
  board_.store(nullptr);
  last_.store(-1);
  tried_.store(false);
  stopping_.store(false);
}

}  // namespace forkpoint
