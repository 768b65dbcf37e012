#include "lib/reference.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <set>
#include <tuple>

#include "lib/align.h"
#include "lib/cause_facts.h"
#include "lib/diff_step.h"
#include "lib/error.h"
#include "lib/evaluation.h"
#include "lib/run_knobs.h"
#include "lib/run_steps.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

constexpr size_t kMostLossValues = 4;

std::string hex(const Digest& digest) { return fmt::format("{:016x}{:016x}", digest.a, digest.b); }

const char* group_of(const Site& site) {
  if (site.phase == Phase::collective) return "collectives";
  switch (site.role) {
    case Role::parameter:
      return "parameters";
    case Role::gradient:
      return "gradients";
    case Role::optimizer_state:
      return "optimizer state";
    case Role::loss:
      return "loss";
    case Role::batch:
    case Role::sampler:
      return "data";
    case Role::rng:
      return "generators";
    default:
      return is_hyperparameter(site) ? "hyperparameters" : "other";
  }
}

struct Sum {
  uint64_t records = 0;
  Digest digest;
  void add(const Digest& leaf) { ++records, digest += leaf; }
  std::string text() const { return fmt::format("{} {}", records, hex(digest)); }
};

// A Gap that is placed nowhere may lie in any step.
bool in_gap(const HashStreamReader& stream, int64_t step) {
  const auto gaps = stream.gaps();
  return std::any_of(gaps.begin(), gaps.end(), [&](const Gap& gap) {
    return gap.last_step == kPrologueStep || (gap.first_step <= step && step <= gap.last_step);
  });
}

std::string call_text(const Record& record) {
  std::string text = record.micro_step > 0 ? fmt::format("micro-step {}", record.micro_step) : "";
  if (record.call > 0) text += fmt::format("{}call {}", text.empty() ? "" : ", ", record.call);
  return text;
}

// A tensor of one fp32 word follows from its digest: it is the change from zero.
void add_loss(const Site& site, const Layout& layout, const Digest& digest, std::vector<double>* losses) {
  WordChange change;
  if (site.kind == Kind::scalar) {
    losses->push_back(scalar_value(digest));
  } else if (layout.dtype == DType::f32 && element_count(layout) == 1 &&
             find_single_word_change({}, digest, 1, &change) && change.delta > 0) {
    losses->push_back(std::bit_cast<float>(static_cast<uint32_t>(change.delta)));
  }
}

std::string losses_text(std::vector<double> losses) {
  const bool many = losses.size() > kMostLossValues;
  losses.resize(std::min(losses.size(), kMostLossValues));
  return fmt::format("{}{}", fmt::join(losses, " "), many ? " ..." : "");
}

class Measure {
 public:
  Measure(const Run& run, int64_t first_step, int64_t last_step, MeasuredRun* out) : run_(run), out_(*out) {
    out_.reference.first_step = first_step;
    out_.reference.last_step = last_step;
  }

  void streams() {
    for (const auto& stream : run_.streams()) {
      uint64_t frames = 0;
      const std::string damage = stream->verify(&frames);
      if (!damage.empty()) out_.lost.push_back(damage);
      out_.frames_verified += frames;
      add_stream(*stream);
    }
    auto& tensors = out_.reference.tensors;
    std::sort(tensors.begin(), tensors.end(), [](const ReferenceTensor& a, const ReferenceTensor& b) {
      return std::tie(a.group, a.layer, a.tensor, a.call, a.rank) <
             std::tie(b.group, b.layer, b.tensor, b.call, b.rank);
    });
    for (const auto& limit : limits_) out_.reference.not_seen.push_back(limit);
  }

 private:
  void add_stream(const HashStreamReader& stream) {
    const int rank = stream.header().rank;
    Reference& reference = out_.reference;
    for (const CoverageLimit& limit : stream.coverage_limits()) {
      limits_.insert(limit.detail.empty() ? limit.what : limit.what + ": " + limit.detail);
    }
    for (size_t i = 0; i < stream.steps().size(); ++i) {
      const StepSummary& summary = stream.steps()[i];
      const bool within = summary.step >= reference.first_step && summary.step <= reference.last_step;
      if (summary.step != kPrologueStep && !within) continue;
      if (is_final_part(stream.steps(), i)) {  // there only where the job was not ended behind the last step
        out_.has_final_part = true;
        continue;
      }
      if (!summary.complete || in_gap(stream, summary.step)) continue;  // said by lost_in
      if (reference.steps.contains({summary.step, rank})) {
        out_.lost.push_back(fmt::format("rank {}: {} came twice", rank, step_text(summary.step)));
        continue;
      }
      add_step(stream, i);
    }
    for (int64_t step = reference.first_step; step <= reference.last_step; ++step) {
      if (reference.steps.contains({step, rank})) continue;
      out_.lost.push_back(fmt::format("rank {} has no whole step {}", rank, step));
      break;
    }
  }

