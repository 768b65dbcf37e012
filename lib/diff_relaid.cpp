#include "lib/diff_relaid.h"

#include <algorithm>
#include <map>
#include <optional>

#include "lib/anomaly_rule.h"
#include "lib/communicators.h"
#include "lib/diff_collective.h"

namespace forkpoint {
namespace {

// What the plain sum of words, which is one modulo 2^32 - 1, says whatever elements share a word.
uint32_t free_of_pairing(uint64_t word_sum, DType dtype) {
  const int size = size_bytes(dtype);
  return static_cast<uint32_t>(word_sum % (size == 1 ? 0xFFu : size == 2 ? 0xFFFFu : 0xFFFFFFFFu));
}

bool is_message(const Site& site) {
  return site.kind == Kind::collective && (site.role == Role::input || site.role == Role::output);
}

// The same bytes in another shape, and shards, are told by themselves.
bool may_be_relaid(const Unequal& pair, const Site& site) {
  return is_message(site) && pair.same != Same::relabelled && pair.same != Same::resharded;
}

// The messages of one family, place and dtype on one side that do not agree call by call.
struct Messages {
  std::vector<uint32_t> a, b;
  bool taken = false;  // as laid out anew
};
struct Key {
  int place = -1;
  DType dtype = DType::raw;
  bool output = false;
  auto operator<=>(const Key&) const = default;
};

class FamilyView {
 public:
  FamilyView(const StreamJoin& join, const StepColumns& a, const StepColumns& b) : join_(join), a_(a), b_(b) {}

  void add(const Unequal& pair) {
    if (pair.a == kNoRow || pair.b == kNoRow || pair.same != Same::value) sizes_differ_ = true;
    if (pair.a != kNoRow) messages_[key_a(pair.a)].a.push_back(pair.a);
    if (pair.b != kNoRow) messages_[key_b(pair.b)].b.push_back(pair.b);
  }
  bool sizes_differ() const { return sizes_differ_; }

  void resolve(const RelaidFamily& family, Relaid* out) {
    std::map<std::pair<int, DType>, RelaidGroup> groups;
    for (auto& [key, messages] : messages_) {
      const auto by_order = [](const StepColumns& columns) {
        return [&columns](uint32_t left, uint32_t right) { return columns.call[left] < columns.call[right]; };
      };
      std::sort(messages.a.begin(), messages.a.end(), by_order(a_));
      std::sort(messages.b.begin(), messages.b.end(), by_order(b_));
      RelaidSide side{messages.a, messages.b, sums(a_, join_.a(), messages.a, key.dtype),
                      sums(b_, join_.b(), messages.b, key.dtype)};
      const bool counted = side.sums_a.elements > 0 && side.sums_a.elements == side.sums_b.elements;
      // A value that changed in a layout that did not is better told message by message.
      if (!counted || !is_float(key.dtype) || (same_sizes(messages) && !side.same())) continue;
      messages.taken = true;
      RelaidGroup& group = groups[{key.place, key.dtype}];
      group.family = family;
      (key.output ? group.output : group.input) = std::move(side);
    }
    for (auto& [key, group] : groups) out->groups.push_back(std::move(group));
    if (!groups.empty()) out->families.insert(family);
  }

  bool holds_a(uint32_t row) const { return holds(key_a(row), &Messages::a, row); }
  bool holds_b(uint32_t row) const { return holds(key_b(row), &Messages::b, row); }

 private:
  Key key_of(const Site& site, const Layout& layout) const {
    return {called_tensor(site.tensor).place, layout.dtype, site.role == Role::output};
  }
  Key key_a(uint32_t row) const { return key_of(join_.site(a_.site[row]), join_.a().layouts()[a_.layout[row]]); }
  Key key_b(uint32_t row) const {
    return key_of(join_.site(join_.site_of_b(b_.site[row])), join_.b().layouts()[b_.layout[row]]);
  }
  bool holds(const Key& key, std::vector<uint32_t> Messages::*side, uint32_t row) const {
    const Messages& messages = messages_.at(key);
    const auto& rows = messages.*side;
    return !messages.taken && std::find(rows.begin(), rows.end(), row) != rows.end();
  }

  bool same_sizes(const Messages& messages) const {
    return std::equal(messages.a.begin(), messages.a.end(), messages.b.begin(), messages.b.end(),
                      [&](uint32_t i, uint32_t j) { return join_.same_layout(a_.layout[i], b_.layout[j]); });
  }

