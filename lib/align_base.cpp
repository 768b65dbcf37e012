#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

#include "lib/align.h"
#include "lib/digest_mix.h"
#include "lib/error.h"

namespace forkpoint {
namespace {

// Order-free sum over one step's records of one role; records == 0: nothing to go by.
struct Content {
  Digest digest;
  uint64_t records = 0;
  friend bool operator==(const Content&, const Content&) = default;
};

Content content_of(const HashStreamReader& stream, size_t step_index, Role role, StepColumns* columns) {
  Content content;
  try {
    stream.read_step(step_index, columns);
  } catch (const Error&) {
    return content;
  }
  for (size_t i = 0; i < columns->size(); ++i) {
    if (stream.sites()[columns->site[i]].role != role || (columns->flags[i] & kRecordEval) != 0) continue;
    Record record = columns->row(i);
    content.digest += tree_leaf(stream.site_keys()[record.site], stream.layout_keys()[record.layout], record);
    ++content.records;
  }
  return content;
}

size_t prologue_of(const HashStreamReader& stream) {
  for (size_t i = 0; i < stream.steps().size(); ++i) {
    if (stream.steps()[i].step == kPrologueStep) return i;
  }
  return kNoStep;
}

std::map<int64_t, size_t> steps_of(const HashStreamReader& stream) {
  std::map<int64_t, size_t> steps;
  for (size_t i = 0; i < stream.steps().size(); ++i) {
    if (stream.steps()[i].step >= 0 && stream.steps()[i].complete) steps.emplace(stream.steps()[i].step, i);
  }
  return steps;
}

bool same_initial_state(const Run& a, const Run& b, const std::vector<int>& ranks) {
  StepColumns columns;
  for (const int rank : ranks) {
    const HashStreamReader &in_a = *a.stream_of(rank), &in_b = *b.stream_of(rank);
    const size_t prologue_a = prologue_of(in_a), prologue_b = prologue_of(in_b);
    if (prologue_a == kNoStep || prologue_b == kNoStep) return false;
    const Content content_a = content_of(in_a, prologue_a, Role::parameter, &columns);
    if (content_a.records == 0 || !(content_a == content_of(in_b, prologue_b, Role::parameter, &columns))) return false;
  }
  return !ranks.empty();
}

// True when every rank's batch of A's step and of B's step + offset agree.
bool same_batch(const Run& a, const Run& b, const std::vector<int>& ranks, int64_t step_a, int64_t step_b) {
  StepColumns columns;
  for (const int rank : ranks) {
    const HashStreamReader &in_a = *a.stream_of(rank), &in_b = *b.stream_of(rank);
    const auto steps_a = steps_of(in_a), steps_b = steps_of(in_b);
    const auto at_a = steps_a.find(step_a), at_b = steps_b.find(step_b);
    if (at_a == steps_a.end() || at_b == steps_b.end()) return false;
    const Content content = content_of(in_a, at_a->second, Role::batch, &columns);
    if (content.records == 0 || !(content == content_of(in_b, at_b->second, Role::batch, &columns))) return false;
  }
  return true;
}

// A's steps whose batch is that of B's step, on one rank.
std::vector<int64_t> steps_with_batch(const HashStreamReader& a, const Content& wanted) {
  StepColumns columns;
  std::vector<int64_t> found;
  for (const auto& [step, index] : steps_of(a)) {
    if (content_of(a, index, Role::batch, &columns) == wanted) found.push_back(step);
  }
  return found;
}

}  // namespace

BaseByContent align_by_content(const Run& a, const Run& b, const std::vector<int>& ranks) {
  const std::string who = step_base_known(a) ? "the step base of run B is unknown"
                          : step_base_known(b) ? "the step base of run A is unknown"
                                               : "the step base of both runs is unknown";
  BaseByContent out;
  const int64_t begin_a = first_step_of(a), begin_b = first_step_of(b);
  if (ranks.empty() || begin_a == kPrologueStep || begin_b == kPrologueStep) {
    out.sentence = who + " and there is no step to align them by";
    return out;
  }
  if (same_initial_state(a, b, ranks)) {
    const int64_t begun_a = first_begun(a), begun_b = first_begun(b);  // with them the processes began
    return {true, begun_a - begun_b,
            fmt::format("{}; their initial weights agree, so step {} of A and step {} of B were taken as the same step",
                        who, begun_a, begun_b)};
  }
  const HashStreamReader &lead_a = *a.stream_of(ranks[0]), &lead_b = *b.stream_of(ranks[0]);
  const auto steps_b = steps_of(lead_b);
  StepColumns columns;
  const Content first_b =
      steps_b.empty() ? Content{} : content_of(lead_b, steps_b.begin()->second, Role::batch, &columns);
  if (first_b.records > 0) {
    // A batch that comes again (training on one batch) says nothing about where the run stands: it must be found once.
    const auto in_a = steps_with_batch(lead_a, first_b);
    const auto in_b = steps_with_batch(lead_b, first_b);
    const int64_t step_b = steps_b.begin()->first;
    if (in_a.size() == 1 && in_b.size() == 1 && same_batch(a, b, ranks, in_a[0], step_b)) {
      return {true, in_a[0] - step_b,
              fmt::format("{}; B's first batch is that of A's step {}, so B's step {} was taken as that step", who,
                          in_a[0], step_b)};
    }
  }
  out.sentence = who +
                 ", and neither their initial weights nor a batch that occurs once agree: the steps cannot be aligned "
                 "(record with --first-step, or call step(n) of forkpoint.h)";
  return out;
}

}  // namespace forkpoint
