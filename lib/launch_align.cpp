#include "lib/launch_align.h"

#include <algorithm>
#include <map>

#include "lib/digest_mix.h"
#include "lib/launch_sequence.h"

namespace forkpoint {
namespace {

constexpr size_t kMostEdits = 1500;

// Three hashes of a row, each of more than the one before.
struct RowKey {
  uint64_t name = 0;     // kind and kernel with the size of its parameters, or the record
  uint64_t shape = 0;    // grid, sizes, where in the program
  uint64_t content = 0;  // parameters, what the buffers hold afterwards
};

uint64_t mixed(uint64_t hash, uint64_t value) { return mix64(hash ^ value); }

// Where it differs, the two rows cannot be the same launch.
uint64_t name_key(const LaunchJoin& join, const LaunchStep& step, bool in_b, uint32_t i) {
  const LaunchRow& row = step.row(i);
  uint64_t hash = mix64(static_cast<uint64_t>(row.kind) + 1);
  if (row.kind != LaunchKind::record) return mixed(mixed(hash, join.kernel(in_b, row)), row.param_bytes);
  const uint32_t record = step.record_of(i);
  if (record == kNoRow) return mixed(hash, row.object);
  hash = mixed(hash, join.site(in_b, step.records.site[record]));
  hash = mixed(hash, static_cast<uint32_t>(step.records.micro_step[record]));
  return mixed(hash,
               static_cast<uint64_t>(step.records.call[record]) << 8 | (step.records.flags[record] & kClassFlags));
}

RowKey key_of(const LaunchJoin& join, const LaunchStep& step, bool in_b, uint32_t i) {
  const LaunchRow& row = step.row(i);
  RowKey key;
  key.name = name_key(join, step, in_b, i);
  key.shape = key.name;
  if (row.kind == LaunchKind::record) {
    key.content = key.shape;
    return key;
  }
  const auto add = [&](uint64_t value) { key.shape = mixed(key.shape, value); };
  add(join.site(in_b, row.site));
  for (int d = 0; d < 3; ++d) add(static_cast<uint64_t>(row.grid[d]) << 32 | row.block[d]);
  add(static_cast<uint64_t>(row.shared_bytes) << 32 | row.param_bytes);
  add(row.bytes);
  for (const BufferRow& buffer : step.buffers(i)) {
    if (!is_before(buffer)) add(buffer.bytes ^ static_cast<uint64_t>(buffer.place) << 40);
  }
  key.content = mixed(key.shape, row.params.a);
  for (const BufferRow& buffer : step.buffers(i)) {
    if (!is_before(buffer) && has_digest(buffer)) key.content = mixed(key.content, buffer.digest.a);
  }
  return key;
}

std::vector<uint32_t> aligned_rows(const LaunchStep& step) {
  std::vector<uint32_t> rows;
  for (size_t i = 0; i < step.size(); ++i) {
    if (is_aligned(step.row(i).kind)) rows.push_back(static_cast<uint32_t>(i));
  }
  return rows;
}

// Rows of one stream of each run.
struct Lane {
  std::vector<uint32_t> rows_a, rows_b;
};

class Pairing {
 public:
  Pairing(const LaunchJoin& join, const LaunchStep& a, const LaunchStep& b) : join_(join), a_(a), b_(b) {
    out_.in_b.assign(a.size(), kNoRow), out_.gap_a.assign(a.size(), kNoRow);
    out_.in_a.assign(b.size(), kNoRow), out_.gap_b.assign(b.size(), kNoRow);
  }

  LaunchPairs run() {
    std::vector<uint32_t> rows_a, rows_b;
    if (same_sequence(join_, a_, b_, &rows_a, &rows_b)) {
      for (size_t i = 0; i < rows_a.size(); ++i) pair(rows_a[i], rows_b[i]);
      count();
      return std::move(out_);
    }
    keys_a_.resize(a_.size()), keys_b_.resize(b_.size());
    for (const uint32_t i : rows_a) keys_a_[i] = key_of(join_, a_, false, i);
    for (const uint32_t j : rows_b) keys_b_[j] = key_of(join_, b_, true, j);
    std::vector<Lane> lanes = lanes_of(rows_a, rows_b);
    for (const Lane& lane : lanes) align(lane);
    count_allocations();
    for (const Lane& lane : lanes) refine(lane);
    pair_across(rows_a, rows_b);
    for (const Lane& lane : lanes) number_gaps(lane);
    count();
    return std::move(out_);
  }

 private:
  void pair(uint32_t i, uint32_t j) { out_.in_b[i] = j, out_.in_a[j] = i; }

