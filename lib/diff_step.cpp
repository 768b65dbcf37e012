#include "lib/diff_step.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

bool is_source(const Site& site) {
  return site.role == Role::batch || site.role == Role::rng || site.role == Role::sampler || is_hyperparameter(site);
}

// The matched records of a step, and the questions that need all of them.
class StepView {
 public:
  StepView(const StreamJoin& join, const StepColumns& a, const StepColumns& b, const StepPair& step,
           const RecordKeys& assembled, MatchScratch* scratch)
      : join_(join), a_(a), b_(b), partner_(a.size(), kNoRow), same_(a.size(), Same::equal) {
    std::vector<Unequal> unequal;
    relaid_ = match_relaid(join, a, b, step, scratch, &unequal, [&](uint32_t i, uint32_t j) { partner_[i] = j; });
    for (const Unequal& pair : unequal) add(pair, assembled);
    for (const RelaidGroup& group : relaid_.groups) add(group.input), add(group.output);
    if (!relaid_.groups.empty()) std::sort(differences_.begin(), differences_.end());
  }

  const std::vector<uint32_t>& differences() const { return differences_; }
  std::optional<uint32_t> first_eval() const { return first_eval_; }
  size_t size() const { return a_.size(); }
  const Site& site(uint32_t row) const { return join_.site(a_.site[row]); }
  bool matched(uint32_t row) const { return partner_[row] != kNoRow; }
  bool differs(uint32_t row) const { return is_difference(same_[row]); }
  bool agrees(uint32_t row) const {
    return matched(row) && (same_[row] == Same::equal || same_[row] == Same::relabelled);
  }
  bool regrouped(uint32_t row) const { return same_[row] == Same::regrouped; }
  // Of a message that is laid out anew: all of them together; nullptr: the row is compared by itself.
  const RelaidSide* relaid(uint32_t row) const {
    const auto found = sides_.find(row);
    return found == sides_.end() ? nullptr : found->second;
  }
  bool in_relaid_family(uint32_t row) const {
    return !relaid_.families.empty() &&
           relaid_.families.count({join_.op(a_.site[row]), a_.micro_step[row],
                                   static_cast<uint8_t>(a_.flags[row] & kClassFlags)}) != 0;
  }
  uint32_t call(uint32_t row) const { return in_relaid_family(row) ? 0 : a_.call[row]; }
  uint32_t call_of_b(uint32_t row) const {
    const RelaidFamily family{join_.op(join_.site_of_b(b_.site[row])), b_.micro_step[row],
                              static_cast<uint8_t>(b_.flags[row] & kClassFlags)};
    return !relaid_.families.empty() && relaid_.families.count(family) != 0 ? 0 : b_.call[row];
  }
  bool training(uint32_t row) const { return (a_.flags[row] & kRecordEval) == 0; }
  bool counts(uint32_t row) const { return (a_.flags[row] & (kRecordEval | kRecordSetUp)) == 0; }
  int32_t micro_step(uint32_t row) const { return a_.micro_step[row]; }

  bool same_instance(uint32_t left, uint32_t right) const {
    return a_.micro_step[left] == a_.micro_step[right] && call(left) == call(right) &&
           join_.op(a_.site[left]) == join_.op(a_.site[right]) &&
           ((a_.flags[left] ^ a_.flags[right]) & kClassFlags) == 0;
  }
  // Rows of the op instance of `row`, itself included.
  const std::vector<uint32_t>& instance(uint32_t row) {
    if (instances_.empty()) {
      for (uint32_t i = 0; i < a_.size(); ++i) {
        if ((a_.flags[i] & kRecordSetUp) == 0) instances_[instance_hash(i)].push_back(i);
      }
    }
    return instances_[instance_hash(row)];
  }
  bool in_b_only(uint32_t row) const {  // B has a record of this op instance that A lacks
    return std::any_of(only_b_.begin(), only_b_.end(), [&](uint32_t j) {
      return b_.micro_step[j] == a_.micro_step[row] && call_of_b(j) == call(row) &&
             join_.op(join_.site_of_b(b_.site[j])) == join_.op(a_.site[row]);
    });
  }
  // Inputs of the op instance were recorded in both runs and every one of them agrees.
  bool inputs_agree(uint32_t row) {
    bool any = false;
    for (const uint32_t i : instance(row)) {
      if (!same_instance(i, row) || !is_op_input(site(i))) continue;
      const RelaidSide* side = relaid(i);
      if (side != nullptr ? !side->same() : !agrees(i)) return false;
      any = true;
    }
    return any && !in_b_only(row);
  }

