#include "lib/diff_match.h"

#include <algorithm>
#include <bit>
#include <unordered_map>

#include "lib/digest_mix.h"
#include "lib/generators.h"

namespace forkpoint {
namespace {

struct KeyHash {
  size_t operator()(const Digest& key) const { return static_cast<size_t>(key.a ^ std::rotl(key.b, 32)); }
};

struct RowKey {
  uint32_t site, call;
  int32_t micro_step;
  uint8_t flags;
  friend bool operator==(const RowKey&, const RowKey&) = default;
};

uint64_t hash(const RowKey& key) {
  return mix64((static_cast<uint64_t>(key.site) << 32 | key.call) ^
               (static_cast<uint64_t>(static_cast<uint32_t>(key.micro_step)) << 8 | key.flags) * 0x9E3779B97F4A7C15ull);
}

// Open addressing over positions in a list of keys; never removes.
class PositionTable {
 public:
  PositionTable(std::vector<uint32_t>* slots, size_t count) : slots_(*slots) {
    slots_.assign(std::bit_ceil(std::max<size_t>(16, count * 2)), kNoRow);
  }
  template <typename KeyAt>
  uint32_t find(const RowKey& key, const KeyAt& key_at) const {
    for (size_t at = hash(key) & mask();; at = (at + 1) & mask()) {
      if (slots_[at] == kNoRow || key_at(slots_[at]) == key) return slots_[at];
    }
  }
  template <typename KeyAt>
  void insert(uint32_t position, const KeyAt& key_at) {
    const RowKey key = key_at(position);
    size_t at = hash(key) & mask();
    while (slots_[at] != kNoRow && !(key_at(slots_[at]) == key)) at = (at + 1) & mask();
    if (slots_[at] == kNoRow) slots_[at] = position;  // of equal keys (a damaged file) the first counts
  }