  ElementSums sums(const StepColumns& columns, const HashStreamReader& stream, const std::vector<uint32_t>& rows,
                   DType dtype) const {
    ElementSums out;
    uint64_t words = 0;
    for (const uint32_t row : rows) {
      out.elements += static_cast<uint64_t>(element_count(stream.layouts()[columns.layout[row]]));
      out.digest += columns.digest[row];
      out.stats.nonfinite += columns.nonfinite[row];
      out.stats.absmax = std::max(out.stats.absmax, columns.absmax[row]);
      words += free_of_pairing(columns.word_sum[row], dtype);
    }
    out.stats.word_sum = free_of_pairing(words, dtype);
    return out;
  }

  const StreamJoin& join_;
  const StepColumns& a_;
  const StepColumns& b_;
  std::map<Key, Messages> messages_;
  bool sizes_differ_ = false;
};

// What the calls of a family were asked to do ("reduction"), where all of both runs were asked for the same.
class Settings {
 public:
  Settings(const StreamJoin& join, const StepColumns& a, const StepColumns& b) {
    for (uint32_t i = 0; i < a.size(); ++i) note(join, a.site[i], a.digest[i]);
    for (uint32_t j = 0; j < b.size(); ++j) note(join, join.site_of_b(b.site[j]), b.digest[j]);
  }
  bool one_value(uint32_t site) const { return values_.at(site).size() == 1; }

 private:
  void note(const StreamJoin& join, uint32_t site, const Digest& digest) {
    if (join.site(site).kind == Kind::scalar) values_[site].insert({digest.a, digest.b});
  }
  std::map<uint32_t, std::set<std::pair<uint64_t, uint64_t>>> values_;
};

}  // namespace

Relaid find_relaid(const StreamJoin& join, const StepColumns& a, const StepColumns& b, const StepPair& step,
                   std::vector<Unequal>* unequal) {
  const auto site_of = [&](const Unequal& pair) {
    return pair.a != kNoRow ? a.site[pair.a] : join.site_of_b(b.site[pair.b]);
  };
  const auto family_of = [&](const Unequal& pair) {
    const bool in_a = pair.a != kNoRow;
    const uint8_t flags = in_a ? a.flags[pair.a] : b.flags[pair.b];
    return RelaidFamily{join.op(site_of(pair)), in_a ? a.micro_step[pair.a] : b.micro_step[pair.b],
                        static_cast<uint8_t>(flags & kClassFlags)};
  };
  Relaid out;
  std::map<RelaidFamily, FamilyView> families;
  for (const Unequal& pair : *unequal) {
    const Site& site = join.site(site_of(pair));
    const RelaidFamily family = family_of(pair);
    if (!may_be_relaid(pair, site) || !is_all_reduce(site.op) || (std::get<2>(family) & kRecordEval) != 0) continue;
    families.try_emplace(family, join, a, b).first->second.add(pair);
  }
  if (families.empty()) return out;
  std::erase_if(families, [&](const auto& entry) { return step.early_of == 0 && !entry.second.sizes_differ(); });
  for (auto& [family, view] : families) view.resolve(family, &out);

  std::optional<Settings> settings;
  std::vector<Unequal> left, split;
  for (const Unequal& pair : *unequal) {
    const RelaidFamily family = family_of(pair);
    const auto found = families.find(family);
    const Site& site = join.site(site_of(pair));
    if (site.kind == Kind::scalar && out.families.count(family) != 0 && (pair.a == kNoRow || pair.b == kNoRow)) {
      if (!settings) settings.emplace(join, a, b);
      if (settings->one_value(site_of(pair))) continue;
    }
    if (found == families.end() || !may_be_relaid(pair, site)) {
      left.push_back(pair);
      continue;
    }
    const bool in_a = pair.a != kNoRow && found->second.holds_a(pair.a);
    const bool in_b = pair.b != kNoRow && found->second.holds_b(pair.b);
    if (in_a) left.push_back({pair.a, in_b ? pair.b : kNoRow, pair.same});
    else if (in_b) split.push_back({kNoRow, pair.b});
  }
  left.insert(left.end(), split.begin(), split.end());
  *unequal = std::move(left);
  return out;
}

uint64_t witnessed_elements(const StreamJoin& join, const StepColumns& a, const StepColumns& b, const StepPair& step,
                            MatchScratch* scratch) {
  uint64_t gradients = 0;
  const auto count = [&](uint32_t i, uint32_t j) {
    const Site& site = join.site(a.site[i]);
    if (site.phase != Phase::optimizer || site.kind != Kind::tensor || (a.flags[i] & kRecordEval) != 0) return;
    if (!join.same_layout(a.layout[i], b.layout[j]) || !(a.digest[i] == b.digest[j])) return;
    if (site.role == Role::gradient)
      gradients += static_cast<uint64_t>(element_count(join.a().layouts()[a.layout[i]]));
  };
  match_step(join, a, b, step.complete, scratch, count, [](uint32_t) {}, [](uint32_t) {});
  return gradients;
}

}  // namespace forkpoint
