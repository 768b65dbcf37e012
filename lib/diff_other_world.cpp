#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "lib/assemble.h"
#include "lib/cause_facts.h"
#include "lib/diff_collective.h"
#include "lib/diff_parallel.h"
#include "lib/diff_verdict.h"
#include "lib/error.h"
#include "lib/evaluation.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

// Step numbers (A's) that are whole on every rank of a run, with their index in each stream. Those that are not go to
// `left_out`: what is not looked at must not look equal, also where both runs lack it.
std::map<int64_t, std::vector<size_t>> whole_steps(const Run& run, int64_t offset, const DiffOptions& options,
                                                   std::set<int64_t>* left_out) {
  std::map<int64_t, std::vector<size_t>> steps;
  std::set<int64_t> broken;
  for (size_t r = 0; r < run.streams().size(); ++r) {
    const auto summaries = run.streams()[r]->steps();
    for (size_t i = 0; i < summaries.size(); ++i) {
      if (is_final_part(summaries, i)) continue;  // marked as an evaluation, which is not put together from shards
      const bool prologue = summaries[i].step == kPrologueStep;
      const int64_t step = prologue ? kPrologueStep : summaries[i].step + offset;
      if (!prologue &&
          ((options.first_step && step < *options.first_step) || (options.last_step && step > *options.last_step)))
        continue;
      auto& indices = steps[step];
      const auto lost_in = [&](const Gap& gap) {  // a loss shifts calls, so nothing of the step can be matched
        const bool placed = gap.last_step != kPrologueStep;
        return !placed || (gap.first_step <= summaries[i].step && summaries[i].step <= gap.last_step);
      };
      const auto gaps = run.streams()[r]->gaps();
      if (std::any_of(gaps.begin(), gaps.end(), lost_in)) broken.insert(step);
      if (!summaries[i].complete || indices.size() != r) broken.insert(step);  // cut, missing on a rank, or there twice
      indices.push_back(i);
    }
  }
  for (auto at = steps.begin(); at != steps.end();) {
    const bool whole = broken.count(at->first) == 0 && at->second.size() == run.streams().size();
    if (!whole) left_out->insert(at->first);
    at = whole ? std::next(at) : steps.erase(at);
  }
  return steps;
}

struct StepResult {
  int64_t step = 0;
  bool read = false;
  uint64_t equal = 0, differing = 0, not_comparable = 0, left_out = 0, bytes = 0;
  std::string why, problem;
  std::set<int> ranks_b;       // that hold something that differs
  bool batches_agree = false;  // recorded, put together and equal
  // Of the earliest difference:
  std::optional<CauseFacts> facts;
};

std::tuple<int64_t, int, uint32_t, int> order_of(const RecordKey& key, const std::vector<Piece>& pieces) {
  static constexpr int kPhaseOrder[kPhaseCount] = {0, 2, 3, 4, 5, 6, 1};
  const Phase phase = pieces[0].site->phase;
  const bool whole_step = phase == Phase::optimizer || phase == Phase::collective;
  return {whole_step ? INT32_MAX : std::get<2>(key), kPhaseOrder[static_cast<int>(phase) % kPhaseCount], pieces[0].row,
          pieces[0].rank};
}

CauseFacts facts_of(const RecordKey& key, const Pieces& in_a, const Pieces& in_b, const ReshardedStep& result) {
  const auto &pieces_a = in_a.by_key.at(key), &pieces_b = in_b.by_key.at(key);
  const Assembled left = assemble(pieces_a), right = assemble(pieces_b);
  CauseFacts facts;
  facts.site = *pieces_a[0].site;
  facts.layout_a.dtype = left.dtype, facts.layout_a.shape = left.shape;
  facts.layout_b.dtype = right.dtype, facts.layout_b.shape = right.shape;
  facts.layout_differs = left.dtype != right.dtype || left.shape != right.shape;
  facts.digest_a = left.digest, facts.digest_b = right.digest;
  facts.everyone = facts.other_world = true;
  const uint64_t op = op_key(facts.site);
  std::map<uint32_t, const RecordKey*> inputs;  // by row
  for (const auto& [other, pieces] : in_a.by_key) {
    const Site& site = *pieces[0].site;
    const bool same_call = std::get<2>(other) == std::get<2>(key) && std::get<3>(other) == std::get<3>(key);
    if (same_call && is_op_input(site) && op_key(site) == op) inputs[pieces[0].row] = &other;
  }
  for (const auto& [row, other] : inputs) {
    (result.equal.count(*other) != 0       ? facts.inputs_agree
     : result.differing.count(*other) != 0 ? facts.inputs_differ
                                           : facts.inputs_one_sided)
        .push_back(in_a.by_key.at(*other)[0].site->tensor);
  }
  Divergence& first = facts.first;
  first.micro_step = std::max(0, std::get<2>(key));
  first.phase = facts.site.phase, first.kind = facts.layout_differs ? Kind::structure : facts.site.kind;
  first.layer = facts.site.layer, first.op = facts.site.op, first.tensor = facts.site.tensor;
  if (facts.layout_differs) {
    first.before = to_string(facts.layout_a), first.after = to_string(facts.layout_b);
  } else if (facts.site.kind == Kind::scalar) {
    first.before = fmt::format("{}", scalar_value(left.digest)),
    first.after = fmt::format("{}", scalar_value(right.digest));
  } else {
    first.before = fmt::format("{:016x}{:016x}", left.digest.a, left.digest.b);
    first.after = fmt::format("{:016x}{:016x}", right.digest.a, right.digest.b);
    const Layout layout = facts.layout_a;
    if (facts.site.kind != Kind::state && word_count(layout) <= kMaxPointingWords / 8)
      facts.pointing = point(left.digest, right.digest, layout);
  }
  first.pointing = facts.pointing;
  return facts;
}

