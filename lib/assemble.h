// Puts sharded tensors together: the digests of boxes that tile the global tensor exactly once add up to its digest. So
// runs of other world sizes, or whose shards were cut differently, compare without gathering anything. Pure functions.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "lib/align.h"
#include "lib/diff_step.h"

namespace forkpoint {

// One rank's record of a tensor.
struct Piece {
  int rank = 0;
  uint32_t row = 0;        // in that rank's order of arrival
  const Layout* layout = nullptr;
  const Site* site = nullptr;
  Digest digest;
};

// Exact replicas of a box must agree and count once; the distinct boxes must tile the global shape exactly once. A
// tensor that is not sharded must be the same on all ranks that hold it. Anything else is not comparable, and `why`
// says so.
struct Assembled {
  bool ok = false;
  std::string why;
  Digest digest;
  DType dtype = DType::raw;
  std::vector<int64_t> shape;
};
Assembled assemble(std::span<const Piece> pieces);

// All training records of one step of a run, by what they are. keep: only these (null: all).
struct Pieces {
  std::map<RecordKey, std::vector<Piece>> by_key;
};
// Adds one rank's step. Throws Error as read_step does.
void gather(const HashStreamReader& stream, size_t step_index, Level level, const RecordKeys* keep,
            StepColumns* columns, Pieces* pieces);

// The resharded records of one step.
struct ReshardedStep {
  RecordKeys equal, differing;
  std::map<RecordKey, std::string> not_comparable;  // and why
};
ReshardedStep compare_pieces(const Pieces& a, const Pieces& b);

}  // namespace forkpoint
