#include "lib/launch_verdict.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "lib/error.h"
#include "lib/launch_words.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

class Joiner {
 public:
  Joiner(const OriginInput& input, const Origins& origins, const LaunchScan& launches)
      : in_(input), origins_(origins), launches_(launches) {}

  std::vector<First> run() {
    for (size_t o = 0; o < origins_.list.size(); ++o) add_record(origins_.list[o], launches_.records[o]);
    for (size_t p = 0; p < launches_.ranks.size(); ++p) {
      for (const LaunchOrigin& origin : launches_.ranks[p].from_device) add_from_device(p, origin);
    }
    if (!launches_.compared) return std::move(out_);
    merge_alike();
    std::stable_sort(out_.begin(), out_.end(),
                     [&](const First& left, const First& right) { return key(left) < key(right); });
    return std::move(out_);
  }

 private:
  const StepPair& step_of(const LaunchOrigin& origin) const {
    return in_.alignment.ranks[origin.pair].steps[origin.node.pair_step];
  }
  int64_t step_of(const First& first) const {
    if (first.launch) return step_of(*first.launch).step;
    return first.record->in_prologue ? kPrologueStep : first.record->step;
  }

  First of_record(const Origin& origin) const {
    First first;
    first.record = &origin;
    first.ranks = origin.ranks, first.everyone = origin.everyone, first.pair = origin.pair;
    return first;
  }

  void add_record(const Origin& origin, const RecordSlice& slice) {
    std::vector<const LaunchOrigin*> on_device, from_host;
    for (const LaunchOrigin& end : slice.ends)
      (end.end.kind == EndKind::from_host ? from_host : on_device).push_back(&end);
    for (const LaunchOrigin* end : on_device) {
      if (is_known(*end)) continue;
      First first = of_record(origin);
      first.launch = *end;
      out_.push_back(std::move(first));
    }
    if (!on_device.empty()) return;
    First first = of_record(origin);
    first.on_host = !slice.on_device || !from_host.empty();
    if (!launches_.compared) {
      out_.push_back(std::move(first));
      return;
    }
    for (const LaunchOrigin* end : from_host) {
      first.evidence.push_back(
          fmt::format("its bytes came from the host: {}",
                      launch_text(*in_.alignment.ranks[end->pair].a, step_of(*end).a, end->node.row_a)));
    }
    const bool unexplained = slice.on_device && from_host.empty() && !origin.collective_output;
    if (unexplained) {
      first.evidence.push_back(
          "no recorded launch put another value there: what did was not observed (unobserved producer)");
    }
    if (origin.collective_output) {
      const std::string kernels = collective_kernels(in_, origin);
      if (!kernels.empty()) first.evidence.push_back(kernels);
    }
    out_.push_back(std::move(first));
  }

  bool is_known(const LaunchOrigin& origin) const {
    return std::any_of(out_.begin(), out_.end(), [&](const First& first) {
      if (!first.launch || first.launch->pair != origin.pair) return false;
      const SliceEnd &left = first.launch->end, &right = origin.end;
      const bool one_entry = left.kind == EndKind::entered && right.kind == EndKind::entered &&
                             left.entry_node != kNoNode && left.entry_node == right.entry_node &&
                             left.entry_place == right.entry_place;
      return one_entry ||
             (first.launch->node.pair_step == origin.node.pair_step && first.launch->node.row_a == origin.node.row_a &&
              first.launch->node.row_b == origin.node.row_b);
    });
  }

  // What left the device unrecorded counts where the records of the rank do not explain it.
  void add_from_device(size_t p, const LaunchOrigin& origin) {
    if (is_known(origin)) return;
    const int rank = in_.alignment.ranks[p].rank;
    const int64_t step = step_of(origin).step;
    for (const First& first : out_) {
      const bool here = std::find(first.ranks.begin(), first.ranks.end(), rank) != first.ranks.end();
      if (here && first.on_host && step_of(first) <= step) return;
      if (here && step_of(first) < step) return;  // everything after it may follow from it
    }
    for (const Infection& infection : origins_.infections) {
      const bool here = std::find(infection.ranks.begin(), infection.ranks.end(), rank) != infection.ranks.end();
      const bool sure = origin.end.kind == EndKind::launch || origin.end.kind == EndKind::gap;
      if (here && (infection.step < step || (infection.step == step && !sure))) return;
    }
    First first;
    first.launch = origin;
    first.ranks = {rank}, first.pair = p;
    out_.push_back(std::move(first));
  }

