// Two checkpoints, tensor by tensor, however each is cut into files and shards. Pure functions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/checkpoint_content.h"
#include "lib/verdict.h"

namespace forkpoint {

struct TensorDifference {
  std::string name;
  std::string a, b;  // digests; or keys, or types and shapes, where these differ
  std::string where; // "one 32-bit word differs (word 17, element [2, 1]) ...", if a single word explains it; else empty
  std::optional<Pointing> pointing;
};

struct ValueDifference {
  std::string name, a, b;
};

struct CheckpointComparison {
  Outcome outcome = Outcome::incomparable;
  std::string reason;  // one sentence, the answer
  uint64_t tensors_compared = 0, values_compared = 0;
  uint64_t bytes_compared = 0;  // of tensors, of one side
  std::vector<TensorDifference> tensors;  // names in natural order: layers.2 before layers.10
  std::vector<std::string> only_a, only_b;
  std::vector<ValueDifference> values;  // also of those that one side has alone: the other is then empty
  std::vector<std::string> unread;      // what could not be compared, and why
  std::vector<std::string> notes;
};

// REQUIRES: digest_content of both. identical: all names agree, all tensors and (unless `tensors_only`) values are
// equal, and nothing in either was unread. Two values that differ, but each of which is a path into the folder that its
// own checkpoint lies in, with the same rest, are no difference (a note says so), nor are the durations in a Trainer's
// log. Names are compared as they are: a prefix that differs ("module.") is named in `notes`. Where both formats have
// keys, not names alone, these must be equal too: {1: x} is not {"1": x}. requires_grad is no content: where it
// differs, a note says so.
CheckpointComparison compare_checkpoints(const CheckpointContent& a, const CheckpointContent& b, bool tensors_only);

}  // namespace forkpoint