  Difference difference(uint32_t i) const {
    const uint32_t j = partner_[i];
    Difference out{i, j, a_.site[i], a_.micro_step[i], call(i), a_.flags[i], same_[i], a_.layout[i], b_.layout[j],
                   a_.digest[i], b_.digest[j], {a_.absmax[i], a_.nonfinite[i], a_.word_sum[i]},
                   {b_.absmax[j], b_.nonfinite[j], b_.word_sum[j]}};
    if (const RelaidSide* side = relaid(i)) {
      out.digest_a = side->sums_a.digest, out.digest_b = side->sums_b.digest;
      out.stats_a = side->sums_a.stats, out.stats_b = side->sums_b.stats;
    }
    return out;
  }
  const StepColumns& a() const { return a_; }
  const StepColumns& b() const { return b_; }
  const StreamJoin& join() const { return join_; }
  uint32_t partner(uint32_t row) const { return partner_[row]; }
  const std::vector<uint32_t>& only_b() const { return only_b_; }

 private:
  void add(const Unequal& pair, const RecordKeys& assembled) {
    const uint32_t i = pair.a;
    if (i == kNoRow) only_b_.push_back(pair.b);
    if (i == kNoRow || pair.b == kNoRow) return;
    partner_[i] = pair.b;
    same_[i] = pair.same;
    if (pair.same == Same::resharded && !assembled.empty() && assembled.count(key_of(i)) != 0) same_[i] = Same::value;
    if (!is_difference(same_[i])) return;
    if ((a_.flags[i] & kRecordEval) == 0) differences_.push_back(i);
    else if (!first_eval_) first_eval_ = i;
  }
  // The first message of run A stands for all.
  void add(const RelaidSide& side) {
    if (!side.used()) return;
    for (const uint32_t i : side.rows_a) {
      sides_[i] = &side;
      same_[i] = side.same() ? Same::regrouped : Same::other_elements;
    }
    partner_[side.rows_a[0]] = side.rows_b[0];
    if (!side.same()) differences_.push_back(side.rows_a[0]);
  }
  RecordKey key_of(uint32_t i) const {
    const Digest& key = join_.key(a_.site[i]);
    return {key.a, key.b, a_.micro_step[i], a_.call[i]};
  }
  uint64_t instance_hash(uint32_t i) const {
    return mix64(join_.op(a_.site[i]) ^
                 (static_cast<uint64_t>(static_cast<uint32_t>(a_.micro_step[i])) << 32 | call(i)));
  }

  const StreamJoin& join_;
  const StepColumns& a_;
  const StepColumns& b_;
  std::vector<uint32_t> partner_;
  std::vector<Same> same_;
  std::vector<uint32_t> differences_, only_b_;
  std::optional<uint32_t> first_eval_;
  std::unordered_map<uint64_t, std::vector<uint32_t>> instances_;
  Relaid relaid_;
  std::unordered_map<uint32_t, const RelaidSide*> sides_;  // by row of A
};

// Equal sums of words, maxima and counts, but another digest. Not proof (+1 and -1 elsewhere looks the same), so it
// only counts when what follows is equal. Sources and scalars are never taken for it.
bool looks_permuted(const StepView& view, uint32_t row) {
  const Difference d = view.difference(row);
  const Site& site = view.site(row);
  return d.same == Same::value && site.kind == Kind::tensor &&
         (site.role == Role::input || site.role == Role::output) && d.stats_a.word_sum == d.stats_b.word_sum &&
         d.stats_a.nonfinite == d.stats_b.nonfinite && d.stats_a.absmax == d.stats_b.absmax &&
         element_count(view.join().a().layouts()[d.layout_a]) > 1;
}

// Does what follows the leading `count` differences, up to the next one, show that they made no difference?
bool absorbed(StepView* view, size_t count) {
  const auto& differences = view->differences();
  const uint32_t last = differences[count - 1];
  const bool ends = count == differences.size();
  const uint32_t limit = ends ? static_cast<uint32_t>(view->size()) : differences[count];
  for (uint32_t row = last + 1; row < limit; ++row) {
    const Site& site = view->site(row);
    if (!view->agrees(row) || !view->training(row) || !is_op_output(site)) continue;
    if (ends) return true;
    for (size_t i = 0; i < count; ++i) {
      const bool consumed = is_op_input(view->site(differences[i])) && view->same_instance(differences[i], row);
      if (consumed || contains_layer(site.layer, view->site(differences[i]).layer)) return true;
    }
  }
  return false;
}

// What a loss is multiplied with before backward(), recorded when the optimizer steps: of torch.amp ("scale",
// "SGD#2.scale") and Megatron ("scaler.scale"). Not each number that is called a scale.
bool is_loss_scale(const Site& site) {
  const std::string_view tensor = site.tensor;
  const size_t dot = tensor.rfind('.');
  const std::string_view last = tensor.substr(dot + 1),
                         before = dot == tensor.npos ? std::string_view{} : tensor.substr(0, dot);
  const bool of_loss =
      last == "loss_scale" ||
      (last == "scale" && (before.empty() || before.ends_with("scaler") || before.find('#') != before.npos));
  return site.role == Role::scalar && site.phase == Phase::optimizer && of_loss;
}