  // The same launch on every rank is one first.
  void merge_alike() {
    const size_t world = static_cast<size_t>(std::max(1, in_.run_a.world_size()));
    std::map<std::tuple<int64_t, std::string, std::string, uint64_t, uint32_t>, std::vector<size_t>> groups;
    for (size_t k = 0; k < out_.size(); ++k) {
      if (!out_[k].launch) continue;
      const LaunchOrigin& at = *out_[k].launch;
      const uint32_t place = at.end.place < at.node.places.size() ? at.node.places[at.end.place].place() : kNoPlace;
      groups[{step_of(at).step, at.kernel_a, at.kernel_b, nth_of_kernel(at), place}].push_back(k);
    }
    std::set<size_t> dropped;
    for (const auto& [place, members] : groups) {
      std::set<int> ranks;
      for (const size_t k : members) ranks.insert(out_[k].ranks.begin(), out_[k].ranks.end());
      if (world == 1 || ranks.size() != world) continue;
      First& lead = out_[members[0]];
      lead.everyone = true;
      lead.ranks.assign(ranks.begin(), ranks.end());
      for (size_t i = 1; i < members.size(); ++i) dropped.insert(members[i]);
    }
    std::vector<First> kept;
    for (size_t k = 0; k < out_.size(); ++k) {
      if (dropped.count(k) == 0) kept.push_back(std::move(out_[k]));
    }
    out_ = std::move(kept);
  }

  // Which launch of its kernel it is in its step.
  uint64_t nth_of_kernel(const LaunchOrigin& origin) const {
    const bool in_b = origin.node.row_a == kNoRow;
    const RankPair& pair = in_.alignment.ranks[origin.pair];
    const HashStreamReader& stream = in_b ? *pair.b : *pair.a;
    const uint32_t row = in_b ? origin.node.row_b : origin.node.row_a;
    LaunchColumns launches;
    try {
      stream.read_launches(in_b ? step_of(origin).b : step_of(origin).a, &launches);
    } catch (const Error&) {
      return row;
    }
    uint64_t before = 0;
    for (uint32_t i = 0; i < std::min<size_t>(row, launches.rows.size()); ++i) {
      before += launches.rows[i].site == launches.rows[row].site && is_work(launches.rows[i].kind) ? 1 : 0;
    }
    return before;
  }

  std::tuple<int64_t, bool, uint64_t, int> key(const First& first) const {
    uint64_t row = 0;
    if (first.launch) {
      row = first.launch->node.order & ((uint64_t{1} << 34) - 1);
    } else if (!first.on_host) {
      const size_t o = static_cast<size_t>(first.record - origins_.list.data());
      if (launches_.records[o].row != kNoRow) row = uint64_t{launches_.records[o].row} * 2;
    }
    return {time_of(first), !first.on_host, row, first.ranks[0]};
  }

  // Steps in the order in which they ran, also where the runs went back to an earlier one.
  int64_t time_of(const First& first) const {
    const auto& steps = in_.alignment.ranks[first.pair].steps;
    const size_t s = first.launch ? first.launch->node.pair_step : first.record->step_index;
    return s < steps.size() ? static_cast<int64_t>(steps[s].a) : -1;
  }

  const OriginInput& in_;
  const Origins& origins_;
  const LaunchScan& launches_;
  std::vector<First> out_;
};

bool is_nccl(const std::string& kernel) {
  return kernel.find("ncclDevKernel") != std::string::npos || kernel.find("ncclKernel") != std::string::npos;
}