bool batches_agree(const Pieces& in_a, const Pieces& in_b, const ReshardedStep& result) {
  bool any = false;
  for (const Pieces* side : {&in_a, &in_b}) {
    for (const auto& [key, pieces] : side->by_key) {
      if (pieces[0].site->role != Role::batch) continue;
      if (result.equal.count(key) == 0) return false;
      any = true;
    }
  }
  return any;
}

// A collective's buffer has a part for each rank, or another sum on each: without boxes it means the same in both worlds
// only where all ranks have the whole of it in the end, and even then the framework may have cut it by the world's size.
bool means_the_same(const std::vector<Piece>& in_a, const std::vector<Piece>& in_b) {
  const Site& site = *in_a[0].site;
  if (site.kind != Kind::collective || in_a[0].layout->is_shard() || in_b[0].layout->is_shard()) return true;
  const bool parts = !leaves_replicas(site.op) || site.op.find("gather") != site.op.npos || site.op.find("Gather") != site.op.npos;
  return !parts && in_a[0].layout->shape == in_b[0].layout->shape;
}

// What a layer of a sharded model is handed may be a part that is equal on all ranks, without its place: then the number
// of ranks is in its shape.
bool shape_may_tell_the_world(const std::vector<Piece>& in_a, const std::vector<Piece>& in_b) {
  const Site& site = *in_a[0].site;
  const bool activation = site.kind == Kind::tensor && (site.role == Role::input || site.role == Role::output);
  const bool whole = !in_a[0].layout->is_shard() && !in_b[0].layout->is_shard();
  return activation && whole && in_a[0].layout->shape != in_b[0].layout->shape;
}

void doubt_activations(const Pieces& in_a, const Pieces& in_b, ReshardedStep* result) {
  std::erase_if(result->differing, [&](const RecordKey& key) {
    if (!shape_may_tell_the_world(in_a.by_key.at(key), in_b.by_key.at(key))) return false;
    result->not_comparable[key] = "its shape is another in each run, and it may be a part of a tensor";
    return true;
  });
}

// Takes out of a result what cannot say anything, and counts it. What the ranks did with it is compared where they keep it.
uint64_t leave_out_collectives(const Pieces& in_a, const Pieces& in_b, ReshardedStep* result) {
  const uint64_t alone = std::erase_if(result->not_comparable, [&](const auto& entry) {
    const auto found = in_a.by_key.find(entry.first);
    const Site& site = *(found != in_a.by_key.end() ? found->second : in_b.by_key.at(entry.first))[0].site;
    return site.kind == Kind::collective || !site.communicator.empty();  // the second: what it was called with
  });
  return alone + std::erase_if(result->differing, [&](const RecordKey& key) {
           return !means_the_same(in_a.by_key.at(key), in_b.by_key.at(key));
         });
}

