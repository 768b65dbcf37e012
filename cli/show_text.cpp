#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/show.h"
#include "lib/run_knobs.h"
#include "lib/verdict_text.h"

namespace forkpoint {

std::string hex(const Digest& digest) { return fmt::format("{:016x}{:016x}", digest.a, digest.b); }

std::string step_title(int64_t step) {
  return step == kPrologueStep ? "before the first step" : fmt::format("step {}", step);
}

namespace {

constexpr size_t kMostRanks = 8, kMostLayers = 16, kMostEntries = 6;

// "blocks.11.mlp.fc1" -> "blocks.*.mlp.fc1": twelve equal blocks are one line.
std::string pattern_of(const std::string& layer) {
  std::string pattern;
  for (size_t start = 0; start <= layer.size();) {
    const size_t end = std::min(layer.find('.', start), layer.size());
    const std::string part = layer.substr(start, end - start);
    const bool is_index = !part.empty() && part.find_first_not_of("0123456789") == part.npos;
    pattern += (start ? "." : "") + (is_index ? std::string("*") : part);
    start = end + 1;
  }
  return pattern;
}

struct LayerLine {
  size_t layers = 0, tensors = 0;
  std::set<Phase> phases;
};

class OverviewText {
 public:
  OverviewText(const Overview& overview, const Style& style, size_t width)
      : overview_(overview), style_(style), width_(width) {}

  std::string text() {
    line("state", state());
    origin();
    line("ranks", ranks());
    line("steps", steps());
    if (overview_.launches != 0) line("launches", launches());
    line("records", fmt::format("{}, {} hashed, {} on disk", grouped(overview_.records),
                                human_size(overview_.bytes_hashed), human_size(overview_.size_bytes)));
    list("knobs", knobs());
    list("note", overview_.manifest.notes);
    list("gap", overview_.gaps);
    list("not seen", overview_.limits);
    list("problem", overview_.problems);
    rank_table();
    layer_table();
    return style_.bold(printable(overview_.directory)) + "\n" + out_;
  }

 private:
  void line(std::string_view label, const std::string& text) {
    if (text.empty()) return;
    out_ += fmt::format("  {:<10}{}\n", label, wrapped(printable(text), 12, width_));
  }

  void list(std::string_view label, const std::vector<std::string>& entries) {
    for (size_t i = 0; i < entries.size() && i < kMostEntries; ++i) line(i ? "" : label, entries[i]);
    if (entries.size() > kMostEntries) line("", fmt::format("and {} more (see --json)", entries.size() - kMostEntries));
  }

  std::string state() const {
    const std::string& reason = overview_.manifest.end_reason;
    return reason.empty() ? overview_.state : fmt::format("{}; command: {}", overview_.state, reason);
  }

  void origin() {
    const Manifest& manifest = overview_.manifest;
    line("command", fmt::format("{}", fmt::join(manifest.command, " ")));
    line("in", manifest.working_directory);
    std::string recorded = fmt::format("level {}", name(manifest.level));
    if (manifest.every > 1) recorded += fmt::format(", every {} steps", manifest.every);
    if (manifest.names_masked) recorded += ", names masked";
    if (!manifest.step_base.empty()) recorded += ", steps counted by " + manifest.step_base;
    if (!manifest.started_at.empty()) recorded += ", " + manifest.started_at;
    if (!manifest.ended_at.empty()) recorded += " to " + manifest.ended_at;
    line("recorded", recorded);
    line("hosts", fmt::format("{}", fmt::join(manifest.hosts, ", ")));
    std::map<std::string, int> gpus;
    for (const std::string& gpu : manifest.gpus) ++gpus[gpu];
    std::vector<std::string> names;
    for (const auto& [gpu, count] : gpus) names.push_back(fmt::format("{} x {}", count, gpu));
    line("GPUs", fmt::format("{}", fmt::join(names, ", ")));
    std::vector<std::string> versions;
    for (const auto& [key, value] : manifest.versions) versions.push_back(key + " " + value);
    line("versions", fmt::format("{}", fmt::join(versions, ", ")));
    std::vector<std::string> merged = manifest.merged_from;
    line("merged", fmt::format("{}", fmt::join(merged, ", ")));
  }

