#include "lib/replica_groups.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "lib/diff_collective.h"

namespace forkpoint {
namespace {

enum class Axis : uint8_t { none, data, cut, stage };

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

template <size_t N>
bool one_of(std::string_view text, const std::array<std::string_view, N>& names) {
  return std::find(names.begin(), names.end(), text) != names.end();
}

bool is_data_axis(std::string_view axis) {
  static constexpr std::array<std::string_view, 13> kData = {"dp",
                                                             "ddp",
                                                             "data",
                                                             "data_parallel",
                                                             "replicate",
                                                             "dp_replicate",
                                                             "cp",
                                                             "context",
                                                             "context_parallel",
                                                             "dp_cp",
                                                             "edp",
                                                             "expert_data_parallel",
                                                             "replica"};
  return one_of(axis, kData);
}

// "tp" of "tp_rank": what ranks that differ in it share.
Axis axis_of(std::string_view fact) {
  static constexpr std::array<std::string_view, 6> kNone = {"global", "local", "node", "group", "world", "host"};
  static constexpr std::array<std::string_view, 13> kCut = {"tp",
                                                            "sp",
                                                            "etp",
                                                            "mp",
                                                            "tensor",
                                                            "tensor_parallel",
                                                            "tensor_model_parallel",
                                                            "sequence_parallel",
                                                            "model_parallel",
                                                            "fsdp",
                                                            "shard",
                                                            "dp_shard",
                                                            "hsdp"};
  if (!fact.ends_with("_rank")) return Axis::none;
  const std::string_view axis = fact.substr(0, fact.size() - 5);
  if (one_of(axis, kNone)) return Axis::none;
  if (is_data_axis(axis)) return Axis::data;
  return one_of(axis, kCut) ? Axis::cut : Axis::stage;
}

// A number for each distinct text, in order of appearance.
int number_of(std::map<std::string, int>* numbers, const std::string& text) {
  return numbers->try_emplace(text, static_cast<int>(numbers->size())).first->second;
}

bool covers(const std::vector<int>& members, const std::vector<int>& ranks) {
  return std::includes(members.begin(), members.end(), ranks.begin(), ranks.end());
}

bool exchanges_parts(const Site& site) {
  const std::string op = lower(site.op);
  if (leaves_replicas(site.op) && op.find("gather") == op.npos) return false;
  return op.find("barrier") == op.npos;
}

}  // namespace

std::vector<int> member_ranks(const Run& run, const HashStreamReader& stream, const std::string& communicator) {
  std::vector<int> ranks;
  for (const Communicator& entry : stream.communicators()) {
    if (entry.name != communicator) continue;
    const Communicators::Group* joined = run.communicators().find(entry.id);
    if (joined != nullptr && !joined->whole) return {};
    const std::vector<int> members = joined != nullptr ? joined->ranks() : entry.members;
    ranks.insert(ranks.end(), members.begin(), members.end());
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

bool names_expert(const Site& site) {
  return lower(site.layer + "." + site.tensor).find("expert") != std::string::npos;
}

bool names_norm(const Site& site) {
  const std::string name = "." + lower(site.layer);
  const size_t dot = name.rfind('.');
  const std::string_view last = std::string_view(name).substr(dot + 1);
  return last.find("norm") != last.npos || last.starts_with("ln") || last.starts_with("rms");
}

std::string parameter_of(const Site& site) {
  static constexpr std::array<std::string_view, 9> kSuffixes = {
      ".grad", ".main_grad", ".exp_avg",   ".exp_avg_sq", ".max_exp_avg_sq", ".momentum_buffer",
      ".step", ".sum",       ".square_avg"};
  for (const std::string_view suffix : kSuffixes) {
    if (site.tensor.ends_with(suffix)) return site.tensor.substr(0, site.tensor.size() - suffix.size());
  }
  return site.tensor;
}

ReplicaGroups::ReplicaGroups(const Run& run) : places_(run.streams().size()) {
  place_by_coordinates(run);
  if (!known_) place_by_communicator(run);
  read_sites(run);
}

void ReplicaGroups::place_by_coordinates(const Run& run) {
  std::map<std::string, std::set<std::string>> values;  // of each coordinate, over the ranks
  for (const auto& stream : run.streams()) {
    for (const auto& [fact, value] : stream->header().facts) {
      if (axis_of(fact) != Axis::none) values[fact].insert(value);
    }
  }
  if (values.empty()) return;
  known_ = true, plain_ = false;
  std::map<std::string, int> stages, groups;
  for (size_t s = 0; s < run.streams().size(); ++s) {
    std::map<std::string, std::string> facts(run.streams()[s]->header().facts.begin(),
                                             run.streams()[s]->header().facts.end());
    std::string stage, group;
    for (const auto& [fact, all] : values) {
      // A rank that did not tell a coordinate that others have is nobody's replica as far as is known.
      const std::string text = fact + "=" + (facts.contains(fact) ? facts[fact] : fmt::format("?{}", s)) + ";";
      if (axis_of(fact) == Axis::stage || !facts.contains(fact)) stage += text;
      if (axis_of(fact) != Axis::data) group += text;
      if (axis_of(fact) == Axis::stage && all.size() > 1) stage_names_.insert(fact);
    }
    places_[s] = {number_of(&stages, stage), number_of(&groups, group)};
  }
  stages_ = static_cast<int>(stages.size());
  std::vector<std::string> names;
  for (const auto& [fact, all] : values) names.push_back(fact);
  source_ = fmt::format("{}", fmt::join(names, ", "));
}

// A communicator that is called what people call the data-parallel one.
void ReplicaGroups::place_by_communicator(const Run& run) {
  std::map<std::string, int> groups;
  std::vector<std::string> of_stream(run.streams().size());
  for (size_t s = 0; s < run.streams().size(); ++s) {
    const HashStreamReader& stream = *run.streams()[s];
    for (const Communicator& entry : stream.communicators()) {
      const std::vector<int> ranks = member_ranks(run, stream, entry.name);
      if (ranks.empty()) continue;
      if (ranks.size() > 1 && static_cast<int>(ranks.size()) < run.world_size()) plain_ = false;
      if (!is_data_axis(lower(entry.name))) continue;
      if (of_stream[s].empty()) of_stream[s] = fmt::format("{}", fmt::join(ranks, ","));
      source_ = fmt::format("communicator {}", entry.name);
    }
  }
  if (std::any_of(of_stream.begin(), of_stream.end(), [](const std::string& text) { return text.empty(); })) {
    source_.clear();
    return;
  }
  known_ = true;
  // What ranks of other groups share is not known: tensor-parallel ranks some, pipeline stages nothing.
  for (size_t s = 0; s < of_stream.size(); ++s) {
    const int group = number_of(&groups, of_stream[s]);
    places_[s] = {group, group};
  }
  stages_ = static_cast<int>(groups.size());
  if (stages_ > 1) stage_names_.insert("another " + source_);
}

void ReplicaGroups::read_sites(const Run& run) {
  for (const auto& stream : run.streams()) {
    for (const Layout& layout : stream->layouts()) has_shards_ |= layout.is_shard();
    for (const Site& site : stream->sites()) {
      if (site.kind != Kind::collective || site.op.empty()) continue;
      if (exchanges_parts(site)) plain_ = false;
      if (!is_reduction(site.op) || !leaves_replicas(site.op) || site.layer.empty()) continue;
      const std::vector<int> members = member_ranks(run, *stream, site.communicator);
      if (members.size() > 1) reduced_[{site.layer, parameter_of(site)}].insert(members);
    }
  }
  if (has_shards_) plain_ = false;
}

bool ReplicaGroups::reduced_over(const std::string& layer, const std::string& parameter,
                                 const std::vector<int>& ranks) const {
  const auto found = reduced_.find({layer, parameter});
  return found != reduced_.end() && std::any_of(found->second.begin(), found->second.end(),
                                                [&](const auto& members) { return covers(members, ranks); });
}

std::string ReplicaGroups::stage_note() const {
  if (stages_ < 2 || stage_names_.empty()) return {};
  return fmt::format("ranks of {} are not compared with each other: they may hold other tensors under the same names",
                     fmt::join(stage_names_, ", or of another "));
}

}  // namespace forkpoint