  // Streams of run B by the one of run A that ran the most of what it ran; what is left, by first use.
  std::vector<Lane> lanes_of(const std::vector<uint32_t>& rows_a, const std::vector<uint32_t>& rows_b) const {
    std::map<uint64_t, std::pair<std::vector<uint32_t>, std::vector<uint32_t>>> alike;
    for (const uint32_t i : rows_a) alike[keys_a_[i].shape].first.push_back(i);
    for (const uint32_t j : rows_b) alike[keys_b_[j].shape].second.push_back(j);
    std::map<std::pair<uint32_t, uint32_t>, size_t> votes;
    for (const auto& [key, rows] : alike) {
      if (rows.first.size() != rows.second.size()) continue;
      for (size_t k = 0; k < rows.first.size(); ++k)
        ++votes[{a_.row(rows.first[k]).stream, b_.row(rows.second[k]).stream}];
    }
    std::vector<std::tuple<size_t, uint32_t, uint32_t>> ranked;
    for (const auto& [streams, count] : votes) ranked.push_back({count, streams.first, streams.second});
    std::sort(ranked.rbegin(), ranked.rend());
    std::map<uint32_t, size_t> lane_a, lane_b;
    size_t lanes = 0;
    for (const auto& [count, stream_a, stream_b] : ranked) {
      if (lane_a.count(stream_a) != 0 || lane_b.count(stream_b) != 0) continue;
      lane_a[stream_a] = lane_b[stream_b] = lanes++;
    }
    std::vector<uint32_t> rest_a, rest_b;
    const auto add_rest = [](const LaunchStep& step, const std::vector<uint32_t>& rows,
                             const std::map<uint32_t, size_t>& known, std::vector<uint32_t>* rest) {
      for (const uint32_t i : rows) {
        const uint32_t stream = step.row(i).stream;
        if (known.count(stream) == 0 && std::find(rest->begin(), rest->end(), stream) == rest->end())
          rest->push_back(stream);
      }
    };
    add_rest(a_, rows_a, lane_a, &rest_a);
    add_rest(b_, rows_b, lane_b, &rest_b);
    for (size_t k = 0; k < std::max(rest_a.size(), rest_b.size()); ++k, ++lanes) {
      if (k < rest_a.size()) lane_a[rest_a[k]] = lanes;
      if (k < rest_b.size()) lane_b[rest_b[k]] = lanes;
    }
    std::vector<Lane> out(lanes);
    for (const uint32_t i : rows_a) out[lane_a[a_.row(i).stream]].rows_a.push_back(i);
    for (const uint32_t j : rows_b) out[lane_b[b_.row(j).stream]].rows_b.push_back(j);
    return out;
  }

  // Aligns rows [begin_a, end_a) with [begin_b, end_b) of a lane by one of the keys.
  void align_part(const Lane& lane, uint64_t RowKey::*key, size_t begin_a, size_t end_a, size_t begin_b, size_t end_b,
                  std::vector<uint32_t>* in_b) const {
    if (begin_a == end_a || begin_b == end_b) return;
    std::vector<uint64_t> tokens_a, tokens_b;
    for (size_t i = begin_a; i < end_a; ++i) tokens_a.push_back(keys_a_[lane.rows_a[i]].*key);
    for (size_t j = begin_b; j < end_b; ++j) tokens_b.push_back(keys_b_[lane.rows_b[j]].*key);
    const std::span<uint32_t> part(in_b->data() + begin_a, end_a - begin_a);
    if (add_common(tokens_a, tokens_b, kMostEdits, part, static_cast<uint32_t>(begin_b))) return;
    add_unique(tokens_a, tokens_b, part, static_cast<uint32_t>(begin_b));
  }

  // Calls part(begin_a, end_a, begin_b, end_b) for every stretch between pairs.
  template <typename Part>
  static void between_pairs(const Lane& lane, const std::vector<uint32_t>& in_b, Part&& part) {
    size_t begin_a = 0, begin_b = 0;
    for (size_t i = 0; i < lane.rows_a.size(); ++i) {
      if (in_b[i] == kNoRow) continue;
      part(begin_a, i, begin_b, static_cast<size_t>(in_b[i]));
      begin_a = i + 1, begin_b = in_b[i] + size_t{1};
    }
    part(begin_a, lane.rows_a.size(), begin_b, lane.rows_b.size());
  }