  // Those of deterministic mode: in force, and not.
  std::vector<std::string> knobs() const {
    std::vector<std::string> lines(1), problems;
    const std::vector<RecordedKnob> knobs = recorded_knobs(overview_.manifest);
    for (const RecordedKnob& knob : knobs) {
      if (!knob.in_force()) {
        problems.push_back(knob.problem);
        continue;
      }
      const std::string kept = knob.state == "kept" ? ", the user's own" : "";
      lines[0] += fmt::format("{}{} ({}{})", lines[0].empty() ? "" : ", ", knob.name, knob.value, kept);
    }
    if (knobs.empty()) return {};
    lines[0] = lines[0].empty() ? "none in force" : "in force: " + lines[0];
    lines.insert(lines.end(), problems.begin(), problems.end());
    return lines;
  }

  std::string ranks() const {
    std::vector<int> present;
    for (const RankOverview& rank : overview_.ranks) present.push_back(rank.rank);
    const size_t known = present.size() + overview_.missing_ranks.size();
    const size_t world = std::max(known, static_cast<size_t>(std::max(overview_.manifest.world_size, 0)));
    std::string text = fmt::format("{} of {}", present.size(), world);
    if (!present.empty()) text += ": " + rank_list(present);
    if (!overview_.missing_ranks.empty()) text += "; missing: " + rank_list(overview_.missing_ranks);
    if (world > known) text += fmt::format("; {} not asked for", counted(world - known, "rank"));
    return text;
  }

  std::string steps() const {
    if (overview_.steps.empty()) return overview_.has_prologue ? "none, only what was made before the first" : "none";
    const int64_t first = *overview_.steps.begin(), last = *overview_.steps.rbegin();
    const size_t incomplete = overview_.incomplete_steps.size();
    std::string text = fmt::format("{} ({} to {})", grouped(overview_.steps.size()), first, last);
    text += incomplete == 0
                ? ", all complete"
                : fmt::format(", {} incomplete (the first is {})", incomplete, *overview_.incomplete_steps.begin());
    if (overview_.has_prologue) text += "; and what was made before the first";
    return text;
  }

  std::string launches() const {
    const size_t ranks = std::max<size_t>(overview_.ranks.size(), 1), steps = overview_.steps.size();
    std::string text = grouped(overview_.launches);
    if (steps != 0) text += fmt::format(", about {} a step and rank", grouped(overview_.launches / ranks / steps));
    return text;
  }

  void rank_table() {
    if (overview_.ranks.size() < 2) return;
    out_ += fmt::format("\n  {:>5}  {:<9} {:>7} {:>13} {:>10}  {}\n", "rank", "state", "steps", "records", "size",
                        "device");
    size_t shown = 0;
    for (const RankOverview& rank : overview_.ranks) {
      // Of many ranks those that are not whole are the ones to see.
      if (overview_.ranks.size() > kMostRanks && rank.state == "whole" && shown >= kMostRanks / 2) continue;
      if (++shown > 2 * kMostRanks) break;
      const std::string device = rank.host.empty() ? rank.device : rank.device + " on " + rank.host;
      out_ += fmt::format("  {:>5}  {:<9} {:>7} {:>13} {:>10}  {}\n", rank.rank, rank.state, grouped(rank.steps),
                          grouped(rank.records), human_size(rank.size_bytes), printable(device));
    }
    const size_t rest = overview_.ranks.size() - std::min(shown, overview_.ranks.size());
    if (rest) out_ += fmt::format("  {:>5}  and {}\n", "", counted(rest, "more rank"));
  }

