// Builds Verdict::map: step x (phase, layer), the worst cell over ranks. Internal to diff.
#pragma once

#include <map>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "lib/diff_match.h"
#include "lib/verdict.h"

namespace forkpoint {

class MapBuilder {
 public:
  // Cells by growing badness; 0: nothing seen.
  static constexpr uint8_t kEqual = 1, kMissing = 2, kPropagated = 3;

  // Row of the map of every joint site. Thread-safe; the result lives as long as the builder.
  const std::vector<uint32_t>& rows_of(size_t pair, const StreamJoin& join);
  size_t row_count() const;
  void add(int64_t step, std::span<const uint8_t> cells);                     // thread-safe
  void add_equal(int64_t step, const std::vector<LayerSummary>& layers);      // thread-safe
  // Moves the map into the verdict and marks the cells of its firsts. The prologue stands under kPrologueStep.
  void finish(Verdict* verdict);

 private:
  uint32_t row_of(Phase phase, std::string_view layer);

  mutable std::mutex mutex_;
  std::map<std::pair<Phase, std::string>, uint32_t, std::less<>> rows_;
  std::vector<Verdict::MapRow> names_;
  std::unordered_map<size_t, std::vector<uint32_t>> by_pair_;
  std::map<int64_t, std::vector<uint8_t>> steps_;
};

}  // namespace forkpoint