  // What is equal in content first, then what has the same size, then what has the same name.
  void align(const Lane& lane) {
    std::vector<uint32_t> in_b(lane.rows_a.size(), kNoRow);
    size_t begin = 0, end_a = lane.rows_a.size(), end_b = lane.rows_b.size();
    const auto equal = [&](size_t i, size_t j) {
      return keys_a_[lane.rows_a[i]].content == keys_b_[lane.rows_b[j]].content;
    };
    while (begin < std::min(end_a, end_b) && equal(begin, begin)) in_b[begin] = static_cast<uint32_t>(begin), ++begin;
    while (end_a > begin && end_b > begin && equal(end_a - 1, end_b - 1))
      in_b[--end_a] = static_cast<uint32_t>(--end_b);
    align_part(lane, &RowKey::shape, begin, end_a, begin, end_b, &in_b);
    const std::vector<uint32_t> by_shape = in_b;
    between_pairs(lane, by_shape, [&](size_t from_a, size_t to_a, size_t from_b, size_t to_b) {
      align_part(lane, &RowKey::name, from_a, to_a, from_b, to_b, &in_b);
    });
    for (size_t i = 0; i < in_b.size(); ++i) {
      if (in_b[i] != kNoRow) pair(lane.rows_a[i], lane.rows_b[in_b[i]]);
    }
  }

  // Which allocation of B stands, most often, where one of A stands.
  void count_allocations() {
    std::unordered_map<uint64_t, std::unordered_map<uint64_t, int>> votes;
    for (size_t i = 0; i < a_.size(); ++i) {
      if (out_.in_b[i] == kNoRow) continue;
      const auto in_a = a_.buffers(i), in_b = b_.buffers(out_.in_b[i]);
      for (size_t k = 0; k < std::min(in_a.size(), in_b.size()); ++k) {
        if (in_a[k].place == in_b[k].place && in_a[k].allocation != 0) ++votes[in_a[k].allocation][in_b[k].allocation];
      }
    }
    for (const auto& [allocation, counts] : votes) {
      const auto most = std::max_element(counts.begin(), counts.end(), [](const auto& left, const auto& right) {
        return std::pair(left.second, right.first) < std::pair(right.second, left.first);
      });
      allocation_in_b_[allocation] = most->first;
    }
  }

  // How much speaks for two rows of one name being the same launch.
  int score(uint32_t i, uint32_t j) const {
    const RowKey &in_a = keys_a_[i], &in_b = keys_b_[j];
    if (in_a.name != in_b.name) return 0;
    int sum = 8;
    if (in_a.shape == in_b.shape) sum += 6;
    if (in_a.content == in_b.content) sum += 10;
    if (a_.row(i).params == b_.row(j).params) sum += 2;
    const auto buffers_a = a_.buffers(i), buffers_b = b_.buffers(j);
    for (size_t k = 0; k < std::min<size_t>({buffers_a.size(), buffers_b.size(), 8}); ++k) {
      if (buffers_a[k].place != buffers_b[k].place) continue;
      const auto known = allocation_in_b_.find(buffers_a[k].allocation);
      if (known != allocation_in_b_.end()) sum += known->second == buffers_b[k].allocation ? 3 : -3;
      if (has_digest(buffers_a[k]) && has_digest(buffers_b[k]) && buffers_a[k].digest == buffers_b[k].digest) ++sum;
    }
    return std::max(sum, 1);
  }

  // Allocations that would stand for more than one of the other run, and launches of equal content taken for others.
  int conflicts(const Lane& lane, std::span<const IndexPair> pairs) const {
    std::unordered_map<uint64_t, uint64_t> in_b, in_a;
    int count = 0;
    for (const auto& [p, q] : pairs) {
      const uint32_t i = lane.rows_a[p], j = lane.rows_b[q];
      count += keys_a_[i].content == keys_b_[j].content ? 0 : 1;
      const auto buffers_a = a_.buffers(i), buffers_b = b_.buffers(j);
      for (size_t k = 0; k < std::min<size_t>({buffers_a.size(), buffers_b.size(), 16}); ++k) {
        const uint64_t a = buffers_a[k].allocation, b = buffers_b[k].allocation;
        if (a == 0 || b == 0 || buffers_a[k].place != buffers_b[k].place) continue;
        const auto at_a = in_b.try_emplace(a, b).first, at_b = in_a.try_emplace(b, a).first;
        if (at_a->second != b) at_a->second = b, count += 2;
        if (at_b->second != a) at_b->second = a, count += 2;
      }
    }
    return count;
  }

