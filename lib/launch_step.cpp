#include "lib/launch_step.h"

#include <algorithm>

namespace forkpoint {

void LaunchStep::read(const HashStreamReader& stream, size_t step_index) {
  stream.read_launches(step_index, &launches);
  const bool any_record = std::any_of(launches.rows.begin(), launches.rows.end(),
                                      [](const LaunchRow& row) { return row.kind == LaunchKind::record; });
  if (any_record)
    stream.read_step(step_index, &records);
  else
    records = {};
  index();
}

void LaunchStep::index() {
  first_buffer.resize(launches.rows.size() + 1);
  uint32_t at = 0;
  for (size_t i = 0; i < launches.rows.size(); ++i) {
    first_buffer[i] = at;
    at += launches.rows[i].buffers;
  }
  first_buffer[launches.rows.size()] = at;
}

uint32_t LaunchStep::record_of(size_t i) const {
  const LaunchRow& at = row(i);
  return at.kind == LaunchKind::record && at.object < records.size() ? static_cast<uint32_t>(at.object) : kNoRow;
}

uint32_t LaunchStep::row_of_record(uint32_t record) const {
  for (size_t i = 0; i < size(); ++i) {
    if (row(i).kind == LaunchKind::record && row(i).object == record) return static_cast<uint32_t>(i);
  }
  return kNoRow;
}

LaunchNames::LaunchNames(const HashStreamReader& a, const HashStreamReader& b) {
  add(a.sites(), &of_a_);
  add(b.sites(), &of_b_);
}

void LaunchNames::add(std::span<const Site> sites, std::vector<uint32_t>* ids) {
  static const std::string kNone;
  ids->reserve(sites.size());
  for (const Site& site : sites) {
    const std::string& name = site.kind == Kind::launch ? site.tensor : kNone;
    const auto [at, fresh] = by_name_.try_emplace(name, static_cast<uint32_t>(names_.size()));
    if (fresh) names_.push_back(&name);
    ids->push_back(at->second);
  }
}

const Site* LaunchJoin::record_site(bool in_b, const LaunchStep& step, size_t row) const {
  const uint32_t record = step.record_of(row);
  return record == kNoRow ? nullptr : &stream(in_b).sites()[step.records.site[record]];
}

}  // namespace forkpoint
