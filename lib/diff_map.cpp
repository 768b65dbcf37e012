#include "lib/diff_map.h"

#include <algorithm>

namespace forkpoint {

uint32_t MapBuilder::row_of(Phase phase, std::string_view layer) {
  const auto [at, fresh] = rows_.try_emplace({phase, std::string(layer)}, static_cast<uint32_t>(names_.size()));
  if (fresh) names_.push_back({std::string(name(phase)), std::string(layer), {}});
  return at->second;
}

const std::vector<uint32_t>& MapBuilder::rows_of(size_t pair, const StreamJoin& join) {
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t>& rows = by_pair_[pair];
  if (rows.empty()) {
    for (uint32_t site = 0; site < join.size(); ++site)
      rows.push_back(row_of(join.site(site).phase, join.site(site).layer));
  }
  return rows;
}

size_t MapBuilder::row_count() const {
  const std::lock_guard lock(mutex_);
  return names_.size();
}

void MapBuilder::add(int64_t step, std::span<const uint8_t> cells) {
  const std::lock_guard lock(mutex_);
  std::vector<uint8_t>& column = steps_[step];
  if (column.size() < cells.size()) column.resize(cells.size());
  for (size_t row = 0; row < cells.size(); ++row) column[row] = std::max(column[row], cells[row]);
}

void MapBuilder::add_equal(int64_t step, const std::vector<LayerSummary>& layers) {
  const std::lock_guard lock(mutex_);
  std::vector<uint8_t>& column = steps_[step];
  for (const LayerSummary& layer : layers) {
    const uint32_t row = row_of(layer.phase, layer.layer);
    if (column.size() <= row) column.resize(row + 1);
    column[row] = std::max(column[row], kEqual);
  }
}

void MapBuilder::finish(Verdict* verdict) {
  verdict->map = std::move(names_);
  for (const auto& [step, column] : steps_) {
    verdict->map_steps.push_back(step);
    for (size_t row = 0; row < verdict->map.size(); ++row) {
      const uint8_t cell = row < column.size() ? column[row] : 0;
      verdict->map[row].cells.push_back(cell == kEqual        ? Cell::equal
                                        : cell == kPropagated ? Cell::propagated
                                                              : Cell::missing);
    }
  }
  const auto mark = [&](const Divergence& at) {
    const int64_t step = at.in_prologue ? kPrologueStep : at.step;
    const auto column = std::find(verdict->map_steps.begin(), verdict->map_steps.end(), step);
    if (column == verdict->map_steps.end()) return;
    for (Verdict::MapRow& row : verdict->map) {
      const bool phase = !at.phase || row.phase == name(*at.phase) || at.in_prologue;
      if (!phase || row.layer != at.layer) continue;
      Cell& cell = row.cells[static_cast<size_t>(column - verdict->map_steps.begin())];
      if (cell == Cell::propagated) cell = Cell::diverged;
    }
  };
  if (verdict->first) mark(*verdict->first);
  for (const Divergence& at : verdict->also_first) mark(at);
}

}  // namespace forkpoint
