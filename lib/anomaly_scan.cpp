#include "lib/anomaly_scan.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "lib/anomaly_rule.h"
#include "lib/diff_step.h"
#include "lib/digest_mix.h"
#include "lib/error.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

constexpr int kOctave = 128;

class RankScan {
 public:
  RankScan(const Run& run, size_t index) : stream_(*run.streams()[index]), direct_(stream_.sites().size()) {
    out_.stream = index;
    for (const Site& site : stream_.sites()) roles_.push_back(value_role(site));
  }

  void step(size_t order) {
    const StepSummary& summary = stream_.steps()[order];
    try {
      stream_.read_step(order, &columns_);
    } catch (const Error& error) {
      out_.damage.push_back(
          fmt::format("rank {}, {}: {}", stream_.header().rank, step_text(summary.step), error.what()));
      return;
    }
    if (summary.step != kPrologueStep) out_.steps.insert(summary.step);
    hits_.clear();
    skipped_ = sink_seen_ = sink_hit_ = false;
    for (uint32_t row = 0; row < columns_.size(); ++row) look(row);
    if (!hits_.empty()) settle(summary.step, order);
  }

  RankAnomalies take() { return std::move(out_); }

 private:
  // Sites that occur once a step find their history without a search.
  MagnitudeHistory& history(uint32_t row) {
    const uint32_t site = columns_.site[row];
    const uint8_t cls = columns_.flags[row] & kClassFlags;
    const uint64_t where =
        (static_cast<uint64_t>(static_cast<uint32_t>(columns_.micro_step[row])) << 32) | columns_.call[row];
    Direct& direct = direct_[site];
    if (!direct.used) direct.used = true, direct.where = where, direct.cls = cls;
    if (direct.where == where && direct.cls == cls) return direct.history;
    return further_[{mix64(where ^ (static_cast<uint64_t>(site) << 2 | cls)), site}];
  }

  void look(uint32_t row) {
    const ValueRole& role = roles_[columns_.site[row]];
    if (!role.looked_at) return;
    const bool eval = (columns_.flags[row] & kRecordEval) != 0;
    double number = 0;
    float absmax = columns_.absmax[row];
    uint64_t nonfinite = columns_.nonfinite[row];
    if (role.number) {
      number = scalar_value(columns_.digest[row]);
      nonfinite = std::isfinite(number) ? 0 : 1;
      absmax = nonfinite != 0 ? 0 : static_cast<float>(std::min(std::fabs(number), 3e38));
      skipped_ |= role.skipped && number != 0;
    } else if (!is_float(stream_.layouts()[columns_.layout[row]].dtype)) {
      return;
    }
    skipped_ |= role.skipped && !role.number && absmax != 0;
    if (!eval) ++out_.looked_at, sink_seen_ |= role.sink, out_.loss_recorded |= role.loss;
    MagnitudeHistory& past = history(row);
    if (nonfinite != 0) {
      if (!past.by_design) add_hit(row, true, nonfinite, role.number ? number : absmax, past);
      sink_hit_ |= role.sink && !eval;
      past.seen = true;
      return;
    }
    past.seen = past.ever_finite = true;
    bool left = false;
    if (role.magnitude && absmax > 0) {
      const uint16_t level = MagnitudeHistory::level_of(absmax);
      left = level != 0 && past.leaves(level, role.loss);
      if (left) {
        add_hit(row, false, 0, role.number ? number : absmax, past);
        hits_.back().is_burst = role.bursts && !past.beyond_bursts(level);
      }
      if (level != 0) past.add(level);
      if (!eval) out_.judged += level != 0 && past.judged() ? 1 : 0;
    }
    if (role.loss && !eval && !left && !out_.loss) last_loss_ = role.number ? number : absmax;
  }