  void add_step(const HashStreamReader& stream, size_t index) {
    const StepSummary& summary = stream.steps()[index];
    try {
      stream.read_step(index, &columns_);
    } catch (const Error& error) {
      out_.lost.push_back(error.what());
      return;
    }
    std::map<std::string, Sum> groups;
    Sum all, form;
    std::vector<double> losses;
    for (size_t i = 0; i < columns_.size(); ++i) {
      Record record = columns_.row(i);
      const Site& site = stream.sites()[record.site];
      if ((record.flags & kRecordEval) != 0) {
        const bool rests = site.phase == Phase::optimizer && (site.role == Role::parameter || site.role == Role::other);
        if (rests && summary.step == out_.reference.last_step) add_tensor(stream, site, record, kRestingGroup);
        continue;
      }
      const Digest key = stream.site_keys()[record.site];
      const uint64_t layout = stream.layout_keys()[record.layout];
      const Digest leaf = tree_leaf(key, layout, record);
      const std::string group = group_of(site);
      all.add(leaf), groups[group].add(leaf);
      if (group == "loss") add_loss(site, stream.layouts()[record.layout], record.digest, &losses);
      if (summary.step == out_.reference.last_step) add_tensor(stream, site, record, group);
      record.digest = {};
      form.add(tree_leaf(key, layout, record));
    }
    if (!(all.digest == summary.digest) || all.records != summary.records) {
      out_.lost.push_back(fmt::format("{}: the records of {} do not add up to the step's summary", stream.path(),
                                      step_text(summary.step)));
      return;
    }
    out_.records += all.records;
    ReferenceFields& fields = out_.reference.steps[{summary.step, stream.header().rank}];
    fields[kReferenceAll] = all.text(), fields[kReferenceForm] = hex(form.digest);
    for (const auto& [group, sum] : groups) fields[group] = sum.text();
    if (!losses.empty()) fields[kReferenceLossValue] = losses_text(std::move(losses));
  }

  void add_tensor(const HashStreamReader& stream, const Site& site, const Record& record, const std::string& group) {
    if (group != "parameters" && group != "optimizer state" && group != kRestingGroup) return;
    out_.reference.tensors.push_back({group, site.layer, site.tensor, call_text(record), stream.header().rank,
                                      to_string(stream.layouts()[record.layout]), hex(record.digest)});
  }

  const Run& run_;
  MeasuredRun& out_;
  StepColumns columns_;
  std::set<std::string> limits_;
};

// Variables by which programs are found, kept and watched: they change no number.
bool changes_numbers(std::string_view variable) {
  constexpr std::array<std::string_view, 5> kNames = {"CUDA_VISIBLE_DEVICES", "TF_CLI_CONFIG_FILE", "TORCH_LOGS",
                                                      "CUDA_DEVICE_ORDER", "NCCL_DEBUG"};
  if (std::find(kNames.begin(), kNames.end(), variable) != kNames.end()) return false;
  return !variable.ends_with("_HOME") && !variable.ends_with("_CACHE_DIR") && !variable.ends_with("_CACHE_PATH") &&
         !variable.starts_with("NCCL_DEBUG_");
}

std::string joined(const std::set<std::string>& values) { return fmt::format("{}", fmt::join(values, " | ")); }

std::map<std::string, std::string> dependencies_of(const Run& run, int64_t first_step, int64_t last_step) {
  const Manifest& manifest = run.manifest();
  std::map<std::string, std::string> out;
  for (const auto& [variable, value] : manifest.environment) {
    if (changes_numbers(variable)) out[variable] = value;
  }
  for (const auto& [name, value] : manifest.versions) {
    // The system's kernel changes no number, and what forkpoint's version could change is in the digest's.
    if (name != "forkpoint" && name != "kernel") out[name] = value;
  }
  // A reference that was made without, and before there were any, has no such line.
  if (const std::string knobs = knobs_in_force(manifest); !knobs.empty()) out["knobs"] = knobs;
  std::set<std::string> devices;
  for (const auto& stream : run.streams()) devices.insert(stream->header().device);
  out["device"] = joined(devices);
  // How many a machine has is its own affair: the job's ranks are counted by the world size.
  out["gpus"] = manifest.gpus.empty() ? "none" : joined({manifest.gpus.begin(), manifest.gpus.end()});
  out["world_size"] = std::to_string(run.world_size());
  out["level"] = std::string(name(manifest.level));
  out["steps"] = fmt::format("{}-{}", first_step, last_step);
  out["step base"] = manifest.step_base;
  out["digest"] = digest_version();
  return out;
}

}  // namespace

std::string digest_version() {
  // Not a number that somebody has to remember to raise: the definition's own values.
  std::array<unsigned char, 67> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(37 * i + 11);
  const Digest digest = digest_only(bytes.data(), bytes.size(), 4);
  const Site site{Phase::backward, Kind::tensor, Role::gradient, "layer", "op", "tensor", "world"};
  Record record;
  record.micro_step = 2, record.call = 3, record.digest = digest;
  const Layout layout{DType::f32, {2, 3}, {}, {4, 3}, {2, 0}};
  return hex(tree_leaf(site_key(site), layout_key(layout), record) + scalar_digest(1.5));
}

int Reference::world_size() const {
  int largest = -1;
  for (const auto& [place, fields] : steps) largest = std::max(largest, place.second);
  return largest + 1;
}

MeasuredRun measure_run(const Run& run, int64_t first_step, int64_t last_step) {
  MeasuredRun out;
  StepWindow window;
  window.last = last_step;
  out.lost = lost_in(run, window);
  if (run.state() != RunState::whole) {
    const std::string& why = run.manifest().end_reason;
    out.lost.push_back(fmt::format("the run is not whole{}", why.empty() ? "" : fmt::format(" ({})", why)));
  }
  Measure(run, first_step, last_step, &out).streams();
  out.reference.command = shell_words(run.manifest().command);
  out.reference.depends_on = dependencies_of(run, first_step, last_step);
  if (out.records == 0) out.lost.push_back("nothing was recorded in these steps");
  return out;
}

}  // namespace forkpoint