// A scale is lowered in the step in which a gradient is not finite, and is then what follows from it.
bool any_nonfinite(const StepView& view) {
  for (uint32_t row = 0; row < view.size(); ++row) {
    const Site& site = view.site(row);
    if (site.role != Role::gradient && site.role != Role::loss) continue;  // masks are infinite all the time
    if (view.a().nonfinite[row] > 0 || (view.matched(row) && view.b().nonfinite[view.partner(row)] > 0)) return true;
  }
  return false;
}

// An op's own inputs come before its outputs, hyperparameters before the update that reads them and a loss's scale
// before the loss and its gradients, whatever the order in which the recorder was handed them.
uint32_t causally_first(StepView* view, size_t begin) {
  const auto& differences = view->differences();
  const uint32_t row = differences[begin];
  const Site& site = view->site(row);
  const bool updated =
      site.phase == Phase::optimizer && (site.role == Role::parameter || site.role == Role::optimizer_state);
  const bool scaled = site.role == Role::loss || site.phase == Phase::backward || site.role == Role::gradient;
  for (size_t i = begin + 1; i < differences.size(); ++i) {
    const uint32_t other = differences[i];
    const Site& candidate = view->site(other);
    if (scaled && is_loss_scale(candidate) && !any_nonfinite(*view)) return other;
    if (is_op_output(site) && is_op_input(candidate) && view->same_instance(row, other)) return other;
    if (updated && candidate.phase == Phase::optimizer && is_hyperparameter(candidate)) return other;
  }
  return row;
}

std::optional<uint32_t> pick_first(StepView* view, RankStep* out) {
  const auto& differences = view->differences();
  if (differences.empty()) return {};
  size_t permuted = 0;
  while (permuted < differences.size() && looks_permuted(*view, differences[permuted])) ++permuted;
  if (permuted > 0 && absorbed(view, permuted)) {
    const bool ends = permuted == differences.size();
    if (ends || is_source(view->site(differences[permuted])) || view->inputs_agree(differences[permuted])) {
      out->permuted = view->difference(differences[0]);
      if (ends) return {};
      return causally_first(view, permuted);
    }
  }
  return causally_first(view, 0);
}

// Every record of this layer's forward in the micro-step agrees, and there is one.
bool forward_agrees(const StepView& view, uint32_t row) {
  bool any = false;
  for (uint32_t i = 0; i < view.size(); ++i) {
    if (view.site(i).phase != Phase::forward || view.micro_step(i) != view.micro_step(row) ||
        view.site(i).layer != view.site(row).layer) {
      continue;
    }
    if (!view.agrees(i)) return false;
    any = true;
  }
  return any;
}

// Ops after `first` that are origins of their own beyond doubt. Doubt: anything inside the op, in its layer or around
// it has differed before; a collective has brought differences in; the update has begun; the first difference is a
// source, or an input that changed unobserved, and may reach this op unrecorded.
void collect_later(StepView* view, uint32_t first, RankStep* out) {
  const Site& origin = view->site(first);
  if (is_source(origin) || !is_op_output(origin) || origin.kind != Kind::tensor) return;
  if (origin.phase != Phase::forward && origin.phase != Phase::backward) return;
  std::vector<uint32_t> before;  // differences so far
  for (const uint32_t row : view->differences()) {
    const Site& site = view->site(row);
    if (site.phase == Phase::optimizer || (site.kind == Kind::collective && site.role == Role::output)) return;
    before.push_back(row);
    const bool candidate = row > first && site.kind == Kind::tensor && is_op_output(site) && !site.layer.empty() &&
                           (site.phase == Phase::forward || site.phase == Phase::backward) &&
                           (view->a().flags[row] & kRecordRecompute) == 0 && !view->same_instance(row, first);
    if (!candidate || !view->inputs_agree(row)) continue;
    if (site.phase == Phase::backward && !forward_agrees(*view, row)) continue;
    const bool clean = std::none_of(before.begin(), before.end() - 1, [&](uint32_t other) {
      return related_layers(view->site(other).layer, site.layer);
    });
    uint32_t begin = row;
    for (const uint32_t i : view->instance(row)) begin = std::min(begin, i);
    const bool nothing_inside = before.size() < 2 || before[before.size() - 2] < begin;
    if (clean && nothing_inside) out->later.push_back(view->difference(row));
  }
}

