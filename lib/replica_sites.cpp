// What is held against each other, and who is not of the majority.
#include <algorithm>
#include <map>

#include "lib/diff_collective.h"
#include "lib/replica_scan.h"

namespace forkpoint {
namespace {

// Values that a training keeps alike on its replicas between steps, and what collectives leave alike. Not a layer's
// inputs, which are of each rank's own batch, nor gradients before they are reduced, nor generators. masked: names say
// nothing, neither which buffers are running statistics nor what a collective does.
bool is_compared(const Site& site, bool masked) {
  if (site.kind == Kind::collective) return site.role == Role::output && leaves_replicas(site.op);
  const bool between = site.phase == Phase::load || site.phase == Phase::optimizer || site.phase == Phase::state;
  if (!between) return false;
  switch (site.role) {
    case Role::parameter:
    case Role::optimizer_state:
      return true;
    case Role::gradient:
      return site.phase != Phase::load;  // as the optimizer consumes it
    case Role::other: {  // buffers; running statistics are of each rank's own batches until they are sent around
      return !masked && site.kind == Kind::tensor && site.tensor.find("running_") == std::string::npos;
    }
    default:
      return false;
  }
}

}  // namespace

std::vector<int> outliers_of(const std::vector<ReplicaPiece>& pieces, bool* majority) {
  std::map<std::tuple<uint64_t, uint64_t>, std::vector<int>> classes;
  for (const ReplicaPiece& piece : pieces) classes[{piece.digest.a, piece.digest.b}].push_back(piece.rank);
  const std::vector<int>* largest = nullptr;
  bool alone = false;
  for (const auto& [digest, ranks] : classes) {
    if (largest != nullptr && ranks.size() == largest->size()) alone = false;
    if (largest == nullptr || ranks.size() > largest->size()) largest = &ranks, alone = true;
  }
  if (majority != nullptr) *majority = alone;
  std::vector<int> out;
  for (const ReplicaPiece& piece : pieces) {
    if (!alone || std::find(largest->begin(), largest->end(), piece.rank) == largest->end()) out.push_back(piece.rank);
  }
  std::sort(out.begin(), out.end());
  return out;
}

ReplicaSites replica_sites(const Run& run) {
  ReplicaSites sites;
  sites.masked = run.manifest().names_masked;
  std::map<std::pair<uint64_t, uint64_t>, uint32_t> numbers;
  std::map<std::pair<std::string, std::string>, uint32_t> names;
  const auto name_of = [&](const std::string& layer, const std::string& tensor) {
    return names.try_emplace({layer, tensor}, static_cast<uint32_t>(names.size())).first->second;
  };
  for (size_t s = 0; s < run.streams().size(); ++s) {
    const HashStreamReader& stream = *run.streams()[s];
    sites.of_stream.emplace_back(stream.sites().size(), kNoRow);
    for (uint32_t id = 0; id < stream.sites().size(); ++id) {
      const Site& site = stream.sites()[id];
      if (!is_compared(site, run.manifest().names_masked)) continue;
      const Digest& key = stream.site_keys()[id];
      const auto [at, fresh] = numbers.try_emplace({key.a, key.b}, static_cast<uint32_t>(sites.entries.size()));
      sites.of_stream[s][id] = at->second;
      if (fresh) {
        const uint32_t parameter = name_of(site.layer, parameter_of(site));
        sites.entries.push_back(
            {&site, key, site.kind == Kind::collective, name_of(site.layer, site.tensor), parameter});
        sites.members.emplace_back(run.streams().size());
      }
      if (site.kind == Kind::collective) sites.members[at->second][s] = member_ranks(run, stream, site.communicator);
    }
  }
  sites.names = static_cast<uint32_t>(names.size());
  return sites;
}

}  // namespace forkpoint
