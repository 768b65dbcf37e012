// What one rank saw, one value at a time. A record is a row: a site (what), a layout (its form), where it happened
// within the step (micro-step, call) and the digest of the value. Sites and layouts are written once in a hash stream
// and then named by id. Plain values: thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/digest.h"

namespace forkpoint {

// The numbers of these enums are part of the hash stream format and of the C API: append, never renumber.
enum class Phase : uint8_t { load = 0, data = 1, forward = 2, backward = 3, collective = 4, optimizer = 5, state = 6 };
inline constexpr int kPhaseCount = 7;

enum class Level : uint8_t { step = 0, layer = 1, launch = 2 };

enum class Kind : uint8_t { tensor = 0, launch = 1, collective = 2, scalar = 3, state = 4, structure = 5 };
inline constexpr int kKindCount = 6;

// What the value is to the op or layer that it belongs to. Roles up to `other` are recorded at every level;
// input and output of a layer or op only from Level::layer on (a collective's input and output at every level).
enum class Role : uint8_t {
  input = 0, output = 1,
  parameter = 2, gradient = 3, optimizer_state = 4, batch = 5, loss = 6, scalar = 7, rng = 8, sampler = 9, other = 10,
};
inline constexpr int kRoleCount = 11;

std::string_view name(Phase phase);
std::string_view name(Level level);
std::string_view name(Kind kind);
std::string_view name(Role role);
std::optional<Phase> phase_from_name(std::string_view text);
std::optional<Level> level_from_name(std::string_view text);

// What a record is about. Two runs that do the same thing have equal sites.
struct Site {
  Phase phase = Phase::forward;
  Kind kind = Kind::tensor;
  Role role = Role::other;
  std::string layer;         // dotted module path; empty where none applies
  std::string op;            // framework op, named region or collective ("all_reduce"); may be empty
  std::string tensor;        // "input", "grad_output", "weight.grad", "weight.exp_avg", "lr", ...
  std::string communicator;  // of a collective and what it was called with: the name in the stream's communicator table
  friend bool operator==(const Site&, const Site&) = default;
};

// Hash of everything in a site: equal in two runs and two processes. key.a == 0 never occurs.
Digest site_key(const Site& site);
// As site_key, of the op instance that the site belongs to: phase, layer, op and communicator, without kind, role and
// tensor.
uint64_t op_key(const Site& site);

// The form of a value. global_shape and global_offset are empty unless the tensor is a shard; then each has
// shape.size() entries. strides are in elements, empty for contiguous: reported, but not part of a comparison.
struct Layout {
  DType dtype = DType::raw;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::vector<int64_t> global_shape;
  std::vector<int64_t> global_offset;
  bool is_shard() const { return !global_shape.empty(); }
  friend bool operator==(const Layout&, const Layout&) = default;
};
// Hash of dtype, shape and shard place (not of the strides).
uint64_t layout_key(const Layout& layout);
int64_t element_count(const Layout& layout);  // 1 for a scalar tensor, 0 when a dimension is 0
std::string to_string(const Layout& layout);  // "bf16[8, 1024]", "f32[4, 64] of [16, 64] at [4, 0]"

// One communicator as a rank knows it. A rank that was told its members names them; one that only saw how it was made (NCCL)
// knows its own place: the members are then found by joining the streams of a run (lib/communicators.h).
struct Communicator {
  std::string name;         // as it is called in both runs: "world", "dp", or the members' list
  std::vector<int> members; // world ranks in communicator order; empty: not known to this rank alone
  Digest id = {};           // hash of what it was made from: equal on all its members, another in each run; zero: none
  int own_rank = -1;        // this rank's place in it; a process with several has an entry for each
  int size = 0;             // how many places it has; 0: not known
  friend bool operator==(const Communicator&, const Communicator&) = default;
};

enum RecordFlags : uint8_t {
  kRecordEval = 1,       // outside training (torch.no_grad, eval loops): in no verdict path and not in the step's tree
  kRecordRecompute = 2,  // a second forward under activation checkpointing
  kRecordAhead = 8,      // of a collective that was called before its step began, behind the end of the last one
};

// For Kind::scalar the digest is scalar_digest(value), from which scalar_value gives the number back bit by bit.
struct Record {
  uint32_t site = 0;        // id in this stream
  uint32_t layout = 0;      // id in this stream
  int32_t micro_step = 0;
  uint32_t call = 0;        // n-th record of this site in this step and micro-step, from 0; records of kRecordEval have
                            // a count of their own, so that an extra evaluation shifts no other record
  Digest digest;
  TensorStats stats;
  uint8_t flags = 0;
};

Digest scalar_digest(double value);
double scalar_value(const Digest& digest);

// One leaf of the digest tree: strong 128-bit mix of where and what. A node is the sum of its leaves modulo 2^64 in
// each lane, so it does not depend on the order in which records arrive.
Digest tree_leaf(const Digest& site_key, uint64_t layout_key, const Record& record);

// Something expected was lost. first_step == last_step == kPrologueStep when it is not known where.
struct Gap {
  int64_t first_step = 0;
  int64_t last_step = 0;
  uint64_t records_lost = 0;  // 0: not known
  std::string reason;         // "ring full for 10000 ms", "damaged frame at byte 8192", ...
};

// Something declared as not seen, alike in both runs.
struct CoverageLimit {
  std::string what;    // "cuda graph captured before attach"
  std::string detail;
  friend bool operator==(const CoverageLimit&, const CoverageLimit&) = default;
};

// Records made before the first step begins (initial weights, a checkpoint's load) stand in a step of this number; a
// verdict reports them under the run's first step, phase load.
inline constexpr int64_t kPrologueStep = -1;

}  // namespace forkpoint
