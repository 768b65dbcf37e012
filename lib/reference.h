// A reference: what a run of a few steps came to, as a small text file that belongs in a repository. `forkpoint check`
// makes one from a run that is known to be good and holds later runs against it. It holds, of each step and rank, the
// number of records and one digest over all of them (the root of the step's tree) and the same by groups; of the
// last step every parameter and every tensor of the optimizer's state. Ranks that agree share an entry.
//
// The file is JSON, one entry a line in an order that depends on the content alone, so that a difference of two
// versions reads as what changed. Its checksum covers the content, not the form (line ends, blanks). All functions here
// throw Error as lib/error.h says; they are thread-compatible.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lib/run.h"
#include "lib/verdict.h"

namespace forkpoint {

inline constexpr int kReferenceSchema = 2;

// What no step trains (averages of the weights, teachers), as it is behind the optimizer's update of the last step.
// Whether it is there depends on when garbage is collected: only what both sides hold is compared.
inline constexpr const char* kRestingGroup = "resting";
// The groups of a step's records, as a step goes. `other`: what belongs to none of the others (gradient norms,
// buffers).
inline constexpr const char* kReferenceGroups[] = {"data",        "generators",      "loss",  "gradients",
                                                   "collectives", "hyperparameters", "other", "optimizer state",
                                                   "parameters",  kRestingGroup};
// Fields besides the groups. kAll: "records digest" over all records; kForm: over what they are, without their values,
// so that other values are told from other records; kLossValue: the number, for people.
inline constexpr const char *kReferenceAll = "all", *kReferenceForm = "form", *kReferenceLossValue = "loss_value";

struct ReferenceTensor {
  std::string group;  // "parameters", "optimizer state" or kRestingGroup
  std::string layer, tensor;
  std::string call;  // "", or which record of that name: "micro-step 1, call 2"
  int rank = 0;
  std::string form, digest;  // "f32[64, 64]", 32 hexadecimal digits
};

using ReferenceFields = std::map<std::string, std::string>;  // group or field -> value

struct Reference {
  std::string command;  // for people
  int64_t first_step = 0, last_step = 0;
  // What the digests depend on besides the program: "world_size", "gpus", "version of torch",
  // "CUBLAS_WORKSPACE_CONFIG", ...
  std::map<std::string, std::string> depends_on;
  std::vector<std::string> not_seen;                         // declared coverage limits, sorted
  std::map<std::pair<int64_t, int>, ReferenceFields> steps;  // by step (kPrologueStep too) and rank
  std::vector<ReferenceTensor> tensors;                      // sorted by everything but the values
  int world_size() const;
};

// What a run comes to. Steps that are not whole on all ranks are left out, and `lost` says so.
struct MeasuredRun {
  Reference reference;
  std::vector<std::string> lost;  // sentences: whatever forbids the word "identical", and a new reference
  uint64_t records = 0, frames_verified = 0;
  bool has_final_part =
      false;  // of a job that ended by itself: what it left behind its last step, which is not looked at
};
// Steps up to last_step, of which the first is to be first_step. Checks every frame of the streams. Never throws for
// damage that Run::open accepted.
MeasuredRun measure_run(const Run& run, int64_t first_step, int64_t last_step);

std::string reference_text(const Reference& reference);
// Throws when the text is no reference, is of another schema, was edited or damaged, or lacks a step, a rank or any
// record: nothing can be identical with that. `path` is for the messages.
Reference parse_reference(const std::string& path, const std::string& text);
Reference read_reference(const std::string& path);
// Replaces the file in one move.
void write_reference(const std::string& path, const Reference& reference);

enum class GroupState { same, differs, absent, unknown };  // absent: neither has any; unknown: not all of it was seen
struct GroupVerdict {
  std::string group;
  GroupState state = GroupState::absent;
  uint64_t records = 0;  // of the reference
  std::string sentence;  // with differs and unknown: where, or why
};

struct ReferenceComparison {
  Verdict verdict;
  std::vector<GroupVerdict> groups;       // in the order of kReferenceGroups
  std::vector<std::string> dependencies;  // that are not the same: "version of torch: 2.10 in the reference, 2.11 here"
  std::vector<std::string> tensors;       // of the last step that differ or are on one side only, in sentences
  uint64_t tensors_compared = 0;
};

// trouble: why the run cannot be identical whatever it recorded (it ended early ...); empty: nothing.
// Equal digests are identical on any machine; digests that differ where something differs that they depend on are
// incomparable. A run that lost something is diverged or incomparable, never identical.
ReferenceComparison compare_reference(const Reference& reference, const MeasuredRun& run, const std::string& trouble);

// What a new reference changes in an old one, in sentences; empty: nothing but, maybe, the command.
std::vector<std::string> changes_of_reference(const Reference& before, const Reference& after);

// Dependencies that are not the same. here: how the second is called.
std::vector<std::string> differing_dependencies(const Reference& reference, const Reference& other,
                                                const std::string& here);
// Of the digest's definition: another one makes all digests incomparable.
std::string digest_version();

}  // namespace forkpoint
