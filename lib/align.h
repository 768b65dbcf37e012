// Which step of which rank of one run is compared with which of the other, and what forbids the word "identical".
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/diff.h"

namespace forkpoint {

inline constexpr size_t kNoStep = static_cast<size_t>(-1);

// step: run A's number; kPrologueStep for the prologues of two runs that begin together. a, b: indices into
// HashStreamReader::steps(). complete: on both sides and without a Gap; else records are compared as far as they go.
struct StepPair {
  int64_t step = 0;
  int occurrence = 0;  // a step number may come again in one stream (a program that goes back)
  size_t a = 0;
  size_t b = 0;
  bool complete = true;
  char first_of = 0;  // 'A' or 'B': that run begins here, and the other goes on; 0: neither, or both
  char early_of = 0;  // the same of a run that begins here or at the step before
};

struct RankPair {
  int rank = 0;
  const HashStreamReader* a = nullptr;
  const HashStreamReader* b = nullptr;
  std::vector<StepPair> steps;     // ascending; the prologue first
  size_t load_step = kNoStep;      // one run begins later: its prologue ...
  size_t step_before = kNoStep;    // ... and the step of the other run that ends where it begins
  size_t prologue_other = kNoStep; // ... and that run's own prologue, if it has one
};

// later: is recorded from a later step on than the other run or, where both are from one step on, was begun at a later
// one.
enum class Start : uint8_t { together, a_later, b_later };

// Was a checkpoint loaded between the common past of the two runs and the steps that are compared?
enum class Loaded : uint8_t {
  no,
  maybe,    // a run begins behind step 0: resumed, or recorded from there on only
  by_one,   // one run resumed where the other went straight on
  by_both,  // both began by loading
};

// Rules (a wrong "identical" is the worst bug, so everything that was not looked at becomes a blocker):
// - Steps are aligned by number when both step bases are known. Otherwise by content: equal initial state, or a batch
// that
//   occurs once; else nothing is aligned and the blocker says why.
// - Runs that begin at different steps: the common steps are compared. The later one may have resumed from a checkpoint
// of
//   the other, or be another run of which only later steps were recorded (its prologue is then its initial state). So
//   what it loaded is held against the other's state at the end of the step before only where some of it is that state
//   and was not the other's initial state (see compare_loads). When then all of it is found, and everything from there
//   to the other's end is equal, the verdict may be identical; a note names the range. Else only --steps makes it
//   identical.
// - A run that has ended early, died, is still recording, lacks a rank or has a Gap in the range is incomparable unless
//   diverged. So are runs that record every n-th step with different n.
struct Alignment {
  std::vector<RankPair> ranks;          // empty when other_world
  bool other_world = false;             // world sizes differ: only assembled tensors can be compared
  std::vector<int> ranks_a, ranks_b;    // those wanted and present
  Level level = Level::step;            // the coarser of the two
  bool levels_differ = false;
  Start start = Start::together;
  int64_t begin = 0;                    // first step of the run that begins later, in A's numbers
  int64_t begun = 0;  // the step at which its process began, recorded or not: its load is from before that
  int64_t offset_b = 0;                 // B's step number + offset = A's
  bool prologue_compared = false;
  std::vector<std::string> blockers;    // sentences; any of them: incomparable unless diverged
  std::vector<std::string> notes;
  std::vector<std::string> limits;      // coverage
  // Modules that nobody calls are not seen in this run ('A' or 'B'; 0: in both or none). Unless the other has recorded
  // more than this one there is none that it has missed.
  char uncalled_unseen_in = 0;
  std::vector<std::string> gaps;        // those within the range
  std::vector<int64_t> gap_steps;       // first step of each gap (kPrologueStep: not known where)
};

// REQUIRES: a and b outlive the result.
Alignment align(const Run& a, const Run& b, const DiffOptions& options);

// Unknown step bases: what B's step numbers must be shifted by to be A's, from content alone.
struct BaseByContent {
  bool found = false;
  int64_t offset = 0;
  std::string sentence;  // how it was found, or why not
};
BaseByContent align_by_content(const Run& a, const Run& b, const std::vector<int>& ranks);
bool step_base_known(const Run& run);

// First step number (prologue aside) over all streams; kPrologueStep when there is none.
int64_t first_step_of(const Run& run);
// The step at which the run's processes began, recorded or not: the first recorded one where nothing else is said.
int64_t first_begun(const Run& run);

}  // namespace forkpoint