std::vector<std::string> nccl_kernels(const HashStreamReader& stream, size_t step_index) {
  std::vector<std::string> names;
  LaunchColumns launches;
  try {
    stream.read_launches(step_index, &launches);
  } catch (const Error&) {
    return names;
  }
  for (const LaunchRow& row : launches.rows) {
    if (row.kind == LaunchKind::kernel && is_nccl(stream.sites()[row.site].tensor))
      names.push_back(short_kernel_name(stream.sites()[row.site].tensor));
  }
  return names;
}

}  // namespace

std::vector<First> join_firsts(const OriginInput& input, const Origins& origins, const LaunchScan& launches) {
  return Joiner(input, origins, launches).run();
}

bool launches_diverge(const LaunchScan& launches) {
  return std::any_of(launches.ranks.begin(), launches.ranks.end(),
                     [](const RankLaunches& rank) { return !rank.from_device.empty(); });
}

uint64_t launches_in_one_run(const LaunchScan& launches) {
  uint64_t single = 0;
  for (const auto& steps : launches.steps) {
    for (const LaunchCounts& counts : steps) {
      if (counts.complete) single += std::max(counts.only_a, counts.only_b);
    }
  }
  return single;
}

std::vector<std::string> launch_blockers(const LaunchScan& launches) {
  constexpr size_t kMost = 20;
  std::vector<std::string> out = launches.blockers;
  if (!launches.gaps.empty()) {
    out.push_back(launches.gaps.size() == 1 ? launches.gaps[0]
                                            : fmt::format("the launches of {} steps could not be read, first: {}",
                                                          launches.gaps.size(), launches.gaps[0]));
  }
  size_t live = 0;
  for (const RankLaunches& rank : launches.ranks) {
    for (const std::string& text : rank.live_text) {
      if (++live <= kMost) out.push_back("undecided: " + text);
    }
  }
  if (live > kMost)
    out.push_back(
        fmt::format("undecided: {} more buffers differ and are still there where the recording ends", live - kMost));
  uint64_t paired = 0, single = 0;
  for (const auto& steps : launches.steps) {
    for (const LaunchCounts& counts : steps) {
      if (counts.complete) paired += counts.launches, single += std::max(counts.only_a, counts.only_b);
    }
  }
  if (single > paired)
    out.push_back(fmt::format("the launches of the runs do not line up: {} in one run only, {} in both",
                              grouped(single), grouped(paired)));
  return out;
}

namespace {

// Why that is not called noise: the launch that was first handed it may have filled it, and later steps may read it.
void note_found_buffers(const LaunchScan& launches, std::vector<std::string>* out) {
  constexpr uint64_t kHopperWorkspace = 32u << 20;  // of cuBLAS, as PyTorch allocates it
  uint64_t found = 0, workspaces = 0;
  for (const RankLaunches& rank : launches.ranks) {
    for (const LiveDifference& difference : rank.live) {
      if (!is_found(difference)) continue;
      ++found;
      workspaces += difference.a.bytes == kHopperWorkspace ? 1 : 0;
    }
  }
  if (found == 0) return;
  out->push_back(fmt::format(
      "{} differed when first seen and no launch is known to have changed {} since: it may be memory that nobody "
      "initialised, and a "
      "number among a launch's parameters that happens to point there. With --inputs the recording tells what a launch "
      "found "
      "from what it left{}",
      counted(found, "undecided buffer"), found == 1 ? "it" : "them",
      workspaces == 0
          ? ""
          : "; 32 MiB is the size of PyTorch's cuBLAS workspace, which CUBLAS_WORKSPACE_CONFIG=:0:0 does without"));
}

}  // namespace