StepResult compare_step(const Run& a, const std::vector<size_t>& at_a, const Run& b, const std::vector<size_t>& at_b,
                        int64_t step, Level level) {
  StepResult out;
  out.step = step;
  StepColumns columns;
  Pieces in_a, in_b;
  try {
    for (size_t r = 0; r < at_a.size(); ++r) {
      gather(*a.streams()[r], at_a[r], level, nullptr, &columns, &in_a);
      out.bytes += a.streams()[r]->steps()[at_a[r]].bytes_hashed;
    }
    for (size_t r = 0; r < at_b.size(); ++r) gather(*b.streams()[r], at_b[r], level, nullptr, &columns, &in_b);
  } catch (const Error& error) {
    out.problem = fmt::format("step {}: {}", step, error.what());
    return out;
  }
  out.read = true;
  ReshardedStep result = compare_pieces(in_a, in_b);
  doubt_activations(in_a, in_b, &result);
  out.left_out = leave_out_collectives(in_a, in_b, &result);
  out.equal = result.equal.size(), out.differing = result.differing.size(),
  out.not_comparable = result.not_comparable.size();
  if (!result.not_comparable.empty()) {
    const auto& [key, why] = *result.not_comparable.begin();
    const auto& pieces = in_a.by_key.count(key) != 0 ? in_a.by_key.at(key) : in_b.by_key.at(key);
    out.why = fmt::format("{}: {}", place_text(*pieces[0].site), why);
  }
  const RecordKey* first = nullptr;
  for (const RecordKey& key : result.differing) {
    for (const Piece& piece : in_b.by_key.at(key)) out.ranks_b.insert(piece.rank);
    if (first == nullptr || order_of(key, in_a.by_key.at(key)) < order_of(*first, in_a.by_key.at(*first))) first = &key;
  }
  if (first != nullptr) out.facts = facts_of(*first, in_a, in_b, result);
  out.batches_agree = batches_agree(in_a, in_b, result);
  return out;
}

void write_first(const Run& a, const Run& b, const Alignment& alignment, const StepResult& result, Verdict* verdict) {
  CauseFacts facts = *result.facts;
  facts.first.in_prologue = result.step == kPrologueStep;
  facts.first.step = facts.first.in_prologue ? alignment.begin : result.step;
  if (facts.first.in_prologue) facts.first.phase = Phase::load;
  facts.level = alignment.level, facts.world_size = std::max(a.world_size(), b.world_size());
  facts.loaded = alignment.begin > 0 ? Loaded::maybe : Loaded::no;
  facts.first_compared_step = facts.first.step == alignment.begin;
  facts.environment = environment_differences(a, b);
  facts.run_b = shell_words({b.directory()});
  verdict->outcome = Outcome::diverged;
  verdict->first = facts.first;
  verdict->cause = decide_cause(facts);
  verdict->cause.evidence.push_back(
      fmt::format("put together from {} ranks in run A and {} in run B: sums over ranks are cut in "
                  "another way, and another order of a sum is expected to show",
                  a.world_size(), b.world_size()));
  if (facts.site.kind == Kind::collective && facts.site.role == Role::output && !facts.layout_differs) {
    verdict->cause.cls = "reduction_order";
    verdict->cause.class_candidates = {"reduction_order", "algorithm_choice"};
  }
  const bool is_input = facts.site.role == Role::batch || facts.site.role == Role::rng || facts.site.role == Role::sampler;
  if (!result.batches_agree && !is_input) {
    // Another number of ranks often means other samples a step: that would explain any difference.
    verdict->cause.cls = "unknown";
    std::vector<std::string>& candidates = verdict->cause.class_candidates;
    candidates.insert(candidates.begin(), "data_order");
    verdict->cause.evidence.push_back("whether both worlds took the same samples in this step is not known: the batches are not "
                                      "recorded, or cannot be put together");
  }
}


// What the steps add up to.
struct Totals {
  uint64_t not_comparable = 0, differing = 0, left_out = 0;
  std::set<int> ranks;
  std::string why;
};

Totals add_results(const Run& a, const Run& b, const Alignment& alignment, const std::vector<StepResult>& results,
                   Verdict* verdict, std::vector<std::string>* blockers) {
  Totals totals;
  for (const StepResult& result : results) {
    if (!result.read) verdict->gaps.push_back(result.problem), blockers->push_back(result.problem);
    verdict->coverage.records_compared += result.equal + result.differing;
    verdict->coverage.bytes_hashed += result.bytes;
    verdict->coverage.steps_compared += result.step >= 0 && result.read ? 1 : 0;
    totals.not_comparable += result.not_comparable;
    totals.differing += result.differing;
    totals.left_out += result.left_out;
    if (totals.why.empty()) totals.why = result.why;
    totals.ranks.insert(result.ranks_b.begin(), result.ranks_b.end());
    if (result.facts && !verdict->first) write_first(a, b, alignment, result, verdict);
  }
  if (totals.left_out > 0) {
    verdict->coverage.limits.push_back(fmt::format("{} of collectives not compared: their buffers are cut by the number of "
                                                   "ranks, which is another in each run",
                                                   counted(totals.left_out, "record")));
  }
  if (totals.not_comparable > 0) {
    blockers->push_back(fmt::format("{} of {} could not be put together from both runs (first: {})",
                                    grouped(totals.not_comparable),
                                    counted(verdict->coverage.records_compared + totals.not_comparable, "tensor"),
                                    totals.why));
  }
  if (verdict->coverage.steps_compared == 0) blockers->push_back("the runs have no whole step in common");
  else if (verdict->coverage.records_compared == 0) blockers->push_back("the runs have no record in common");
  return totals;
}

