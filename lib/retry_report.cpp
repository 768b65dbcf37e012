#include "lib/retry_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>

#include "lib/error.h"
#include "lib/launch.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

constexpr const char* kNothing = "nothing to run again";
constexpr const char* kNoGraphs = "only launches outside of graphs are run again";

struct Obstacle {
  const char* what = nullptr;  // nullptr: none, it is a kernel by itself
  const char* why = nullptr;
};

Obstacle obstacle_of(const LaunchRow& row) {
  if (row.flags & kLaunchInGraph) return {"a node of a CUDA graph", kNoGraphs};
  switch (row.kind) {
    case LaunchKind::kernel: return {};
    case LaunchKind::copy: return {"a copy", kNothing};
    case LaunchKind::set: return {"a set", kNothing};
    case LaunchKind::graph: return {"the launch of a CUDA graph", kNoGraphs};
    case LaunchKind::host_function: return {"a call of the host's", kNothing};
    case LaunchKind::allocate: return {"an allocation", kNothing};
    case LaunchKind::release: return {"the release of an allocation", kNothing};
    case LaunchKind::event_record: return {"the record of an event", kNothing};
    case LaunchKind::event_wait: return {"a wait for an event", kNothing};
    case LaunchKind::synchronize: return {"a wait of the host's", kNothing};
    case LaunchKind::record: return {"the record of a tensor", kNothing};
    case LaunchKind::retry: break;
  }
  return {"a repetition of another launch", kNothing};
}

using Outputs = std::map<uint32_t, std::pair<uint64_t, uint64_t>>;  // digest by place

// Of one row: what its buffers held after it. Nothing where a digest is missing.
std::optional<Outputs> outputs_of(std::span<const BufferRow> buffers) {
  Outputs out;
  for (const BufferRow& buffer : buffers) {
    if (buffer.flags & (kBufferBefore | kBufferAddresses)) continue;
    if (buffer.flags & kBufferNoDigest) return {};
    out[buffer.place] = {buffer.digest.a, buffer.digest.b};
  }
  return out;
}

class RankReport {
 public:
  RankReport(const HashStreamReader& stream, int64_t step, uint64_t index, int64_t times)
      : stream_(stream), step_(step), index_(index), times_(times) {}

  // A sentence; *repeated: it was run again, as often as was asked for.
  std::string text(bool* repeated) {
    const auto step = find_step();
    if (!step) return no_step();
    try {
      stream_.read_launches(*step, &launches_);
    } catch (const Error& error) {
      return fmt::format("launch {} was not found: {}", name(), error.what());
    }
    if (index_ >= launches_.rows.size()) return too_few();
    const LaunchRow& row = launches_.rows[index_];
    if (const Obstacle obstacle = obstacle_of(row); obstacle.what) {
      const std::string call = short_kernel_name(stream_.sites()[row.site].tensor);
      return fmt::format("launch {} is {}{}: {}", name(), obstacle.what, call.empty() ? "" : fmt::format(" ({})", call),
                         obstacle.why);
    }
    return repetitions(row, repeated);
  }

 private:
  std::string name() const { return fmt::format("{}:{}", step_, index_); }
  std::string when() const { return step_ == kPrologueStep ? "before the first step" : fmt::format("in step {}", step_); }

  // The last one of that number: the probe takes the first launch that fits, and marks it by rows behind it.
  std::optional<size_t> find_step() {
    std::optional<size_t> found;
    const auto steps = stream_.steps();
    for (size_t s = 0; s < steps.size(); ++s) {
      if (steps[s].step != step_ || (found && steps[s].launches <= index_)) continue;
      found = found && steps[*found].launches > index_ ? found : s;
    }
    return found;
  }

  std::string no_step() const {
    if (step_ == kPrologueStep) return fmt::format("launch {} did not come: nothing was launched before the first step", name());
    std::vector<int64_t> numbers;
    for (const StepSummary& step : stream_.steps()) {
      if (step.step != kPrologueStep) numbers.push_back(step.step);
    }
    if (numbers.empty()) return fmt::format("launch {} did not come: no step was recorded (see --step-on)", name());
    const auto [first, last] = std::minmax_element(numbers.begin(), numbers.end());
    const std::string recorded =
        *first == *last ? fmt::format("step {} was", *first) : fmt::format("steps {} to {} were", *first, *last);
    return fmt::format("launch {} did not come: there was no step {}; {} recorded", name(), step_, recorded);
  }