std::vector<std::string> launch_notes(const OriginInput& input, const LaunchScan& launches) {
  std::vector<std::string> out;
  std::map<std::string, uint64_t> kernels;
  uint64_t buffers = 0, only_a = 0, only_b = 0;
  for (size_t p = 0; p < launches.ranks.size(); ++p) {
    if (launches.ranks[p].finished) {
      buffers += launches.ranks[p].noise.buffers;
      for (const auto& [kernel, count] : launches.ranks[p].noise.kernels) kernels[short_kernel_name(kernel)] += count;
    }
    for (const LaunchCounts& counts : launches.steps[p]) {
      if (counts.complete) only_a += counts.only_a, only_b += counts.only_b;
    }
  }
  if (buffers > 0) {
    constexpr size_t kMost = 6;
    std::vector<std::string> names;
    for (const auto& [kernel, count] : kernels) {
      if (names.size() < kMost) names.push_back(fmt::format("{} ({})", kernel, counted(count, "launch")));
    }
    if (kernels.size() > kMost) names.push_back(fmt::format("{} more", kernels.size() - kMost));
    out.push_back(
        fmt::format("scratch noise, not counted: {} that a launch left {} and reached nothing that leaves a device{}{}",
                    counted(buffers, "buffer"), buffers == 1 ? "differs" : "differ",
                    names.empty() ? "" : "; it began in ", fmt::join(names, ", ")));
  }
  note_found_buffers(launches, &out);
  for (const auto& [count, which] : {std::pair(only_a, 'A'), std::pair(only_b, 'B')}) {
    if (count > 0)
      out.push_back(fmt::format("run {} has {} that the other run has not{}", which, counted(count, "launch"),
                                first_of_them(input, launches, which == 'B')));
  }
  return out;
}

std::string first_of_them(const OriginInput& input, const LaunchScan& launches, bool in_b) {
  for (size_t p = 0; p < launches.steps.size(); ++p) {
    for (size_t s = 0; s < launches.steps[p].size(); ++s) {
      const LaunchCounts& counts = launches.steps[p][s];
      if (!counts.complete || (in_b ? counts.only_b : counts.only_a) == 0) continue;
      const RankPair& pair = input.alignment.ranks[p];
      try {
        const LaunchJoin join(input.joins.of(p));
        LaunchStep a, b;
        a.read(*pair.a, pair.steps[s].a);
        b.read(*pair.b, pair.steps[s].b);
        const LaunchPairs pairs = pair_launches(join, a, b);
        const LaunchStep& step = in_b ? b : a;
        for (uint32_t i = 0; i < step.size(); ++i) {
          if (!is_work(step.row(i).kind) || pairs.counterpart(in_b, i) != kNoRow) continue;
          return fmt::format(", first rank {}: {}", pair.rank,
                             launch_text(in_b ? *pair.b : *pair.a, in_b ? pair.steps[s].b : pair.steps[s].a, i));
        }
      } catch (const Error&) {
        return {};
      }
    }
  }
  return {};
}

uint64_t differing_launches(const OriginInput& input, const LaunchScan& launches, int64_t first_step,
                            bool in_prologue) {
  uint64_t count = 0;
  for (size_t p = 0; p < launches.steps.size(); ++p) {
    for (size_t s = 0; s < launches.steps[p].size(); ++s) {
      const int64_t step = input.alignment.ranks[p].steps[s].step;
      if (in_prologue || step >= first_step) count += launches.steps[p][s].differing;
    }
  }
  return count;
}

std::string collective_kernels(const OriginInput& input, const Origin& origin) {
  if (origin.step_index == kNoStep) return {};
  const RankPair& pair = input.alignment.ranks[origin.pair];
  const auto in_a = nccl_kernels(*pair.a, pair.steps[origin.step_index].a),
             in_b = nccl_kernels(*pair.b, pair.steps[origin.step_index].b);
  for (size_t i = 0; i < std::max(in_a.size(), in_b.size()); ++i) {
    const std::string left = i < in_a.size() ? in_a[i] : "none", right = i < in_b.size() ? in_b[i] : "none";
    if (left != right)
      return fmt::format("NCCL ran {} in run A and {} in run B: another algorithm or protocol adds in another order",
                         left, right);
  }
  return {};
}

}  // namespace forkpoint
