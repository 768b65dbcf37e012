#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>

#include "cli/show.h"
#include "lib/evaluation.h"
#include "lib/verdict_text.h"

namespace forkpoint {

bool RecordFilter::wants_step(int64_t step) const {
  return (!steps.first || step >= *steps.first) && (!steps.last || step <= *steps.last);
}

bool RecordFilter::wants_rank(int rank) const {
  return ranks.empty() || std::binary_search(ranks.begin(), ranks.end(), rank);
}

bool RecordFilter::wants_site(const Site& site) const {
  const auto matches = [](const std::optional<std::string>& glob, const std::string& text) {
    return !glob || fnmatch(glob->c_str(), text.c_str(), 0) == 0;
  };
  return (!phase || site.phase == *phase) && matches(layer_glob, site.layer) && matches(tensor_glob, site.tensor);
}

namespace {

RankOverview rank_overview(const HashStreamReader& stream) {
  RankOverview rank;
  const StreamHeader& header = stream.header();
  rank.rank = header.rank;
  rank.state = name(stream.state());
  rank.host = header.host;
  rank.device = header.device;
  rank.size_bytes = stream.size_bytes();
  for (size_t i = 0; i < stream.steps().size(); ++i) {
    const StepSummary& step = stream.steps()[i];
    rank.records += step.records;
    rank.launches += step.launches;
    rank.bytes_hashed += step.bytes_hashed;
    if (step.step == kPrologueStep || is_final_part(stream.steps(), i)) continue;
    ++rank.steps;
    rank.complete_steps += step.complete;
    rank.first_step = std::min(rank.first_step.value_or(step.step), step.step);
    rank.last_step = std::max(rank.last_step.value_or(step.step), step.step);
  }
  return rank;
}

std::string gap_sentence(int rank, const Gap& gap) {
  std::string where = "at an unknown step";
  if (gap.first_step != kPrologueStep || gap.last_step != kPrologueStep) {
    where = gap.first_step == gap.last_step ? fmt::format("step {}", gap.first_step)
                                            : fmt::format("steps {} to {}", gap.first_step, gap.last_step);
  }
  const std::string lost = gap.records_lost ? ", " + counted(gap.records_lost, "record") + " lost" : "";
  return fmt::format("rank {}, {}: {}{}", rank, where, gap.reason, lost);
}

void add_stream(const HashStreamReader& stream, Overview* overview) {
  const RankOverview rank = rank_overview(stream);
  overview->records += rank.records;
  overview->launches += rank.launches;
  overview->bytes_hashed += rank.bytes_hashed;
  overview->size_bytes += rank.size_bytes;
  overview->ranks.push_back(rank);
  for (const StepSummary& step : stream.steps()) {
    overview->has_prologue |= step.step == kPrologueStep;
    if (step.step == kPrologueStep) continue;
    overview->steps.insert(step.step);
    if (!step.complete) overview->incomplete_steps.insert(step.step);
  }
  for (const Site& site : stream.sites()) {
    LayerOverview& layer = overview->layers[site.layer];
    layer.phases.insert(site.phase);
    if (site.kind == Kind::launch) continue;  // a kernel is no tensor
    layer.tensors.insert(site.op.empty() ? site.tensor : site.op + "." + site.tensor);
  }
  for (const Gap& gap : stream.gaps()) overview->gaps.push_back(gap_sentence(rank.rank, gap));
  for (const CoverageLimit& limit : stream.coverage_limits()) {
    const std::string text = limit.detail.empty() ? limit.what : limit.what + ": " + limit.detail;
    auto& limits = overview->limits;
    if (std::find(limits.begin(), limits.end(), text) == limits.end()) limits.push_back(text);
  }
}

}  // namespace

Overview overview_of(const Run& run) {
  Overview overview;
  overview.directory = run.directory();
  overview.state = name(run.state());
  overview.manifest = run.manifest();
  overview.problems = run.problems();
  for (const auto& stream : run.streams()) add_stream(*stream, &overview);
  overview.missing_ranks = run.missing_ranks();
  return overview;
}

Overview overview_of(const std::string& directory, const Manifest& manifest, const std::string& problem) {
  Overview overview;
  overview.directory = directory;
  overview.state = name(manifest.state);
  overview.manifest = manifest;
  for (int rank = 0; rank < manifest.world_size; ++rank) overview.missing_ranks.push_back(rank);
  overview.problems.push_back(problem);
  return overview;
}

namespace {

void keep_wanted(const RecordFilter& filter, const StepColumns& columns, StepRows* step) {
  const auto sites = step->stream->sites();
  for (size_t i = 0; i < columns.size(); ++i) {
    if (columns.site[i] < sites.size() && filter.wants_site(sites[columns.site[i]]))
      step->rows.push_back(columns.row(i));
  }
}

}  // namespace

void visit_steps(const Run& run, const RecordFilter& filter, bool with_records, std::vector<std::string>* problems,
                 const std::function<bool(const StepRows&)>& visit) {
  StepColumns columns;
  for (const auto& stream : run.streams()) {
    if (!filter.wants_rank(stream->header().rank)) continue;
    const auto steps = stream->steps();
    for (size_t i = 0; i < steps.size(); ++i) {
      if (!filter.wants_step(steps[i].step)) continue;
      StepRows step{stream.get(), i, &steps[i], {}};
      try {
        if (with_records) {
          stream->read_step(i, &columns);
          keep_wanted(filter, columns, &step);
        }
      } catch (const Error& error) {
        problems->push_back(error.what());
        continue;
      }
      if (!visit(step)) return;
    }
  }
}

void visit_launches(const Run& run, const RecordFilter& filter, std::vector<std::string>* problems,
                    const std::function<bool(const StepLaunches&)>& visit) {
  StepLaunches step;
  for (const auto& stream : run.streams()) {
    if (!filter.wants_rank(stream->header().rank)) continue;
    step.stream = stream.get();
    const auto steps = stream->steps();
    for (size_t i = 0; i < steps.size(); ++i) {
      if (!filter.wants_step(steps[i].step) || steps[i].launches == 0) continue;
      step.summary = &steps[i];
      try {
        stream->read_launches(i, &step.launches);
      } catch (const Error& error) {
        problems->push_back(error.what());
        continue;
      }
      if (!visit(step)) return;
    }
  }
}

}  // namespace forkpoint
