#include "cli/job_boards.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "lib/step_times.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

using contract::StopBoard;
using contract::TimedStopBoard;

template <typename T>
T load(const T& field) {
  return __atomic_load_n(&field, __ATOMIC_ACQUIRE);
}

// nullptr: not one, or not one yet.
StopBoard* map_board(const std::string& path) {
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (file < 0) return nullptr;
  struct stat status = {};
  void* memory = MAP_FAILED;
  if (fstat(file, &status) == 0 && status.st_size == sizeof(TimedStopBoard)) {
    memory = mmap(nullptr, sizeof(TimedStopBoard), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  if (memory == MAP_FAILED) return nullptr;
  auto* board = static_cast<StopBoard*>(memory);
  if (load(board->magic) == StopBoard::kMagic) return board;
  munmap(memory, sizeof(TimedStopBoard));
  return nullptr;
}

}  // namespace

JobBoards::~JobBoards() {
  for (const auto& [path, board] : boards_) munmap(board, sizeof(TimedStopBoard));
  std::error_code ignored;
  for (fs::directory_iterator entry(run_directory_, ignored), end; !ignored && entry != end; entry.increment(ignored)) {
    std::error_code unremoved;
    if (entry->path().filename().string().starts_with(StopBoard::kPrefix)) fs::remove(entry->path(), unremoved);
  }
}

void JobBoards::find_new() {
  std::error_code error;
  for (fs::directory_iterator entry(run_directory_, error), end; !error && entry != end; entry.increment(error)) {
    const std::string path = entry->path().string();
    if (!entry->path().filename().string().starts_with(StopBoard::kPrefix) || boards_.contains(path)) continue;
    if (StopBoard* board = map_board(path)) boards_[path] = board;
  }
}

std::vector<BoardState> JobBoards::read() {
  find_new();
  std::vector<BoardState> states;
  for (const auto& [path, board] : boards_) {
    // The state last: what it says was true of the rest.
    BoardState state;
    state.state = load(board->state);
    state.rank = load(board->rank), state.world_size = load(board->world_size), state.pid = load(board->pid);
    state.first_step = load(board->first_step), state.step = load(board->step);
    states.push_back(state);
  }
  return states;
}

std::vector<StepTimes> JobBoards::step_times() const {
  std::vector<StepTimes> all;
  for (const auto& [path, board] : boards_) {
    const auto* timed = reinterpret_cast<const TimedStopBoard*>(board);
    StepTimes times;
    times.rank = load(board->rank);
    const int64_t last = load(board->step);  // -1: none has begun
    const int64_t first = std::max({int64_t{0}, load(board->first_step), last - TimedStopBoard::kTimes + 1});
    for (int64_t step = first; step <= last; ++step) {
      const int64_t begun_ns = load(timed->begun_ns[step % TimedStopBoard::kTimes]);
      if (begun_ns != 0) times.begun_ns[step] = begun_ns;
    }
    all.push_back(std::move(times));
  }
  return all;
}

void JobBoards::stop_soon(int64_t steps_more) {
  int64_t furthest = -1;
  for (const BoardState& state : read()) furthest = std::max(furthest, state.step);
  furthest += furthest < 0 ? 0 : steps_more;
  for (const auto& [path, board] : boards_) {
    int64_t before = load(board->stop_after);
    while (furthest < before && !__atomic_compare_exchange_n(&board->stop_after, &before, furthest, false,
                                                             __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    }
  }
}

}  // namespace forkpoint
