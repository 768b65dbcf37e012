#include "lib/diff_collective.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "lib/error.h"

namespace forkpoint {
namespace {

std::string plain_name(const std::string& op) {
  std::string plain;
  for (const char c : op) {
    if (std::isalpha(static_cast<unsigned char>(c)))
      plain += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return plain;
}

bool name_holds(const std::string& op, const char* part) { return plain_name(op).find(part) != std::string::npos; }

// Where one member's data goes to the others, the other members' buffers before the call mean nothing.
bool one_source(const std::string& op) {
  return name_holds(op, "broadcast") || (name_holds(op, "scatter") && !is_reduction(op));
}

const CollectiveUse::Part* part_of(const StreamJoin& join, const std::vector<CollectiveUse::Part>& parts,
                                   const Digest& key) {
  for (const CollectiveUse::Part& part : parts) {
    if (join.key(part.site) == key) return &part;
  }
  return nullptr;
}

}  // namespace

bool is_reduction(const std::string& op) { return name_holds(op, "reduce"); }

bool leaves_replicas(const std::string& op) {
  return name_holds(op, "allreduce") || name_holds(op, "allgather") || name_holds(op, "broadcast");
}

CollectiveView::CollectiveView(const OriginInput& input, std::pair<int64_t, int> step, Analyse analyse)
    : in_(input), step_(step), analyse_(std::move(analyse)) {
  for (size_t p = 0; p < in_.alignment.ranks.size(); ++p) pair_of_rank_[in_.alignment.ranks[p].rank] = p;
}

const std::vector<int>& CollectiveView::members_of(size_t pair, const Site& site) {
  const auto [at, fresh] = members_of_.try_emplace({pair, site.communicator});
  std::vector<int>& members = at->second;
  if (!fresh) return members;
  for (const HashStreamReader* stream : {in_.alignment.ranks[pair].a, in_.alignment.ranks[pair].b}) {
    for (const Communicator& communicator : stream->communicators()) {
      if (communicator.name == site.communicator) {
        members.insert(members.end(), communicator.members.begin(), communicator.members.end());
      }
    }
  }
  if (members.empty()) {  // not in the table: any rank may be a member
    for (int rank = 0; rank < in_.run_a.world_size(); ++rank) members.push_back(rank);
  }
  std::sort(members.begin(), members.end());
  members.erase(std::unique(members.begin(), members.end()), members.end());
  return members;
}

const RankStep* CollectiveView::step_of(size_t pair) {
  if (const auto known = steps_.find(pair); known != steps_.end()) return known->second;
  auto [at, fresh] = loaded_.try_emplace(pair);
  if (fresh) {
    const auto& steps = in_.alignment.ranks[pair].steps;
    for (size_t s = 0; s < steps.size(); ++s) {
      if (std::pair(steps[s].step, steps[s].occurrence) != step_ || in_.scan.steps[pair][s].unread) continue;
      try {
        at->second = analyse_(pair, s);
      } catch (const Error&) {  // damaged: then its inputs are not known
      }
    }
  }
  return at->second ? &*at->second : nullptr;
}

// Asked for by every member in turn, so found once.
const std::vector<CollectiveView::Member>& CollectiveView::members(size_t pair, const CollectiveUse& use) {
  const std::vector<int>& ranks = members_of(pair, in_.joins.of(pair).site(use.site));
  const auto [at, fresh] = instances_.try_emplace({use.op, use.micro_step, use.call, ranks});
  if (!fresh) return at->second;
  for (const int rank : ranks) {
    Member member;
    member.rank = rank;
    const auto found = pair_of_rank_.find(rank);
    const RankStep* step = found == pair_of_rank_.end() ? nullptr : step_of(found->second);
    if (step != nullptr) {
      member.pair = found->second;
      auto [uses, unindexed] = uses_.try_emplace(found->second);
      if (unindexed) {
        for (const CollectiveUse& other : step->collectives) {
          uses->second[{other.op, other.micro_step, other.call}].push_back(&other);
        }
      }
      for (const CollectiveUse* other : uses->second[{use.op, use.micro_step, use.call}]) {
        if (members_of(found->second, in_.joins.of(found->second).site(other->site)) == ranks) member.use = other;
      }
    }
    at->second.push_back(member);
  }
  return at->second;
}

std::vector<int> CollectiveView::differing_inputs(size_t pair, const CollectiveUse& use) {
  std::vector<int> ranks;
  for (const Member& member : members(pair, use)) {
    if (member.use != nullptr && member.use->input_differs) ranks.push_back(member.rank);
  }
  return ranks;
}

// A receive and the send that fed it are two sites; a differing send to the same group is taken for the source.
std::vector<int> CollectiveView::differing_senders(size_t pair, const Site& site) {
  std::vector<int> ranks;
  for (const int rank : members_of(pair, site)) {
    const auto found = pair_of_rank_.find(rank);
    if (found == pair_of_rank_.end() || found->second == pair) continue;
    const RankStep* step = step_of(found->second);
    if (step == nullptr) continue;
    const StreamJoin& join = in_.joins.of(found->second);
    for (const CollectiveUse& use : step->collectives) {
      const Site& other = join.site(use.site);
      if (use.input_differs && name_holds(other.op, "send") && other.communicator == site.communicator) {
        ranks.push_back(rank);
        break;
      }
    }
  }
  return ranks;
}

std::string CollectiveView::via_text(const Site& site) const {
  return site.layer.empty() ? site.op : fmt::format("{} of {}", site.op, site.layer);
}

std::optional<CollectiveView::Reached> CollectiveView::reached_through(size_t pair, const RankStep& step,
                                                                        const Difference& first) {
  const StreamJoin& join = in_.joins.of(pair);
  const Site& site = join.site(first.site);
  for (const CollectiveUse& use : step.collectives) {
    const bool is_first = site.kind == Kind::collective && site.role == Role::output && join.op(first.site) == use.op &&
                          first.micro_step == use.micro_step && first.call == use.call;
    // A collective before, whose result was not recorded here, may have brought the difference in unseen.
    const Site& used = join.site(use.site);
    const bool unseen = use.first_row < first.row_a && !use.has_output && !name_holds(used.op, "send");
    if (!is_first && !unseen) continue;
    std::vector<int> sources = differing_inputs(pair, use);
    if (sources.empty() && name_holds(used.op, "recv")) sources = differing_senders(pair, used);
    sources.erase(std::remove(sources.begin(), sources.end(), in_.alignment.ranks[pair].rank), sources.end());
    if (!sources.empty()) return Reached{via_text(used), sources};
  }
  return {};
}

void CollectiveView::judge(Origin* origin) {
  const StreamJoin& join = in_.joins.of(origin->pair);
  const Site& site = join.site(origin->difference.site);
  if (site.kind != Kind::collective || site.role != Role::output) return;
  origin->collective_output = true;
  const RankStep* step = step_of(origin->pair);
  const CollectiveUse* own = nullptr;
  for (const CollectiveUse& use : step->collectives) {
    if (use.op == join.op(origin->difference.site) && use.micro_step == origin->difference.micro_step &&
        use.call == origin->difference.call) {
      own = &use;
    }
  }
  if (own == nullptr) return;
  const auto all = members(origin->pair, *own);
  const CollectiveUse::Part* own_output = part_of(join, own->outputs, join.key(origin->difference.site));
  if (own_output == nullptr) return;
  bool any_input = false, all_differ = all.size() > 1, agree_a = true, agree_b = true, all_outputs = true;
  for (const Member& member : all) {
    origin->members.push_back(member.rank);
    const bool known = member.use != nullptr && member.use->has_input && !member.use->one_sided;
    any_input |= known;
    if (!known && (member.use == nullptr || member.use->one_sided || !one_source(site.op))) {
      origin->unknown_members.push_back(member.rank);
    }
    const CollectiveUse::Part* output =
        member.use == nullptr ? nullptr
                              : part_of(in_.joins.of(member.pair), member.use->outputs, join.key(own_output->site));
    all_outputs &= output != nullptr;
    if (output == nullptr) continue;
    all_differ &= output->differs;
    agree_a &= output->a == own_output->a;
    agree_b &= output->b == own_output->b;
  }
  origin->judged = origin->unknown_members.empty() && any_input;
  const bool receives = name_holds(site.op, "recv");
  if (receives) origin->judged = false;
  const bool replicas = leaves_replicas(site.op);
  origin->outputs_agree_a = replicas && all_outputs && agree_a;
  origin->outputs_disagree_b = origin->outputs_agree_a && !agree_b;
  origin->alike = all_outputs && all_differ && !origin->outputs_disagree_b;
  for (const CollectiveUse::Part& input : own->inputs) {
    const bool same_tensor = join.site(input.site).tensor == site.tensor || own->inputs.size() == 1;
    origin->keeps_own_input |= same_tensor && own_output->b == input.b && own_output->a != input.b;
  }
}

}  // namespace forkpoint
