// Small runs that look like training, written without a probe: what the tests of the program compare and show.
#pragma once

#include <string>
#include <vector>

#include "lib/run.h"
#include "tests/support/temporary_folder.h"

namespace forkpoint {

// Where the run begins to differ from one made without it: that record and all that depend on it.
struct MadeFault {
  int64_t step = -1;  // -1: none
  int rank = 0;
  int layer = 0;
  std::string where = "grad";  // grad | activation | batch | lr
};

struct MadeRun {
  int ranks = 2;
  int64_t first_step = 0;
  int64_t steps = 6;
  int layers = 3;
  int records_a_layer = 1;  // outputs of each layer: to make a run large
  std::string layer_prefix = "blocks.";
  MadeFault fault = {};
  bool finish = true;               // false: streams end as after a kill
  std::vector<int> leave_out = {};  // ranks without a stream
  std::string end_reason = "exited with status 0";
};

void make_run(const std::string& directory, const MadeRun& plan);

}  // namespace forkpoint