void collect_sources(const StepView& view, uint32_t first, RankStep* out) {
  constexpr size_t kMost = 8;
  for (const uint32_t row : view.differences()) {
    if (out->sources.size() == kMost) return;
    // Of one role with the first (a batch's targets, a generator's keys) is what follows from it.
    if (is_source(view.site(row)) && view.site(row).role != view.site(first).role) {
      out->sources.push_back(view.difference(row));
    }
  }
}

// together: a family that is laid out anew has one part a site, so that it is the same on all members.
void add_part(Role role, const CollectiveUse::Part& part, bool together, CollectiveUse* use) {
  if (role != Role::input && role != Role::output) return;
  const bool input = role == Role::input;
  (input ? use->has_input : use->has_output) = true;
  (input ? use->input_differs : use->output_differs) |= part.differs;
  auto& parts = input ? use->inputs : use->outputs;
  const auto known = std::find_if(parts.begin(), parts.end(),
                                  [&](const CollectiveUse::Part& other) { return together && other.site == part.site; });
  if (known == parts.end()) return parts.push_back(part);
  known->differs |= part.differs;
  known->a += part.a, known->b += part.b;
}

void collect_collectives(const StepView& view, RankStep* out) {
  const StepColumns &a = view.a(), &b = view.b();
  std::unordered_map<uint64_t, std::vector<size_t>> uses;  // by op, then few
  for (uint32_t i = 0; i < a.size(); ++i) {
    const Site& site = view.site(i);
    if (site.kind != Kind::collective || !view.counts(i) || !view.join().wanted(a.site[i])) continue;
    CollectiveUse use;
    use.op = view.join().op(a.site[i]);
    use.micro_step = a.micro_step[i], use.call = view.call(i), use.site = a.site[i], use.first_row = i;
    auto& same_op = uses[use.op];
    auto known = std::find_if(same_op.begin(), same_op.end(),
                              [&](size_t k) { return out->collectives[k].same_instance(use); });
    if (known == same_op.end()) {
      same_op.push_back(out->collectives.size());
      known = same_op.end() - 1;
      out->collectives.push_back(std::move(use));
    }
    CollectiveUse& at = out->collectives[*known];
    CollectiveUse::Part part{a.site[i], view.differs(i), a.digest[i], {}};
    if (const RelaidSide* side = view.relaid(i)) {
      if (i != side->rows_a[0]) continue;
      part.a = side->sums_a.digest, part.b = side->sums_b.digest;
    } else if (!view.matched(i) || view.regrouped(i)) {
      at.one_sided = true;
      continue;
    } else {
      part.b = b.digest[view.partner(i)];
    }
    add_part(site.role, part, view.in_relaid_family(i), &at);
  }
}

}  // namespace

RankStep analyse_step(const StreamJoin& join, const StepColumns& a, const StepColumns& b, const StepPair& step,
                      const RecordKeys& differing_when_assembled, MatchScratch* scratch) {
  StepView view(join, a, b, step, differing_when_assembled, scratch);
  RankStep out;
  if (const auto row = pick_first(&view, &out)) {
    out.first = view.difference(*row);
    collect_later(&view, *row, &out);
    collect_sources(view, *row, &out);
  }
  if (view.first_eval()) out.first_eval = view.difference(*view.first_eval());
  collect_collectives(view, &out);
  return out;
}

OpInputs inputs_of(const StreamJoin& join, const StepColumns& a, const StepColumns& b, const StepPair& step,
                   const Difference& difference, MatchScratch* scratch) {
  StepView view(join, a, b, step, {}, scratch);
  OpInputs out;
  for (const uint32_t i : view.instance(difference.row_a)) {
    if (i == difference.row_a || !view.same_instance(i, difference.row_a) || !is_op_input(view.site(i))) continue;
    const RelaidSide* side = view.relaid(i);
    if (side != nullptr && i != side->rows_a[0]) continue;
    auto& names = !view.matched(i) ? out.one_sided : view.differs(i) ? out.differ : out.agree;
    names.push_back(view.site(i).tensor);
    if (view.matched(i)) out.nonfinite_b += b.nonfinite[view.partner(i)];
    if (!view.matched(i) || view.differs(i) || a.digest[i] == Digest{}) continue;
    out.passed_on_a |= a.digest[i] == difference.digest_a;
    out.passed_on_b |= a.digest[i] == difference.digest_b;
  }
  for (const uint32_t j : view.only_b()) {
    const Site& site = join.site(join.site_of_b(b.site[j]));
    if (is_op_input(site) && b.micro_step[j] == difference.micro_step && view.call_of_b(j) == difference.call &&
        join.op(join.site_of_b(b.site[j])) == join.op(difference.site)) {
      out.one_sided.push_back(site.tensor);
    }
  }
  return out;
}

}  // namespace forkpoint
