#include "lib/assemble.h"

#include <fmt/format.h>

#include "lib/generators.h"

#include <algorithm>

namespace forkpoint {
namespace {

const std::vector<int64_t>& whole_shape(const Layout& layout) {
  return layout.is_shard() ? layout.global_shape : layout.shape;
}

// -1: a shape that cannot be (damage), or too large to count.
int64_t volume(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t extent : shape) {
    if (extent < 0 || (extent > 0 && count > INT64_MAX / extent)) return -1;
    count *= extent;
  }
  return count;
}

bool overlap(const Layout& left, const Layout& right) {
  for (size_t d = 0; d < left.shape.size(); ++d) {
    if (left.global_offset[d] + left.shape[d] <= right.global_offset[d] ||
        right.global_offset[d] + right.shape[d] <= left.global_offset[d]) {
      return false;
    }
  }
  return true;
}

bool within(const Layout& box) {
  if (box.shape.size() != box.global_shape.size() || box.global_offset.size() != box.shape.size()) return false;
  for (size_t d = 0; d < box.shape.size(); ++d) {
    if (box.global_offset[d] < 0 || box.shape[d] < 0 || box.global_offset[d] > box.global_shape[d] - box.shape[d])
      return false;
  }
  return true;
}

// Boxes sorted by place: do they cover the shape exactly once? Equal volume and no overlap is the same.
std::string check_tiling(const std::vector<const Piece*>& boxes) {
  const int64_t whole = volume(boxes[0]->layout->global_shape);
  int64_t covered = 0;
  for (size_t i = 0; i < boxes.size(); ++i) {
    const Layout& box = *boxes[i]->layout;
    const int64_t own = volume(box.shape);
    if (!within(box) || own < 0 || whole < 0) return "a shard does not lie within its tensor";
    covered += own;
    if (own == 0) continue;
    for (size_t j = i + 1; j < boxes.size(); ++j) {
      const Layout& other = *boxes[j]->layout;
      if (!box.shape.empty() && other.global_offset[0] >= box.global_offset[0] + box.shape[0]) break;
      if (volume(other.shape) > 0 && overlap(box, other)) {
        return fmt::format("the shards of ranks {} and {} overlap in part", boxes[i]->rank, boxes[j]->rank);
      }
    }
  }
  if (covered != whole) return fmt::format("the shards hold {} of {} elements", covered, whole);
  return {};
}

}  // namespace

Assembled assemble(std::span<const Piece> pieces) {
  Assembled out;
  if (pieces.empty()) {
    out.why = "no rank holds it";
    return out;
  }
  out.dtype = pieces[0].layout->dtype;
  out.shape = whole_shape(*pieces[0].layout);
  std::vector<const Piece*> boxes;
  for (const Piece& piece : pieces) {
    if (piece.layout->dtype != out.dtype || whole_shape(*piece.layout) != out.shape ||
        piece.layout->is_shard() != pieces[0].layout->is_shard()) {
      out.why = fmt::format("ranks {} and {} hold it in forms that do not go together", pieces[0].rank, piece.rank);
      return out;
    }
    boxes.push_back(&piece);
  }
  std::stable_sort(boxes.begin(), boxes.end(), [](const Piece* left, const Piece* right) {
    return std::tie(left->layout->global_offset, left->layout->shape) <
           std::tie(right->layout->global_offset, right->layout->shape);
  });
  std::vector<const Piece*> distinct;
  for (const Piece* box : boxes) {
    const bool replica = !distinct.empty() && distinct.back()->layout->global_offset == box->layout->global_offset &&
                         distinct.back()->layout->shape == box->layout->shape;
    if (!replica) {
      distinct.push_back(box);
    } else if (!(distinct.back()->digest == box->digest)) {
      out.why = fmt::format("it is not the same on ranks {} and {}", distinct.back()->rank, box->rank);
      return out;
    }
  }
  if (pieces[0].layout->is_shard()) out.why = check_tiling(distinct);
  if (!out.why.empty()) return out;
  for (const Piece* box : distinct) out.digest += box->digest;
  out.ok = true;
  return out;
}

void gather(const HashStreamReader& stream, size_t step_index, Level level, const RecordKeys* keep,
            StepColumns* columns, Pieces* pieces) {
  stream.read_step(step_index, columns);
  for (uint32_t row = 0; row < columns->size(); ++row) {
    const uint32_t site = columns->site[row];
    if ((columns->flags[row] & kRecordEval) != 0 || !is_at_level(stream.sites()[site], level)) continue;
    if (!is_telling(stream, stream, stream.sites()[site])) continue;
    const Digest& key = stream.site_keys()[site];
    const RecordKey record{key.a, key.b, columns->micro_step[row], columns->call[row]};
    if (keep != nullptr && keep->count(record) == 0) continue;
    pieces->by_key[record].push_back({stream.header().rank, row, &stream.layouts()[columns->layout[row]],
                                      &stream.sites()[site], columns->digest[row]});
  }
}

ReshardedStep compare_pieces(const Pieces& a, const Pieces& b) {
  ReshardedStep out;
  for (const auto& [key, in_a] : a.by_key) {
    const auto in_b = b.by_key.find(key);
    if (in_b == b.by_key.end()) {
      out.not_comparable[key] = "only run A has it";
      continue;
    }
    const Assembled left = assemble(in_a), right = assemble(in_b->second);
    if (!left.ok || !right.ok) {
      out.not_comparable[key] = left.ok ? "run B: " + right.why : "run A: " + left.why;
    } else if (left.dtype == right.dtype && left.shape == right.shape && left.digest == right.digest) {
      out.equal.insert(key);
    } else {
      out.differing.insert(key);
    }
  }
  for (const auto& [key, in_b] : b.by_key) {
    if (a.by_key.count(key) == 0) out.not_comparable[key] = "only run B has it";
  }
  return out;
}

}  // namespace forkpoint