  void add_hit(uint32_t row, bool is_nonfinite, uint64_t nonfinite, double magnitude, const MagnitudeHistory& past) {
    hits_.push_back({row, columns_.site[row], columns_.layout[row], columns_.call[row], columns_.micro_step[row],
                     columns_.flags[row], is_nonfinite, false, nonfinite, magnitude,
                     is_nonfinite ? 0 : MagnitudeHistory::magnitude_of(past.median()), past.size()});
  }

  // At the end of a step it is known what the non-finite values in it came to.
  void settle(int64_t step, size_t order) {
    if (skipped_) {
      const bool others = std::any_of(hits_.begin(), hits_.end(), [&](const Hit& hit) {
        return hit.is_nonfinite && (hit.flags & kRecordEval) == 0 && !explained(hit);
      });
      const size_t before = hits_.size();
      if (!others) std::erase_if(hits_, [&](const Hit& hit) { return explained(hit); });
      if (hits_.size() != before) out_.skipped.push_back(step);
    }
    std::erase_if(hits_, [&](const Hit& hit) { return is_by_design(hit, step); });
    std::optional<FirstHit> burst;
    for (const Hit& hit : hits_) {
      if (hit.is_burst)
        take_first(&burst, hit, step, order);
      else if ((hit.flags & kRecordEval) != 0)
        take_first(&out_.evaluation, hit, step, order);
      else
        take_first(hit.is_nonfinite ? &out_.nonfinite : &out_.magnitude, hit, step, order);
    }
    give_collectives(&out_.nonfinite, true, order);
    give_collectives(&out_.magnitude, false, order);
    give_collectives(&burst, false, order);
    if (burst && (burst->hit.flags & kRecordEval) == 0) out_.bursts.push_back(std::move(*burst));
    for (const Hit& hit : hits_) {
      if ((hit.flags & kRecordEval) == 0) link(hit, step, order);
    }
  }

  bool explained(const Hit& hit) const {
    return scaler_explains(roles_[hit.site], stream_.layouts()[hit.layout].dtype);
  }

  bool is_by_design(const Hit& hit, int64_t step) {
    if (!hit.is_nonfinite || roles_[hit.site].sink) return false;
    MagnitudeHistory& past = history(hit.row);
    const Site& site = stream_.sites()[hit.site];
    const bool is_mask = roles_[hit.site].mask;
    if (past.ever_finite && !is_mask) return false;
    if (sink_hit_ || !sink_seen_) return is_mask && sink_seen_;
    past.by_design = true;
    out_.by_design.try_emplace(place_text(site), step);
    return true;
  }

  void take_first(std::optional<FirstHit>* first, const Hit& hit, int64_t step, size_t order) {
    if (!first->has_value()) {
      const ValueRole& role = roles_[hit.site];
      first->emplace(FirstHit{step, order, hit, role.collective_output, {role.op, hit.micro_step, hit.call}, {}});
      return;
    }
    // An op's inputs come before its output, whatever the order in which they were recorded.
    Hit& known = (*first)->hit;
    const bool same_call = (*first)->order == order && known.is_nonfinite == hit.is_nonfinite &&
                           known.micro_step == hit.micro_step && known.call == hit.call &&
                           ((known.flags ^ hit.flags) & kClassFlags) == 0 &&
                           roles_[known.site].op == roles_[hit.site].op;
    if (same_call && is_op_output(stream_.sites()[known.site]) && is_op_input(stream_.sites()[hit.site])) {
      known = hit;
      (*first)->received = false;
    }
  }

  void give_collectives(std::optional<FirstHit>* first, bool is_nonfinite, size_t order) {
    if (!first->has_value() || (*first)->order != order) return;
    for (const Hit& hit : hits_) {
      const ValueRole& role = roles_[hit.site];
      if (role.collective_input && hit.is_nonfinite == is_nonfinite)
        (*first)->given.insert({role.op, hit.micro_step, hit.call});
    }
  }