  void refine(const Lane& lane) {
    constexpr size_t kAround = 24;
    std::vector<uint32_t> place_in_b(b_.size(), kNoRow);
    for (size_t j = 0; j < lane.rows_b.size(); ++j) place_in_b[lane.rows_b[j]] = static_cast<uint32_t>(j);
    std::vector<uint32_t> in_b(lane.rows_a.size(), kNoRow);
    for (size_t i = 0; i < in_b.size(); ++i) {
      const uint32_t row = out_.in_b[lane.rows_a[i]];
      if (row != kNoRow) in_b[i] = place_in_b[row];
    }
    refine_alignment(
        in_b.size(), lane.rows_b.size(), kAround,
        [&](size_t i, size_t j) { return score(lane.rows_a[i], lane.rows_b[j]); }, &in_b);
    slide_leftovers(
        in_b.size(), lane.rows_b.size(), kAround,
        [&](size_t i, size_t j) { return keys_a_[lane.rows_a[i]].shape == keys_b_[lane.rows_b[j]].shape; },
        [&](std::span<const IndexPair> pairs) { return conflicts(lane, pairs); }, &in_b);
    for (const uint32_t i : lane.rows_a) out_.in_b[i] = kNoRow;
    for (const uint32_t j : lane.rows_b) out_.in_a[j] = kNoRow;
    for (size_t i = 0; i < in_b.size(); ++i) {
      if (in_b[i] != kNoRow) pair(lane.rows_a[i], lane.rows_b[in_b[i]]);
    }
  }

  // A launch that ran on another stream in run B is left over on both: paired where it is the only one of its kind.
  void pair_across(const std::vector<uint32_t>& rows_a, const std::vector<uint32_t>& rows_b) {
    std::map<uint64_t, std::pair<std::vector<uint32_t>, std::vector<uint32_t>>> left;
    for (const uint32_t i : rows_a) {
      if (out_.in_b[i] == kNoRow) left[keys_a_[i].shape].first.push_back(i);
    }
    for (const uint32_t j : rows_b) {
      if (out_.in_a[j] == kNoRow) left[keys_b_[j].shape].second.push_back(j);
    }
    for (const auto& [key, rows] : left) {
      if (rows.first.size() != rows.second.size()) continue;
      for (size_t k = 0; k < rows.first.size(); ++k) pair(rows.first[k], rows.second[k]);
    }
  }

  void number_gaps(const Lane& lane) {
    const auto number = [](const std::vector<uint32_t>& rows, size_t begin, size_t end,
                           const std::vector<uint32_t>& partner, uint32_t gap, std::vector<uint32_t>* gaps) {
      bool any = false;
      for (size_t k = begin; k < end; ++k) {
        if (partner[rows[k]] == kNoRow) (*gaps)[rows[k]] = gap, any = true;
      }
      return any;
    };
    std::vector<uint32_t> in_b(lane.rows_a.size(), kNoRow), place(b_.size(), kNoRow);
    for (size_t j = 0; j < lane.rows_b.size(); ++j) place[lane.rows_b[j]] = static_cast<uint32_t>(j);
    size_t last = 0;
    for (size_t i = 0; i < in_b.size(); ++i) {  // pairs across streams do not bound a gap
      const uint32_t row = out_.in_b[lane.rows_a[i]];
      if (row == kNoRow || place[row] == kNoRow || place[row] < last) continue;
      in_b[i] = place[row];
      last = place[row];
    }
    between_pairs(lane, in_b, [&](size_t begin_a, size_t end_a, size_t begin_b, size_t end_b) {
      const bool any_a = number(lane.rows_a, begin_a, end_a, out_.in_b, out_.gaps, &out_.gap_a);
      const bool any_b = number(lane.rows_b, begin_b, end_b, out_.in_a, out_.gaps, &out_.gap_b);
      if (any_a || any_b) ++out_.gaps;
    });
  }

  void count() {
    for (size_t i = 0; i < a_.size(); ++i) {
      if (is_work(a_.row(i).kind)) ++(out_.in_b[i] == kNoRow ? out_.only_a : out_.paired);
    }
    for (size_t j = 0; j < b_.size(); ++j) out_.only_b += is_work(b_.row(j).kind) && out_.in_a[j] == kNoRow ? 1 : 0;
  }

  const LaunchJoin& join_;
  const LaunchStep& a_;
  const LaunchStep& b_;
  std::vector<RowKey> keys_a_, keys_b_;
  std::unordered_map<uint64_t, uint64_t> allocation_in_b_;
  LaunchPairs out_;
};

}  // namespace

bool same_sequence(const LaunchJoin& join, const LaunchStep& a, const LaunchStep& b, std::vector<uint32_t>* rows_a,
                   std::vector<uint32_t>* rows_b) {
  *rows_a = aligned_rows(a);
  *rows_b = aligned_rows(b);
  if (rows_a->size() != rows_b->size()) return false;
  for (size_t k = 0; k < rows_a->size(); ++k) {
    const uint32_t i = (*rows_a)[k], j = (*rows_b)[k];
    if (a.row(i).kind != b.row(j).kind || name_key(join, a, false, i) != name_key(join, b, true, j)) return false;
  }
  return true;
}

LaunchPairs pair_launches(const LaunchJoin& join, const LaunchStep& a, const LaunchStep& b) {
  return Pairing(join, a, b).run();
}

}  // namespace forkpoint
