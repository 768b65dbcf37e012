// What `forkpoint show` says about a run. Everything is drawn from an Overview (headers and summaries) and, where asked
// for, from the records or launches that a filter lets through.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cli/arguments.h"
#include "cli/terminal.h"
#include "lib/run.h"

namespace forkpoint {

struct RecordFilter {
  StepRange steps;
  std::vector<int> ranks;                              // sorted; empty: all
  std::optional<std::string> layer_glob, tensor_glob;  // `*` also matches dots
  std::optional<Phase> phase;

  bool any() const { return steps.first || steps.last || !ranks.empty() || layer_glob || tensor_glob || phase; }
  bool wants_step(int64_t step) const;
  bool wants_rank(int rank) const;
  bool wants_site(const Site& site) const;  // of a launch, the tensor is the kernel or call
};

struct RankOverview {
  int rank = 0;
  std::string state, host, device;
  uint64_t steps = 0, complete_steps = 0, records = 0, launches = 0, bytes_hashed = 0, size_bytes = 0;
  std::optional<int64_t> first_step, last_step;
};
struct LayerOverview {
  std::set<Phase> phases;
  std::set<std::string> tensors;
};
struct Overview {
  std::string directory, state;
  Manifest manifest;
  std::vector<RankOverview> ranks;
  std::vector<int> missing_ranks;
  std::set<int64_t> steps, incomplete_steps;  // without the prologue
  bool has_prologue = false;
  uint64_t records = 0, launches = 0, bytes_hashed = 0, size_bytes = 0;
  std::map<std::string, LayerOverview> layers;
  std::vector<std::string> gaps, limits, problems;
};
Overview overview_of(const Run& run);
// Of a folder whose manifest can be read, but none of its streams.
Overview overview_of(const std::string& directory, const Manifest& manifest, const std::string& problem);

// Calls visit once a step with the rows that the filter lets through, ranks in order, steps as in the stream. A step
// that cannot be read is put into problems. visit returns false to stop.
struct StepRows {
  const HashStreamReader* stream = nullptr;
  size_t step_index = 0;
  const StepSummary* summary = nullptr;
  std::vector<Record> rows;
};
void visit_steps(const Run& run, const RecordFilter& filter, bool with_records, std::vector<std::string>* problems,
                 const std::function<bool(const StepRows&)>& visit);

// As visit_steps, with the launches of the steps that have any.
struct StepLaunches {
  const HashStreamReader* stream = nullptr;
  const StepSummary* summary = nullptr;
  LaunchColumns launches;
};
void visit_launches(const Run& run, const RecordFilter& filter, std::vector<std::string>* problems,
                    const std::function<bool(const StepLaunches&)>& visit);

std::string hex(const Digest& digest);
std::string step_title(int64_t step);  // "step 7", "before the first step"
std::string overview_text(const Overview& overview, const Style& style, size_t width);
std::string step_text(const StepRows& step);                        // one line
std::string record_text(const StepRows& step, const Style& style);  // a heading and a line a record
// A heading, a line a launch and a line a buffer; empty when the filter lets no launch through.
std::string launch_text(const StepLaunches& step, const RecordFilter& filter, const Style& style);
// JSON pieces; the caller joins them, since a run's records need not fit in memory.
std::string overview_json(const Overview& overview);  // "{ ... " without the closing brace
std::string step_json(const StepRows& step);
std::string record_json(const StepRows& step, const Record& record);
std::vector<std::string> launch_json(const StepLaunches& step, const RecordFilter& filter);  // one a launch

}  // namespace forkpoint
