#include "lib/launch_order.h"

#include <algorithm>

namespace forkpoint {
namespace {

uint32_t at(const std::vector<uint32_t>& clock, uint32_t stream) { return stream < clock.size() ? clock[stream] : 0; }

bool runs_on_a_stream(LaunchKind kind) {
  return is_aligned(kind) || kind == LaunchKind::event_record || kind == LaunchKind::event_wait ||
         kind == LaunchKind::synchronize;
}

}  // namespace

LaunchOrder::LaunchOrder(const std::vector<const LaunchStep*>& steps) {
  for (size_t s = 0; s < steps.size(); ++s) {
    for (uint32_t i = 0; i < steps[s]->size(); ++i) {
      if (runs_on_a_stream(steps[s]->row(i).kind)) add(steps[s]->row(i), {s, i});
    }
  }
}

void LaunchOrder::join(Clock* clock, const Clock& other) {
  if (clock->size() < other.size()) clock->resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) (*clock)[i] = std::max((*clock)[i], other[i]);
}

uint32_t LaunchOrder::stream_of(const LaunchRow& row) {
  const auto [found, fresh] = streams_.try_emplace(row.stream, static_cast<uint32_t>(now_.size()));
  if (fresh) now_.emplace_back(), free_.push_back(0);
  if ((row.flags & kLaunchNonBlocking) != 0) free_[found->second] = 1;
  return found->second;
}

// Everything that a call on this stream waits for, whatever it is.
void LaunchOrder::begin(const LaunchRow& row, uint32_t stream) {
  join(&now_[stream], host_);
  if ((row.flags & kLaunchLegacyStream) != 0) {
    for (uint32_t other = 0; other < now_.size(); ++other) {
      if (other != stream && free_[other] == 0) join(&now_[stream], now_[other]);
    }
  } else if (free_[stream] == 0) {
    join(&now_[stream], legacy_);
  }
}

void LaunchOrder::wait(const LaunchRow& row, uint32_t stream, const LaunchPlace& place) {
  const auto event = events_.find(row.object);
  if (event == events_.end()) return;  // recorded before these steps
  Gain gain{stream, now_[stream], {}, {row.object, event->second.recorded, place}};
  join(&now_[stream], event->second.clock);
  gain.after = now_[stream];
  gains_.push_back(std::move(gain));
}

void LaunchOrder::synchronize(const LaunchRow& row, uint32_t stream) {
  if (row.object != 0) {
    const auto event = events_.find(row.object);
    if (event != events_.end()) join(&host_, event->second.clock);
    return;
  }
  if (row.stream != kEveryStream) return join(&host_, now_[stream]);
  for (const Clock& clock : now_) join(&host_, clock);
}

void LaunchOrder::add(const LaunchRow& row, const LaunchPlace& place) {
  if (row.kind == LaunchKind::synchronize && (row.stream == kEveryStream || row.object != 0))
    return synchronize(row, 0);
  const uint32_t stream = stream_of(row);
  begin(row, stream);
  if (row.kind == LaunchKind::event_wait) {
    wait(row, stream, place);
  } else if (row.kind == LaunchKind::synchronize) {
    synchronize(row, stream);
  } else if (row.kind == LaunchKind::event_record) {
    events_[row.object] = {now_[stream], place};
  } else {
    Clock& clock = now_[stream];
    if (clock.size() <= stream) clock.resize(stream + 1, 0);
    ++clock[stream];
    stamps_[place] = {stream, clock};
  }
  if ((row.flags & kLaunchLegacyStream) != 0) legacy_ = now_[stream];
}

bool LaunchOrder::ordered(const LaunchPlace& earlier, const LaunchPlace& later) const {
  const auto first = stamps_.find(earlier), second = stamps_.find(later);
  if (first == stamps_.end() || second == stamps_.end() || !(earlier < later)) return false;
  const uint32_t stream = first->second.stream;
  return at(second->second.clock, stream) >= at(first->second.clock, stream);
}

std::optional<LaunchOrder::Wait> LaunchOrder::wait_between(const LaunchPlace& earlier, const LaunchPlace& later) const {
  const auto first = stamps_.find(earlier), second = stamps_.find(later);
  if (first == stamps_.end() || second == stamps_.end()) return {};
  const uint32_t stream = first->second.stream, when = at(first->second.clock, stream);
  for (const Gain& gain : gains_) {
    const bool there = gain.stream == second->second.stream && gain.wait.waited < later;
    if (there && at(gain.before, stream) < when && at(gain.after, stream) >= when) return gain.wait;
  }
  return {};
}

}  // namespace forkpoint
