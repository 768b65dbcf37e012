// The program's side of the boards that ranks keep in the run folder (StopBoard in lib/probe_contract.h).
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lib/probe_contract.h"

namespace forkpoint {

struct BoardState {
  int rank = 0;
  int world_size = 1;
  int64_t pid = 0;
  int64_t first_step = 0, step = 0;
  uint32_t state = 0;  // StopBoard::State
};

// When steps began on one rank, in nanoseconds of a clock of the machine: those that the board still has.
struct StepTimes {
  int rank = 0;
  std::map<int64_t, int64_t> begun_ns;  // by step
};

class JobBoards {
 public:
  explicit JobBoards(std::string run_directory) : run_directory_(std::move(run_directory)) {}
  ~JobBoards();  // unmaps and removes them
  JobBoards(const JobBoards&) = delete;
  JobBoards& operator=(const JobBoards&) = delete;

  // All there are now, new ones too.
  std::vector<BoardState> read();
  std::vector<StepTimes> step_times() const;  // of the boards that read() has seen
  // Has every rank stop behind the step that the furthest one is in, or so many steps later: where a step takes less time
  // than this does, a rank may be past it by then.
  void stop_soon(int64_t steps_more = 0);

 private:
  void find_new();

  std::string run_directory_;
  std::map<std::string, contract::StopBoard*> boards_;  // by path
};

}  // namespace forkpoint
