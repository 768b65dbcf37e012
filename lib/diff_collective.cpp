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

void CollectiveView::add_side(const Run& run, const HashStreamReader& stream, const std::string& communicator,
                              Group* group) const {
  for (const Communicator& entry : stream.communicators()) {
    if (entry.name != communicator) continue;
    const Communicators::Group* joined = run.communicators().find(entry.id);
    if (joined == nullptr) {
      group->ranks.insert(group->ranks.end(), entry.members.begin(), entry.members.end());
      continue;
    }
    const std::vector<int> ranks = joined->ranks();
    group->ranks.insert(group->ranks.end(), ranks.begin(), ranks.end());
    if (&run == &in_.run_a || group->joined == nullptr) group->joined = joined, group->id = entry.id;
    if (group->own_place < 0 || entry.own_rank < group->own_place) group->own_place = entry.own_rank;
  }
}

CollectiveView::Group CollectiveView::make_group(size_t pair, const std::string& communicator) const {
  Group group;
  add_side(in_.run_b, *in_.alignment.ranks[pair].b, communicator, &group);
  add_side(in_.run_a, *in_.alignment.ranks[pair].a, communicator, &group);
  if (group.ranks.empty()) {  // not in the table: any rank may be a member
    for (int rank = 0; rank < in_.run_a.world_size(); ++rank) group.ranks.push_back(rank);
  }
  std::sort(group.ranks.begin(), group.ranks.end());
  group.ranks.erase(std::unique(group.ranks.begin(), group.ranks.end()), group.ranks.end());
  if (group.joined == nullptr) return group;
  // Members that the name has in one run only: it does not mean the same in both.
  group.whole = group.joined->whole && group.joined->ranks() == group.ranks;
  const auto& members = group.joined->members;
  const auto unknown = std::count(members.begin(), members.end(), Communicators::kUnknown);
  std::vector<int> outside, unseen;
  for (int rank = 0; unknown > 0 && rank < in_.run_a.world_size(); ++rank) {
    if (std::binary_search(group.ranks.begin(), group.ranks.end(), rank)) continue;
    outside.push_back(rank);
    if (pair_of_rank_.count(rank) == 0) unseen.push_back(rank);
  }
  for (const auto* candidates : {&unseen, &outside}) {
    if (group.unnamed.empty() && std::ssize(*candidates) == unknown) group.unnamed = *candidates;
  }
  return group;
}