  void layer_table() {
    std::map<std::string, LayerLine> lines;
    std::vector<std::string> order;
    for (const auto& [layer, content] : overview_.layers) {
      LayerLine& entry = lines[pattern_of(layer)];
      ++entry.layers;
      entry.tensors += content.tensors.size();
      entry.phases.insert(content.phases.begin(), content.phases.end());
    }
    if (lines.empty()) return;
    size_t column = 5;
    for (const auto& [pattern, entry] : lines) column = std::max(column, std::min<size_t>(pattern.size(), 44));
    out_ += fmt::format("\n  {:<{}}  {:>6} {:>8}  {}\n", "layer", column, "layers", "tensors", "phases");
    size_t shown = 0;
    for (const auto& [pattern, entry] : lines) {
      if (++shown > kMostLayers) break;
      std::vector<std::string_view> phases;
      for (const Phase phase : entry.phases) phases.push_back(name(phase));
      const std::string label = pattern.empty() ? "(no layer)" : printable(pattern);
      out_ += fmt::format("  {:<{}}  {:>6} {:>8}  {}\n", label, column, entry.layers, entry.tensors,
                          fmt::join(phases, ", "));
    }
    if (lines.size() > kMostLayers) out_ += fmt::format("  and {} more (see --json)\n", lines.size() - kMostLayers);
  }

  const Overview& overview_;
  const Style& style_;
  size_t width_;
  std::string out_;
};

std::string value_text(const Site& site, const Record& record) {
  if (site.kind == Kind::scalar) return fmt::format("value {}", scalar_value(record.digest));
  std::string text = hex(record.digest);
  if (site.kind == Kind::state) return text;
  text += fmt::format("  absmax {:.6g}", record.stats.absmax);
  if (record.stats.nonfinite) text += fmt::format("  {} non-finite", grouped(record.stats.nonfinite));
  return text;
}

std::string site_text(const Site& site, const Record& record) {
  std::string text = site.layer;
  if (!site.op.empty()) text += (text.empty() ? "" : ", ") + site.op;
  text += (text.empty() ? "" : ": ") + site.tensor;
  if (record.micro_step) text += fmt::format(" micro {}", record.micro_step);
  if (record.call) text += fmt::format(" #{}", record.call);
  if (record.flags & kRecordEval) text += " (eval)";
  if (record.flags & kRecordRecompute) text += " (recompute)";
  return printable(text);
}

}  // namespace

std::string overview_text(const Overview& overview, const Style& style, size_t width) {
  return OverviewText(overview, style, width).text();
}

std::string step_text(const StepRows& step) {
  const uint64_t launches = step.summary->launches;
  return fmt::format("rank {:<4} {:<22} {:>17} {}{:>10} hashed  {}{}\n", step.stream->header().rank,
                     step_title(step.summary->step), counted(step.summary->records, "record"),
                     launches == 0 ? "" : fmt::format("{:>18} ", counted(launches, "launch")),
                     human_size(step.summary->bytes_hashed), hex(step.summary->digest),
                     step.summary->complete ? "" : "  incomplete");
}

std::string record_text(const StepRows& step, const Style& style) {
  const auto sites = step.stream->sites();
  const auto layouts = step.stream->layouts();
  std::string out = style.bold(fmt::format("rank {}, {}", step.stream->header().rank, step_title(step.summary->step)));
  out += step.summary->complete ? "\n" : " (incomplete)\n";
  size_t name_width = 0, layout_width = 0;
  std::vector<std::string> names, forms;
  for (const Record& record : step.rows) {
    const Site& site = sites[record.site];
    names.push_back(site_text(site, record));
    const bool has_form = site.kind != Kind::scalar && record.layout < layouts.size();
    forms.push_back(has_form ? to_string(layouts[record.layout]) : std::string(name(site.kind)));
    name_width = std::max(name_width, std::min<size_t>(names.back().size(), 56));
    layout_width = std::max(layout_width, std::min<size_t>(forms.back().size(), 32));
  }
  for (size_t i = 0; i < step.rows.size(); ++i) {
    const Site& site = sites[step.rows[i].site];
    out += fmt::format("  {:<10} {:<{}}  {:<{}}  {}\n", name(site.phase), names[i], name_width, forms[i], layout_width,
                       value_text(site, step.rows[i]));
  }
  return out;
}

}  // namespace forkpoint