  // Without the rows that stand for repetitions.
  std::string too_few() const {
    const uint64_t rows = launches_.rows.size();
    if (rows == 0) return fmt::format("launch {} did not come: nothing was launched {}", name(), when());
    const std::string had = step_ == kPrologueStep
                                ? fmt::format("only {} came before the first step", counted(rows, "launch"))
                                : fmt::format("step {} had only {}", step_, counted(rows, "launch"));
    return fmt::format("launch {} did not come: {} (the last has index {})", name(), had, rows - 1);
  }

  std::string repetitions(const LaunchRow& row, bool* repeated) const {
    const std::string title = fmt::format("launch {} {}", name(), short_kernel_name(stream_.sites()[row.site].tensor));
    std::set<Outputs> different;
    std::optional<Outputs> own;
    uint64_t runs = 0, undigested = 0;
    bool own_came = false;
    std::span<const BufferRow> left(launches_.buffers);
    for (size_t i = 0; i < launches_.rows.size(); ++i) {
      const LaunchRow& at = launches_.rows[i];
      const auto buffers = left.first(at.buffers);
      left = left.subspan(at.buffers);
      if (i == index_) own = outputs_of(buffers);
      if (at.kind != LaunchKind::retry || at.retry_of != index_) continue;
      ++runs;
      const auto outputs = outputs_of(buffers);
      if (!outputs) {
        ++undigested;
        continue;
      }
      own_came = own_came || (own && agree(*own, *outputs));
      different.insert(*outputs);
    }
    if (runs == 0) return fmt::format("{} was not run again: {}", title, why_not(row));
    *repeated = runs == static_cast<uint64_t>(times_) && undigested == 0;
    std::string text = fmt::format("{}: {} in {}", title, counted(different.size(), "output"), counted(runs, "run"));
    if (different.size() == 1) text += own_came ? ", the recorded one" : ", not the recorded one";
    if (runs < static_cast<uint64_t>(times_)) text += fmt::format(" ({} were asked for)", times_);
    if (undigested > 0) text += fmt::format("; of {} no digest came", counted(undigested, "run"));
    return text;
  }

  // On the places that both have.
  static bool agree(const Outputs& own, const Outputs& other) {
    for (const auto& [place, digest] : other) {
      const auto found = own.find(place);
      if (found != own.end() && found->second != digest) return false;
    }
    return true;
  }

  std::string why_not(const LaunchRow& row) const {
    for (const CoverageLimit& limit : stream_.coverage_limits()) {
      if (limit.what.find("the launch to be repeated could not be") != std::string::npos) return limit.detail;
    }
    const std::string& kernel = stream_.sites()[row.site].tensor;
    if (kernel.find("ncclDevKernel") != kernel.npos || kernel.find("ncclKernel") != kernel.npos) {
      return "NCCL's kernels work with those of other ranks, so one alone cannot be";
    }
    if (row.flags & kLaunchParamsUnread) return "its parameters could not be read";
    return "launches of several threads mixed before it, so that it was not known in time; try once more";
  }

  const HashStreamReader& stream_;
  const int64_t step_;
  const uint64_t index_;
  const int64_t times_;
  LaunchColumns launches_;
};

}  // namespace

RetryReport report_retry(const Run& run, int64_t step, uint64_t index, int64_t times) {
  RetryReport report;
  report.repeated = !run.streams().empty();
  std::vector<std::pair<std::string, std::vector<int>>> texts;
  for (const auto& stream : run.streams()) {
    bool repeated = false;
    const std::string text = RankReport(*stream, step, index, times).text(&repeated);
    report.repeated &= repeated;
    auto at = std::find_if(texts.begin(), texts.end(), [&](const auto& known) { return known.first == text; });
    if (at == texts.end()) at = texts.insert(texts.end(), {text, {}});
    at->second.push_back(stream->header().rank);
  }
  for (const auto& [text, ranks] : texts) {
    report.sentences.push_back(run.streams().size() == 1 ? text : fmt::format("{}: {}", rank_list(ranks), text));
  }
  return report;
}

}  // namespace forkpoint
