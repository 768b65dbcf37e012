// What a comparison found. Produced by diff (and by everything that drives it), eaten by reports. Plain values.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lib/record.h"

namespace forkpoint {

enum class Outcome { identical, diverged, incomparable };
std::string_view name(Outcome outcome);
int exit_code(Outcome outcome);  // 0, 1, 2

// From two digests alone: exactly one 32-bit word differs.
struct Pointing {
  uint64_t word = 0;                   // 32-bit word of the tensor's row-major bytes
  std::vector<int64_t> tensor_index;   // of the first element in that word
  int64_t delta = 0;                   // arithmetic difference of the word, second run minus first
  int bit = -1;                        // k when delta is +-2^k ("consistent with a flipped bit"; so is 1 ulp), else -1
  int elements = 1;                    // elements that share the word (2 for 16-bit types, 4 for 8-bit)
};

// A place where inputs agree and an output does not. Strings are empty and numbers negative where a field does not apply;
// JSON then says null.
struct Divergence {
  int64_t step = 0;
  int micro_step = 0;
  int rank = -1;                       // -1: all members of the communicator diverge alike
  std::optional<Phase> phase;
  std::string layer, op, tensor, kernel;
  std::string short_kernel;  // `kernel` without return type, template and other arguments
  Kind kind = Kind::tensor;
  std::string before, after;           // readable values of both runs: digests, scalars, layouts
  std::optional<Pointing> pointing;
  bool in_prologue = false;            // before the first step (load)
};

struct Cause {
  std::string cls = "unknown";               // one of cases.md's classes; "" when identical
  std::vector<std::string> class_candidates; // what remains possible; holds cls when that is known
  std::vector<std::string> evidence;         // sentences
  std::string next;                          // cheapest next command
};

struct Coverage {
  uint64_t records_compared = 0;
  uint64_t launches_compared = 0;  // at level launch
  uint64_t buffers_compared = 0;   // digests of buffers after launches; of the steps that were read
  uint64_t bytes_hashed = 0;
  uint64_t steps_compared = 0;
  int ranks_compared = 0;
  std::string level;
  uint64_t frames_verified = 0;
  std::vector<std::string> limits;           // declared coverage limits, and what the levels leave out
};

enum class Cell : uint8_t { equal, diverged, propagated, missing };

struct Verdict {
  Outcome outcome = Outcome::incomparable;
  std::string reason;                        // one sentence; always set
  std::string until;                         // identical, but: "up to where both commands failed (exit status 1)"; else empty
  std::string finding;                       // what a first line says in place of "diverged": "recompute mismatch"; else empty
  bool one_run = false;                      // ranks of one run held against each other: before and after are two of its values
  std::optional<Divergence> first;
  std::vector<Divergence> also_first;
  std::vector<int> ranks_diverged;
  Cause cause;
  uint64_t propagated = 0;  // records and launches that differ besides the firsts
  std::vector<std::string> gaps;
  std::vector<std::string> notes;            // what did not line up: missing ranks, steps, layers; environment differences
  Coverage coverage;

  // For the report: by step, layer (with phase), the worst cell over ranks. Filled only when DiffOptions::want_map. What was
  // loaded before the first step stands under kPrologueStep.
  struct MapRow { std::string phase, layer; std::vector<Cell> cells; };
  std::vector<int64_t> map_steps;
  std::vector<MapRow> map;
};

// First line of the text verdict: `diverged at step 7, rank 2, backward, blocks.3.mlp.fc1: grad_input`.
std::string headline(const Verdict& verdict);
// The fixed JSON form (see README): every field present, null where it does not apply.
nlohmann::ordered_json to_json(const Verdict& verdict);

}  // namespace forkpoint