const CollectiveView::Group& CollectiveView::group_of(size_t pair, const Site& site) {
  const auto [at, fresh] = groups_.try_emplace({pair, site.communicator});
  if (fresh) at->second = make_group(pair, site.communicator);
  return at->second;
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

const CollectiveView::Uses* CollectiveView::uses_of(size_t pair) {
  const RankStep* step = step_of(pair);
  if (step == nullptr) return nullptr;
  const auto [at, fresh] = uses_.try_emplace(pair);
  Uses& uses = at->second;
  if (!fresh) return &uses;
  for (const CollectiveUse& use : step->collectives) {
    uses.named[{use.op, use.micro_step, use.call}].push_back(&use);
    const Site& site = in_.joins.of(pair).site(use.site);
    const Digest& id = group_of(pair, site).id;
    if (id == Digest{}) continue;
    auto& same = uses.ordered[{id.a, id.b, site.op}];
    uses.ordinal[&use] = same.size();
    same.push_back(&use);
  }
  return &uses;
}

const std::vector<const CollectiveUse*>* CollectiveView::calls_of(size_t pair, const Ordered& key) {
  const Uses* uses = uses_of(pair);
  if (uses == nullptr) return nullptr;
  const auto calls = uses->ordered.find(key);
  return calls == uses->ordered.end() ? nullptr : &calls->second;
}

// Every member that was seen issued equally many of these calls: only then are the n-th ones one collective.
bool CollectiveView::in_step(const Ordered& key, const Group& group) {
  const auto [at, fresh] = in_step_.try_emplace(key, true);
  if (!fresh) return at->second;
  std::optional<size_t> count;
  bool all = true;
  for (const int rank : group.ranks) {
    const auto found = pair_of_rank_.find(rank);
    const auto* calls = found == pair_of_rank_.end() ? nullptr : calls_of(found->second, key);
    if (calls == nullptr) continue;
    all &= !count || *count == calls->size();
    count = calls->size();
  }
  return in_step_[key] = all;
}

std::vector<CollectiveView::Member> CollectiveView::find_members(
    const Group& group, const std::function<const CollectiveUse*(size_t pair)>& find) {
  std::vector<Member> members;
  for (const int rank : group.ranks) {
    Member member;
    member.rank = rank;
    const auto found = pair_of_rank_.find(rank);
    if (found != pair_of_rank_.end() && step_of(found->second) != nullptr) {
      member.pair = found->second;
      member.use = find(found->second);
    }
    members.push_back(member);
  }
  return members;
}

// Asked for by every member in turn, so found once.
const std::vector<CollectiveView::Member>& CollectiveView::members(size_t pair, const CollectiveUse& use) {
  const Site& site = in_.joins.of(pair).site(use.site);
  const Group& group = group_of(pair, site);
  const Ordered order{group.id.a, group.id.b, site.op};
  if (!(group.id == Digest{}) && in_step(order, group)) {
    const size_t ordinal = uses_of(pair)->ordinal.at(&use);
    const auto [at, fresh] = ordered_instances_.try_emplace({order, ordinal});
    if (!fresh) return at->second;
    return at->second = find_members(group, [&](size_t other) {
             const auto* calls = calls_of(other, order);
             return calls != nullptr && ordinal < calls->size() ? (*calls)[ordinal] : nullptr;
           });
  }
  const auto [at, fresh] = instances_.try_emplace({use.op, use.micro_step, use.call, group.ranks});
  if (!fresh) return at->second;
  return at->second = find_members(group, [&](size_t other) {
           const CollectiveUse* last = nullptr;
           const auto& named = uses_of(other)->named;
           const auto calls = named.find({use.op, use.micro_step, use.call});
           if (calls == named.end()) return last;
           for (const CollectiveUse* candidate : calls->second) {
             const Group& theirs = group_of(other, in_.joins.of(other).site(candidate->site));
             if (theirs.ranks == group.ranks && theirs.id == group.id) last = candidate;
           }
           return last;
         });
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
  for (const int rank : group_of(pair, site).ranks) {
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

// What was received in `use` under the site `received`: the sender's n-th send to this place for the n-th receive from
// it. Empty: not known, for want of the communicator's id or of a peer in the tensor's name.
std::optional<CollectiveView::Sent> CollectiveView::sent_to(size_t pair, const CollectiveUse& use,
                                                            const Site& received) {
  const Group& group = group_of(pair, received);
  const CalledTensor output = called_tensor(received.tensor);
  if (group.joined == nullptr || output.peer < 0) return {};
  const int own_place = output.place >= 0 ? output.place : group.own_place;
  const int rank = group.joined->rank_at(output.peer);
  const auto found = pair_of_rank_.find(rank);
  if (found == pair_of_rank_.end()) return {};

  size_t earlier = 0;
  for (const CollectiveUse* other : *calls_of(pair, {group.id.a, group.id.b, received.op})) {
    if (other == &use) break;
    for (const auto& part : other->outputs) earlier += in_.joins.of(pair).site(part.site).tensor == received.tensor;
  }
  Sent sent;
  sent.rank = rank;
  const auto* sends = calls_of(found->second, {group.id.a, group.id.b, "send"});
  if (sends == nullptr) return sent;
  for (const CollectiveUse* send : *sends) {
    for (const auto& part : send->inputs) {
      const Site& site = in_.joins.of(found->second).site(part.site);
      const CalledTensor input = called_tensor(site.tensor);
      const int place = input.place >= 0 ? input.place : group_of(found->second, site).own_place;
      if (place != output.peer || input.peer != own_place) continue;
      if (earlier-- == 0) {
        sent.part = &part;
        return sent;
      }
    }
  }
  return sent;
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
    if (sources.empty() && name_holds(used.op, "recv")) {
      const auto sent = is_first ? sent_to(pair, use, site) : std::nullopt;
      if (!sent || sent->part == nullptr) sources = differing_senders(pair, used);
      else if (sent->part->differs) sources = {sent->rank};
    }
    sources.erase(std::remove(sources.begin(), sources.end(), in_.alignment.ranks[pair].rank), sources.end());
    if (!sources.empty()) return Reached{via_text(used), sources};
  }
  return {};
}

// Outputs of a member that are to it what `output` is to the caller.
std::vector<const CollectiveUse::Part*> CollectiveView::outputs_like(size_t pair, const CollectiveUse& own,
                                                                     const Member& member, const Site& output) {
  std::vector<const CollectiveUse::Part*> like;
  if (member.use == nullptr) return like;
  const StreamJoin& join = in_.joins.of(member.pair);
  if (group_of(pair, output).id == Digest{}) {
    const StreamJoin& own_join = in_.joins.of(pair);
    for (const auto& part : own.outputs) {
      if (!(own_join.site(part.site) == output)) continue;
      like.push_back(part_of(join, member.use->outputs, own_join.key(part.site)));
    }
    std::erase(like, nullptr);
    return like;
  }
  const std::string base = called_tensor(output.tensor).base;
  for (const auto& part : member.use->outputs) {
    if (called_tensor(join.site(part.site).tensor).base == base) like.push_back(&part);
  }
  return like;
}

void CollectiveView::judge_outputs(const CollectiveUse& own, const std::vector<Member>& all, Origin* origin) {
  const StreamJoin& join = in_.joins.of(origin->pair);
  const Site& site = join.site(origin->difference.site);
  const CollectiveUse::Part* own_output = part_of(join, own.outputs, join.key(origin->difference.site));
  bool any_input = false, all_differ = true, agree_a = true, agree_b = true, all_outputs = true;
  size_t outputs = 0;
  for (const Member& member : all) {
    origin->members.push_back(member.rank);
    const bool known = member.use != nullptr && member.use->has_input && !member.use->one_sided;
    any_input |= known;
    if (!known && (member.use == nullptr || member.use->one_sided || !one_source(site.op))) {
      origin->unknown_members.push_back(member.rank);
    }
    const auto like = outputs_like(origin->pair, own, member, site);
    all_outputs &= !like.empty();
    outputs += like.size();
    for (const CollectiveUse::Part* output : like) {
      all_differ &= output->differs;
      agree_a &= output->a == own_output->a;
      agree_b &= output->b == own_output->b;
    }
  }
  const Group& group = group_of(origin->pair, site);
  origin->unknown_members.insert(origin->unknown_members.end(), group.unnamed.begin(), group.unnamed.end());
  std::sort(origin->unknown_members.begin(), origin->unknown_members.end());
  origin->judged = origin->unknown_members.empty() && group.whole && any_input;
  origin->outputs_agree_a = leaves_replicas(site.op) && all_outputs && agree_a;
  origin->outputs_disagree_b = origin->outputs_agree_a && !agree_b;
  origin->alike = all_outputs && all_differ && outputs > 1 && !origin->outputs_disagree_b;
  for (const CollectiveUse::Part& input : own.inputs) {
    const std::string& tensor = join.site(input.site).tensor;
    const bool same_place = !(group.id == Digest{}) && called_tensor(tensor).base == "input" &&
                            called_tensor(tensor).place == called_tensor(site.tensor).place;
    const bool same_tensor = tensor == site.tensor || own.inputs.size() == 1 || same_place;
    origin->keeps_own_input |= same_tensor && own_output->b == input.b && own_output->a != input.b;
  }
}

// Between two members: nobody else's input counts.
void CollectiveView::judge_receive(const CollectiveUse& own, Origin* origin) {
  const Site& site = in_.joins.of(origin->pair).site(origin->difference.site);
  const auto sent = sent_to(origin->pair, own, site);
  origin->judged = sent && sent->part != nullptr;
  if (!sent) return;
  origin->members = {origin->ranks[0], sent->rank};
  std::sort(origin->members.begin(), origin->members.end());
  origin->members.erase(std::unique(origin->members.begin(), origin->members.end()), origin->members.end());
  origin->unknown_members.clear();
  if (!origin->judged) origin->unknown_members = {sent->rank};
  origin->alike = origin->outputs_agree_a = origin->outputs_disagree_b = origin->keeps_own_input = false;
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
  if (own == nullptr || part_of(join, own->outputs, join.key(origin->difference.site)) == nullptr) return;
  judge_outputs(*own, members(origin->pair, *own), origin);
  if (name_holds(site.op, "recv")) return judge_receive(*own, origin);
  const Digest& id = group_of(origin->pair, site).id;
  if (id == Digest{} || !in_step({id.a, id.b, site.op}, group_of(origin->pair, site))) return;
  Site everywhere;  // what is equal on all members
  everywhere.layer = fmt::format("{:x} {:x} {}", id.a, id.b, uses_of(origin->pair)->ordinal.at(own));
  everywhere.op = site.op, everywhere.tensor = called_tensor(site.tensor).base;
  origin->instance = site_key(everywhere);
}

}  // namespace forkpoint