  void link(const Hit& hit, int64_t step, size_t order) {
    if (out_.loss) return;  // the chain ends with the loss
    if (roles_[hit.site].loss && !out_.loss) {
      out_.loss.emplace(FirstHit{step, order, hit, false, {}, {}});
      out_.loss_before = last_loss_;
    }
    const auto [at, fresh] = out_.links.try_emplace({step, stream_.sites()[hit.site].phase});
    RankAnomalies::Link& link = at->second;
    if (fresh) link.first_row = hit.row, link.first_site = hit.site;
    link.last_site = hit.site;
    ++(hit.is_nonfinite ? link.nonfinite : link.departed);
  }

  struct Direct {
    bool used = false;
    uint8_t cls = 0;
    uint64_t where = 0;
    MagnitudeHistory history;
  };
  struct KeyHash {
    size_t operator()(const std::pair<uint64_t, uint32_t>& key) const { return key.first; }
  };

  const HashStreamReader& stream_;
  std::vector<ValueRole> roles_;
  std::vector<Direct> direct_;  // by site
  std::unordered_map<std::pair<uint64_t, uint32_t>, MagnitudeHistory, KeyHash> further_;
  StepColumns columns_;
  std::vector<Hit> hits_;  // of this step
  bool skipped_ = false, sink_seen_ = false, sink_hit_ = false;
  std::optional<double> last_loss_;
  RankAnomalies out_;
};

}  // namespace

uint64_t statistics_elements(const Layout& layout) {
  const uint64_t parts = layout.dtype == DType::c64 || layout.dtype == DType::c128 ? 2 : 1;
  return parts * static_cast<uint64_t>(element_count(layout));
}

uint16_t MagnitudeHistory::level_of(float absmax) {
  constexpr float kFloor = 0x1p-60f;
  return absmax < kFloor ? 0 : static_cast<uint16_t>(std::bit_cast<uint32_t>(absmax) >> 16);
}

double MagnitudeHistory::magnitude_of(uint16_t level) {
  return level == 0 ? 0 : std::bit_cast<float>(static_cast<uint32_t>(level) << 16 | 0x8000u);
}

uint16_t MagnitudeHistory::median() const {
  if (count_ == 0) return 0;
  std::array<uint16_t, kHistorySteps> sorted = levels_;
  std::nth_element(sorted.begin(), sorted.begin() + count_ / 2, sorted.begin() + count_);
  return sorted[count_ / 2];
}

bool MagnitudeHistory::leaves(uint16_t level, bool is_loss) {
  judged_ = count_ >= kFewestSteps;
  bool left = false;
  // The cheap half first: nearly no value is an octave above all that it was in 64 steps.
  if (judged_ && level > largest_ + (is_loss ? kOctave / 2 : kOctave)) {
    const int middle = median();
    std::array<uint16_t, kHistorySteps> off{};
    for (int i = 0; i < count_; ++i)
      off[static_cast<size_t>(i)] = static_cast<uint16_t>(std::abs(levels_[static_cast<size_t>(i)] - middle));
    std::nth_element(off.begin(), off.begin() + count_ / 2, off.begin() + count_);
    left = level > middle + std::max(6 * static_cast<int>(off[count_ / 2]), is_loss ? kOctave : 4 * kOctave);
  }
  return left;
}

void MagnitudeHistory::add(uint16_t level) {
  const uint16_t old = levels_[next_];
  levels_[next_] = level;
  next_ = static_cast<uint8_t>((next_ + 1) % kHistorySteps);
  if (count_ < kHistorySteps) ++count_;
  if (level >= largest_)
    largest_ = level;
  else if (old == largest_)
    largest_ = *std::max_element(levels_.begin(), levels_.begin() + count_);
}

RankAnomalies scan_rank(const Run& run, size_t stream, const StepWindow& window,
                        const std::function<void()>& after_each_step) {
  RankScan scan(run, stream);
  const auto steps = run.streams()[stream]->steps();
  for (size_t order = 0; order < steps.size(); ++order) {
    if (!window.wants(steps[order].step)) continue;
    scan.step(order);
    after_each_step();
  }
  return scan.take();
}

}  // namespace forkpoint