bool evaluates(const Run& run) {
  return std::any_of(run.streams().begin(), run.streams().end(), [](const auto& stream) {
    const auto steps = stream->steps();
    return std::any_of(steps.begin(), steps.end(), [](const StepSummary& step) { return step.eval_records > 0; });
  });
}

void conclude(const Run& a, const Run& b, const DiffOptions& options, const Totals& totals,
              std::vector<std::string> blockers, Verdict* verdict) {
  const Coverage& coverage = verdict->coverage;
  if (verdict->first) {
    verdict->propagated = totals.differing - 1;
    verdict->ranks_diverged.assign(totals.ranks.begin(), totals.ranks.end());
    verdict->reason = place_text(*verdict->first) + ": differs when put together from all ranks";
    if (!verdict->gaps.empty()) verdict->reason += "; records were lost, so the first divergence may lie in a gap";
    verdict->notes.insert(verdict->notes.end(), blockers.begin(), blockers.end());
    return;
  }
  if (blockers.empty() && options.verify_checksums) {
    const Verified verified = verify_runs(a, b, options);
    blockers = verified.damage;
    verdict->coverage.frames_verified = verified.frames;
    verdict->gaps.insert(verdict->gaps.end(), blockers.begin(), blockers.end());
  }
  if (!blockers.empty()) {
    verdict->reason = incomparable_reason(blockers, coverage.steps_compared, coverage.records_compared);
    return;
  }
  if (evaluates(a) || evaluates(b)) {
    verdict->coverage.limits.push_back("evaluations, modules that no step trains and what the programs left behind their last "
                                       "step were not compared, as they are not put together from shards");
  }
  if (!options.verify_checksums) verdict->coverage.limits.push_back("the checksums of the files were not verified");
  verdict->outcome = Outcome::identical;
  verdict->until = until_failure(a, b);
  verdict->reason = fmt::format("every tensor agrees when put together ({}){}", counted(coverage.records_compared, "tensor"),
                                verdict->until.empty() ? "" : fmt::format(" {}", verdict->until));
}

}  // namespace

Verdict diff_other_world(const Run& a, const Run& b, const Alignment& alignment, const DiffOptions& options) {
  std::set<int64_t> left_out;
  const auto steps_a = whole_steps(a, 0, options, &left_out), steps_b = whole_steps(b, alignment.offset_b, options, &left_out);
  std::vector<int64_t> common;
  bool alike = true;
  for (const auto& [step, indices] : steps_a) {
    const bool wanted = step != kPrologueStep || alignment.start == Start::together;
    if (steps_b.count(step) != 0 && wanted) common.push_back(step);
    else alike = false;
  }
  for (const auto& [step, indices] : steps_b) alike &= steps_a.count(step) != 0;
  if (alignment.ranks_a.empty() || alignment.ranks_b.empty()) common.clear();  // the steps could not be aligned

  std::vector<StepResult> results(common.size());
  Progress progress(options.progress, common.size());
  parallel_for(thread_count(options.threads), common.size(), [&](size_t i, int) {
    results[i] = compare_step(a, steps_a.at(common[i]), b, steps_b.at(common[i]), common[i], alignment.level);
    progress.add(1);
  });

  Verdict verdict;
  verdict.cause.cls.clear();
  verdict.gaps = alignment.gaps;
  verdict.notes = alignment.notes;
  verdict.coverage.level = name(alignment.level);
  verdict.coverage.limits = alignment.limits;
  verdict.coverage.ranks_compared = std::max(a.world_size(), b.world_size());
  std::vector<std::string> blockers = alignment.blockers;
  if (!alike) blockers.push_back("the runs do not have the same whole steps");
  if (!left_out.empty()) {
    const int64_t step = *left_out.begin();
    blockers.push_back(fmt::format("{} not compared, first {}: cut, there twice, or missing on a rank",
                                   counted(left_out.size(), "step") + (left_out.size() == 1 ? " was" : " were"),
                                   step == kPrologueStep ? "what came before the first step" : fmt::format("step {}", step)));
  }
  if (!options.ranks.empty()) {
    blockers.push_back("--ranks does not apply to runs of different world sizes: all ranks were compared");
  }
  const Totals totals = add_results(a, b, alignment, results, &verdict, &blockers);
  conclude(a, b, options, totals, std::move(blockers), &verdict);
  for (const std::string& text : environment_differences(a, b)) verdict.notes.push_back("environment: " + text);
  for (const std::string& text : manifest_notes(a, b)) verdict.notes.push_back(text);
  return verdict;
}

}  // namespace forkpoint
