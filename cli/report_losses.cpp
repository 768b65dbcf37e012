#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "cli/report_data.h"
#include "lib/error.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

// Reading a loss means decoding its step; this keeps the page of a very long run a matter of seconds.
constexpr size_t kMostRanks = 8;
constexpr uint64_t kMostRecords = 20'000'000;

using Curves = std::map<std::string, std::vector<LossPoint>>;  // by name

std::set<uint32_t> loss_sites(const HashStreamReader& stream) {
  std::set<uint32_t> ids;
  const auto sites = stream.sites();
  for (uint32_t id = 0; id < sites.size(); ++id) {
    if (sites[id].role == Role::loss && sites[id].kind == Kind::scalar) ids.insert(id);
  }
  return ids;
}

std::string curve_name(const Site& site) { return site.layer.empty() ? site.tensor : site.layer + ": " + site.tensor; }

void add_step(const HashStreamReader& stream, size_t index, const std::set<uint32_t>& wanted, StepColumns* columns,
              Curves* curves) {
  std::map<std::string, std::pair<double, int>> sums;
  stream.read_step(index, columns);
  for (size_t i = 0; i < columns->size(); ++i) {
    if (!wanted.contains(columns->site[i])) continue;
    std::string curve = curve_name(stream.sites()[columns->site[i]]);
    if (columns->flags[i] & kRecordEval) curve += " (eval)";
    auto& [sum, count] = sums[curve];
    sum += scalar_value(columns->digest[i]);
    ++count;
  }
  for (const auto& [curve, sum] : sums) {
    (*curves)[curve].push_back({stream.steps()[index].step, sum.first / sum.second});
  }
}

Curves read_curves(const HashStreamReader* stream) {
  Curves curves;
  if (!stream) return curves;
  const std::set<uint32_t> wanted = loss_sites(*stream);
  if (wanted.empty()) return curves;
  StepColumns columns;
  for (size_t i = 0; i < stream->steps().size(); ++i) {
    try {
      add_step(*stream, i, wanted, &columns, &curves);
    } catch (const Error&) {
      continue;  // a damaged step is a gap in the curve; the verdict speaks of it
    }
  }
  for (auto& [curve, points] : curves) {
    std::stable_sort(points.begin(), points.end(), [](const auto& x, const auto& y) { return x.step < y.step; });
  }
  return curves;
}

uint64_t records_of(const Run& run, int rank) {
  const HashStreamReader* stream = run.stream_of(rank);
  uint64_t records = 0;
  if (stream) {
    for (const StepSummary& step : stream->steps()) records += step.records;
  }
  return records;
}

std::vector<int> ranks_of(const Run& a, const Run& b, const Verdict& verdict) {
  std::vector<int> order;
  if (verdict.first && verdict.first->rank >= 0) order.push_back(verdict.first->rank);
  for (const auto& stream : a.streams()) order.push_back(stream->header().rank);
  std::vector<int> chosen;
  uint64_t records = 0;
  for (const int rank : order) {
    if (!b.stream_of(rank) || std::find(chosen.begin(), chosen.end(), rank) != chosen.end()) continue;
    records += records_of(a, rank) + records_of(b, rank);
    if (chosen.size() == kMostRanks || (!chosen.empty() && records > kMostRecords)) break;
    chosen.push_back(rank);
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

}  // namespace

Losses read_losses(const Run& a, const Run& b, const Verdict& verdict) {
  Losses losses;
  const std::vector<int> ranks = ranks_of(a, b, verdict);
  for (const int rank : ranks) {
    Curves curves_a = read_curves(a.stream_of(rank)), curves_b = read_curves(b.stream_of(rank));
    for (const auto& [name, points] : curves_b) curves_a.try_emplace(name);
    for (auto& [name, points] : curves_a) losses.series.push_back({name, rank, points, curves_b[name]});
  }
  if (losses.series.empty()) {
    losses.note = "The runs hold no scalar of role loss.";
  } else if (ranks.size() < a.streams().size()) {
    losses.note = fmt::format("Of {} ranks, these were read: {}.", a.streams().size(), rank_list(ranks));
  }
  return losses;
}

namespace {

void compare(const std::string& field, const std::string& a, const std::string& b,
             std::vector<ManifestDifference>* out) {
  if (a != b) out->push_back({field, a, b});
}

void compare_maps(const std::string& prefix, const std::map<std::string, std::string>& a,
                  const std::map<std::string, std::string>& b, std::vector<ManifestDifference>* out) {
  std::map<std::string, std::string> keys = a;
  keys.insert(b.begin(), b.end());
  for (const auto& [key, unused] : keys) {
    const auto in_a = a.find(key), in_b = b.find(key);
    compare(prefix + key, in_a == a.end() ? "(not set)" : in_a->second, in_b == b.end() ? "(not set)" : in_b->second,
            out);
  }
}

}  // namespace

std::vector<ManifestDifference> manifest_differences(const Manifest& a, const Manifest& b) {
  std::vector<ManifestDifference> out;
  const auto joined = [](const std::vector<std::string>& words, const char* glue) {
    return fmt::format("{}", fmt::join(words, glue));
  };
  compare("command", joined(a.command, " "), joined(b.command, " "), &out);
  compare("working directory", a.working_directory, b.working_directory, &out);
  compare_maps("environment: ", a.environment, b.environment, &out);
  compare_maps("version: ", a.versions, b.versions, &out);
  compare("forkpoint", a.forkpoint_version, b.forkpoint_version, &out);
  compare("GPUs", joined(a.gpus, ", "), joined(b.gpus, ", "), &out);
  compare("hosts", joined(a.hosts, ", "), joined(b.hosts, ", "), &out);
  compare("world size", std::to_string(a.world_size), std::to_string(b.world_size), &out);
  compare("level", std::string(name(a.level)), std::string(name(b.level)), &out);
  compare("every", std::to_string(a.every), std::to_string(b.every), &out);
  compare("step base", a.step_base, b.step_base, &out);
  compare("state", std::string(name(a.state)), std::string(name(b.state)), &out);
  compare("end", a.end_reason, b.end_reason, &out);
  return out;
}

}  // namespace forkpoint
