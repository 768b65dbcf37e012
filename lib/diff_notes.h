// What did not line up, as sentences. Internal to diff.
#pragma once

#include <string>
#include <vector>

#include "lib/diff_scan.h"

namespace forkpoint {

// Made by `forkpoint attach`: its command and its variables are those of a rank, its launcher is not known.
bool is_attached(const Manifest& manifest);
// Versions, devices and variables that can change results.
std::vector<std::string> environment_differences(const Run& a, const Run& b);
// "up to where both commands failed (exit status 1)": equal runs are so only until then. Empty: none is known to have failed.
std::string until_failure(const Run& a, const Run& b);
// Commands, working folders and the like: worth knowing, no explanation by itself.
std::vector<std::string> manifest_notes(const Run& a, const Run& b);

struct StructureNotes {
  std::vector<std::string> sentences;       // of training records on one side only
  std::vector<std::string> evaluation;      // of evaluations
  const OneSided* first = nullptr;          // the earliest of training, in scan.one_sided
};
StructureNotes structure_notes(const Scan& scan, const Alignment& alignment, Joins* joins);

// Collectives by which a run set itself up where the other goes on (lib/diff_set_up.h).
struct SetUpNotes {
  std::vector<std::string> sentences;  // what was compared with nothing
  std::vector<std::string> unsure;     // and may be other calls, or the same ones with other values
};
SetUpNotes set_up_notes(const Scan& scan, const Alignment& alignment, Joins* joins);

// Collectives that the runs lay out differently and that carry the same elements, as far as sums of them show.
struct RelaidNotes {
  std::vector<std::string> sentences;
  std::string limit;                      // what was not compared bit by bit; empty: nothing
  std::vector<std::string> not_shown;     // sentences: nothing behind them shows that the same came out
};
RelaidNotes relaid_notes(const Scan& scan, const Alignment& alignment, Joins* joins);

}  // namespace forkpoint