 private:
  size_t mask() const { return slots_.size() - 1; }
  std::vector<uint32_t>& slots_;
};

// Replaces call by the record's place among those of its site, micro-step and class.
template <typename KeyAt>
void count_in_order(size_t count, const KeyAt& key_at, std::vector<uint32_t>* ordinals, std::vector<uint32_t>* table) {
  ordinals->assign(count, 0);
  std::vector<uint32_t> seen(count, 0);
  const auto group_at = [&](uint32_t position) {
    RowKey key = key_at(position);
    key.call = 0;
    return key;
  };
  PositionTable groups(table, count);
  for (uint32_t position = 0; position < count; ++position) {
    groups.insert(position, group_at);
    (*ordinals)[position] = seen[groups.find(group_at(position), group_at)]++;
  }
}

// For each of A's records: 1 where its site, micro-step and class does not come equally often in B.
template <typename KeyA, typename KeyB>
std::vector<char> unequal_groups(size_t count_a, const KeyA& key_a, size_t count_b, const KeyB& key_b,
                                 std::vector<uint32_t>* table) {
  const auto group_at = [&](uint32_t position) {
    RowKey key = position < count_a ? key_a(position) : key_b(static_cast<uint32_t>(position - count_a));
    key.call = 0;
    return key;
  };
  const uint32_t count = static_cast<uint32_t>(count_a + count_b);
  std::vector<int64_t> surplus(count, 0);  // A's records minus B's, at the first position of the group
  PositionTable groups(table, count);
  for (uint32_t position = 0; position < count; ++position) {
    groups.insert(position, group_at);
    surplus[groups.find(group_at(position), group_at)] += position < count_a ? 1 : -1;
  }
  std::vector<char> unequal(count_a);
  for (uint32_t i = 0; i < count_a; ++i) unequal[i] = surplus[groups.find(group_at(i), group_at)] != 0;
  return unequal;
}

}  // namespace

bool is_at_level(const Site& site, Level level) {
  if (level != Level::launch && site.kind == Kind::launch) return false;
  if (level != Level::step || site.kind == Kind::collective) return true;
  return site.role != Role::input && site.role != Role::output;
}

// At level launch the bridge into PyTorch leaves these out where the tensor lies on a GPU: its launches are recorded.
bool is_left_to_launches(const Site& site) {
  return site.kind == Kind::tensor && site.role == Role::input;
}

// A collective, or what it was called with.
bool is_of_collective(const Site& site) { return site.kind == Kind::collective || !site.communicator.empty(); }

bool is_backward_gradient(const Site& site) {
  return site.kind == Kind::tensor && site.role == Role::gradient && site.phase == Phase::backward;
}

// It is at level step, and does not record gradients where a backward pass leaves them.
bool lacks_backward_gradients(const HashStreamReader& stream) {
  return stream.header().level == Level::step && std::ranges::none_of(stream.sites(), is_backward_gradient);
}

StreamJoin::StreamJoin(const HashStreamReader& a, const HashStreamReader& b, Level level) : a_(a), b_(b) {
  const auto keys_a = a.site_keys(), keys_b = b.site_keys();
  keys_.assign(keys_a.begin(), keys_a.end());
  site_of_b_.resize(keys_b.size());
  std::unordered_map<Digest, uint32_t, KeyHash> ids;
  bool indexed = false;
  for (uint32_t id = 0; id < keys_b.size(); ++id) {
    if (id < keys_a.size() && keys_a[id] == keys_b[id]) {  // the usual case: same order of first use
      site_of_b_[id] = id;
      continue;
    }
    if (!indexed) {
      ids.reserve(keys_a.size());
      for (uint32_t i = 0; i < keys_a.size(); ++i) ids.emplace(keys_a[i], i);
      indexed = true;
    }
    const auto found = ids.find(keys_b[id]);
    if (found != ids.end()) {
      site_of_b_[id] = found->second;
    } else {
      site_of_b_[id] = static_cast<uint32_t>(keys_.size());
      keys_.push_back(keys_b[id]);
      only_b_.push_back(id);
    }
  }

  layout_keys_a_ = a.layout_keys();
  layout_keys_b_ = b.layout_keys();

  collectives_apart_ = find_collectives_apart();
  const bool one_at_step = (a.header().level == Level::step) != (b.header().level == Level::step);
  gradients_apart_ = one_at_step && (lacks_backward_gradients(a) || lacks_backward_gradients(b));
  for (uint32_t joint = 0; joint < keys_.size(); ++joint) {
    ops_.push_back(op_key(site(joint)));
    gradients_left_out_ |= gradients_apart_ && is_backward_gradient(site(joint));
    wanted_.push_back(is_at_level(site(joint), level) && !is_apart(joint) && is_telling(a, b, site(joint)) ? 1 : 0);
    all_wanted_ &= wanted_.back() != 0;
  }
}

// Only one of the streams is recorded in a way that would have it.
bool StreamJoin::is_apart(uint32_t joint) const {
  const bool one_at_launch = (a_.header().level == Level::launch) != (b_.header().level == Level::launch);
  return (one_at_launch && is_left_to_launches(site(joint))) || (collectives_apart_ && is_of_collective(site(joint))) ||
         (gradients_apart_ && is_backward_gradient(site(joint)));
}

bool StreamJoin::find_collectives_apart() const {
  if ((a_.header().level == Level::step) == (b_.header().level == Level::step)) return false;
  std::vector<char> in_b(keys_.size());
  for (const uint32_t joint : site_of_b_) in_b[joint] = 1;
  for (uint32_t joint = 0; joint < keys_.size(); ++joint) {
    const bool in_both = joint < a_.sites().size() && in_b[joint];
    if (!in_both && is_of_collective(site(joint))) return true;
  }
  return false;
}

const Site& StreamJoin::site(uint32_t joint) const {
  const size_t count_a = a_.sites().size();
  return joint < count_a ? a_.sites()[joint] : b_.sites()[only_b_[joint - count_a]];
}

void select_rows(const StreamJoin& join, const StepColumns& a, const StepColumns& b, MatchScratch* scratch) {
  scratch->rows_a.clear();
  scratch->rows_b.clear();
  for (uint32_t i = 0; i < a.size(); ++i) {
    if (join.wanted(a.site[i]) && (a.flags[i] & kRecordSetUp) == 0) scratch->rows_a.push_back(i);
  }
  for (uint32_t j = 0; j < b.size(); ++j) {
    if (join.wanted(join.site_of_b(b.site[j])) && (b.flags[j] & kRecordSetUp) == 0) scratch->rows_b.push_back(j);
  }
}

void match_rest(const StreamJoin& join, const StepColumns& a, const StepColumns& b, size_t from, bool complete,
                MatchScratch* scratch) {
  const bool selected = !join.all_wanted() || scratch->set_up;
  const size_t count_a = (selected ? scratch->rows_a.size() : a.size()) - from;
  const size_t count_b = (selected ? scratch->rows_b.size() : b.size()) - from;
  const auto row_a = [&](size_t i) { return selected ? scratch->rows_a[from + i] : static_cast<uint32_t>(from + i); };
  const auto row_b = [&](size_t j) { return selected ? scratch->rows_b[from + j] : static_cast<uint32_t>(from + j); };
  const auto called_a = [&](uint32_t i) {
    const uint32_t row = row_a(i);
    return RowKey{a.site[row], a.call[row], a.micro_step[row], static_cast<uint8_t>(a.flags[row] & kClassFlags)};
  };
  const auto called_b = [&](uint32_t j) {
    const uint32_t row = row_b(j);
    return RowKey{join.site_of_b(b.site[row]), b.call[row], b.micro_step[row],
                  static_cast<uint8_t>(b.flags[row] & kClassFlags)};
  };
  bool recomputed = false;
  for (size_t i = 0; i < count_a && !recomputed; ++i) recomputed = (a.flags[row_a(i)] & kRecordRecompute) != 0;
  for (size_t j = 0; j < count_b && !recomputed; ++j) recomputed = (b.flags[row_b(j)] & kRecordRecompute) != 0;
  const bool by_order = recomputed && complete;  // where records were lost, counting would pair the wrong ones
  if (by_order) {
    count_in_order(count_a, called_a, &scratch->ordinal_a, &scratch->table);
    count_in_order(count_b, called_b, &scratch->ordinal_b, &scratch->table);
  }
  const auto key_a = [&](uint32_t i) {
    RowKey key = called_a(i);
    if (by_order) key.call = scratch->ordinal_a[i];
    return key;
  };
  const auto key_b = [&](uint32_t j) {
    RowKey key = called_b(j);
    if (by_order) key.call = scratch->ordinal_b[j];
    return key;
  };

  std::vector<char> doubtful;
  if (!complete) doubtful = unequal_groups(count_a, called_a, count_b, called_b, &scratch->table);
  PositionTable table(&scratch->table, count_b);
  for (uint32_t j = 0; j < count_b; ++j) table.insert(j, key_b);
  scratch->partner.assign(count_a, kNoRow);
  scratch->taken.assign(count_b, 0);
  for (uint32_t i = 0; i < count_a; ++i) {
    if (!doubtful.empty() && doubtful[i] != 0) continue;
    const uint32_t j = table.find(key_a(i), key_b);
    if (j == kNoRow || scratch->taken[j] != 0) continue;
    scratch->taken[j] = 1;
    scratch->partner[i] = row_b(j);
  }
}

Same compare_records(const StreamJoin& join, uint32_t site, uint32_t layout_a, uint32_t layout_b, const Digest& a,
                     const Digest& b) {
  if (join.same_layout(layout_a, layout_b)) return a == b ? Same::equal : Same::value;
  const Layout &left = join.a().layouts()[layout_a], &right = join.b().layouts()[layout_b];
  const auto& whole_left = left.is_shard() ? left.global_shape : left.shape;
  const auto& whole_right = right.is_shard() ? right.global_shape : right.shape;
  if (left.dtype == right.dtype && whole_left == whole_right && (left.is_shard() || right.is_shard())) {
    return Same::resharded;
  }
  const bool whole = !left.is_shard() && !right.is_shard();
  const auto bytes = [](const Layout& layout) {
    return static_cast<uint64_t>(element_count(layout)) * static_cast<uint64_t>(size_bytes(layout.dtype));
  };
  if (whole && a == b && bytes(left) == bytes(right)) return Same::relabelled;
  return whole && left.dtype == right.dtype && join.site(site).kind == Kind::collective ? Same::regrouped
                                                                                        : Same::layout;
}

}  // namespace forkpoint
