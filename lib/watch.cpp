#include "lib/watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <tuple>
#include <utility>

#include "lib/anomaly_scan.h"
#include "lib/error.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

constexpr auto kListPeriod = std::chrono::milliseconds(250);
// A value that may have come from another rank waits so long for that rank's own stream to tell.
constexpr auto kPatience = std::chrono::milliseconds(300);
constexpr double kPaceSeconds = 0.2;  // a pace is taken over

Divergence place_of(const StreamTail& tail, const NonfiniteHit& hit) {
  const Site& site = tail.sites()[hit.site];
  Divergence at;
  at.step = hit.step;
  at.in_prologue = hit.step == kPrologueStep;
  at.micro_step = std::max(0, hit.micro_step);
  at.rank = tail.header().rank;
  at.phase = site.phase, at.kind = site.kind;
  at.layer = site.layer, at.op = site.op, at.tensor = site.tensor;
  return at;
}

std::string place_key(const Divergence& at) {
  return place_text(at.phase ? name(*at.phase) : "", at.layer, at.op, at.tensor);
}

std::string words_of(const StreamTail& tail, const NonfiniteHit& hit) {
  const Site& site = tail.sites()[hit.site];
  if (site.kind == Kind::scalar) return "not a finite number";
  const uint64_t elements = statistics_elements(tail.layouts()[hit.layout]);
  return fmt::format("{} of {} {} not finite", grouped(hit.nonfinite), counted(elements, "element"),
                     hit.nonfinite == 1 ? "is" : "are");
}

std::string words_of(const ReplicaDesync& desync) {
  std::vector<int> others;
  std::set_difference(desync.compared.begin(), desync.compared.end(), desync.outliers.begin(), desync.outliers.end(),
                      std::back_inserter(others));
  if (others.empty()) return fmt::format("{} do not hold the same ({})", rank_list(desync.compared), desync.why);
  return fmt::format("not what {} {} ({})", rank_list(others), others.size() == 1 ? "holds" : "hold", desync.why);
}

bool holds_layers(const StreamTail& tail, size_t step_index) {
  const auto& sites = tail.columns(step_index).site;
  return std::any_of(sites.begin(), sites.end(), [&](uint32_t id) {
    const Site& site = tail.sites()[id];
    return site.kind != Kind::collective && (site.role == Role::input || site.role == Role::output);
  });
}

}  // namespace

std::string WatchFinding::sentence() const {
  if (at.rank >= 0) return fmt::format("{}: {}", place_text(at), what);
  return fmt::format("{}, {}: {}", when_text(at), place_key(at), what);
}

Watch::Watch(std::string run_directory, Manifest manifest, WatchOptions options)
    : options_(options), run_(Run::of(std::move(run_directory), manifest, {})), manifest_(std::move(manifest)) {}

std::vector<WatchFinding> Watch::look() { return look_once(false); }

std::vector<WatchFinding> Watch::finish() {
  listed_ = {};
  return look_once(true);
}

std::vector<WatchFinding> Watch::look_once(bool last) {
  std::vector<WatchFinding> out;
  find_streams();
  const bool all_finite = std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.bad; });
  if (all_finite && candidates_.empty()) first_bad_step_.reset();  // what comes now is another finding
  for (Rank& rank : ranks_) {
    do advance(&rank);
    while (rank.tail->more_follows());
  }
  if (options_.nan && last) {
    for (Rank& rank : ranks_) {
      std::vector<NonfiniteHit> hits;
      rank.nonfinite.stream_end(&hits);
      take_hits(&rank, hits);
    }
  }
  release(last, &out);
  if (options_.replicas && (last || all_there())) compare_replicas(&out);
  note_pace();
  return out;
}

std::vector<std::string> Watch::take_problems() { return std::exchange(problems_, {}); }

// New ones: until every rank of the world is there.
void Watch::find_streams() {
  const auto now = Clock::now();
  if (listed_ != Clock::time_point{} && now - listed_ < kListPeriod) return;
  if (!ranks_.empty() && static_cast<int>(ranks_.size()) >= std::max(run_.world_size(), 1)) return;
  listed_ = now;
  std::vector<std::unique_ptr<HashStreamReader>> streams = run_.take_streams();
  const size_t known = streams.size();
  const auto is_open = [&](const std::string& path) {
    return std::any_of(streams.begin(), streams.end(), [&](const auto& stream) { return stream->path() == path; });
  };
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(run_.directory(), error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string file = entry->path().filename().string();
    if (!file.starts_with("rank-") || !file.ends_with(".fkp") || refused_files_.contains(file)) continue;
    const std::string path = run_.directory() + "/" + file;
    if (is_open(path)) continue;
    try {
      auto tail = StreamTail::open(path);
      if (!tail || stream_file_name(tail->header().rank) != file) continue;
      streams.push_back(std::move(tail));
    } catch (const Error& fault) {
      refused_files_.insert(file);
      problems_.push_back(fmt::format("it is not watched: {}", fault.what()));
    }
  }
  std::sort(streams.begin(), streams.end(),
            [](const auto& left, const auto& right) { return left->header().rank < right->header().rank; });
  const bool grown = streams.size() != known;
  std::vector<StreamTail*> tails;
  for (const auto& stream : streams) tails.push_back(static_cast<StreamTail*>(stream.get()));
  run_ = Run::of(run_.directory(), manifest_, std::move(streams));
  if (!grown) return;
  std::map<int, Rank> old;
  for (Rank& rank : ranks_) old.emplace(rank.rank, std::move(rank));
  ranks_.clear();
  for (StreamTail* tail : tails) {
    const auto found = old.find(tail->header().rank);
    ranks_.push_back(found != old.end() ? std::move(found->second) : Rank{});
    ranks_.back().tail = tail, ranks_.back().rank = tail->header().rank;
  }
}

void Watch::advance(Rank* rank) {
  StreamTail& tail = *rank->tail;
  const std::vector<StreamTail::Advance> news = tail.advance();
  for (const StreamTail::Advance& event : news) {
    if (event.kind == StreamTail::Advance::Kind::stream_end) break;
    if (event.kind == StreamTail::Advance::Kind::step_end) rank->ended = tail.steps()[event.step_index].step;
    if (options_.deepens && event.kind == StreamTail::Advance::Kind::step_end && holds_layers(tail, event.step_index)) {
      rank->deep.push_back(rank->ended);
    }
    if (!options_.nan) continue;
    std::vector<NonfiniteHit> hits;
    bool clean = false;
    if (event.kind == StreamTail::Advance::Kind::rows) {
      rank->nonfinite.rows(tail, event.step_index, event.first_row, event.end_row, &hits);
    } else {
      rank->nonfinite.step_end(tail, event.step_index, &hits, &clean);
    }
    take_hits(rank, hits);
    if (clean) rank->bad = false;
  }
  if (!options_.replicas) {  // nothing is compared with what comes later
    for (size_t i = tail.steps().size(); i-- > 0;) {
      if (i + 1 < tail.steps().size() || tail.steps()[i].complete) tail.give_up(i);
    }
  }
  if (!tail.damage().empty() && !rank->reported) {
    rank->reported = true;
    problems_.push_back(fmt::format("rank {} is no longer watched: {}", rank->rank, tail.damage()));
  }
}

void Watch::take_hits(Rank* rank, const std::vector<NonfiniteHit>& hits) {
  for (const NonfiniteHit& hit : hits) {
    if (rank->bad) {
      ++following_records_;
      // What waits for the end of its step (gradients) may lie before what does not.
      const auto earlier = [&](const Candidate& other) {
        return other.finding.at.rank == rank->rank && other.finding.at.step == hit.step && hit.row < other.row;
      };
      const auto later = std::find_if(candidates_.begin(), candidates_.end(), earlier);
      if (later == candidates_.end()) continue;
      candidates_.erase(later);
    }
    rank->bad = true;
    Candidate candidate;
    candidate.finding.at = place_of(*rank->tail, hit);
    candidate.finding.ranks = {rank->rank};
    candidate.finding.what = words_of(*rank->tail, hit);
    candidate.received = hit.received;
    candidate.row = hit.row;
    candidate.order = static_cast<int>(rank->tail->sites()[hit.site].phase);
    candidate.since = Clock::now();
    candidates_.push_back(std::move(candidate));
  }
}

// The same value of another rank: a learning rate that was too large is everybody's.
bool Watch::is_said(const Candidate& candidate) const { return said_places_.contains(place_key(candidate.finding.at)); }

// Those that may have come from elsewhere wait until every rank has told its part of the step.
void Watch::release(bool all, std::vector<WatchFinding>* out) {
  if (candidates_.empty()) return;
  std::stable_sort(candidates_.begin(), candidates_.end(), [](const Candidate& left, const Candidate& right) {
    return std::tuple(left.finding.at.step, left.received, left.order) <
           std::tuple(right.finding.at.step, right.received, right.order);
  });
  std::vector<Candidate> later;
  for (Candidate& candidate : candidates_) {
    const int64_t step = candidate.finding.at.step;
    const bool told = std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) { return rank.ended >= step; });
    const bool follows = first_bad_step_ && (step > *first_bad_step_ ||
                                             (step == *first_bad_step_ && (candidate.received || is_said(candidate))));
    if (follows) {
      followed_.insert(candidate.finding.ranks.begin(), candidate.finding.ranks.end());
      ++following_records_;
    } else if (!candidate.received || told || all || Clock::now() - candidate.since > kPatience) {
      if (!first_bad_step_ || step < *first_bad_step_) said_places_.clear();
      first_bad_step_ = std::min(step, first_bad_step_.value_or(step));
      said_places_.insert(place_key(candidate.finding.at));
      out->push_back(std::move(candidate.finding));
    } else {
      later.push_back(std::move(candidate));
    }
  }
  candidates_ = std::move(later);
}

// Ranks begin one after the other, and what is compared without one is never compared with it. One that does not come
// is waited for only so long.
bool Watch::all_there() const {
  constexpr size_t kMostSteps = 32;
  size_t expected = static_cast<size_t>(std::max(run_.world_size(), 0)), most = 0;
  if (!manifest_.ranks.empty()) {
    expected = static_cast<size_t>(std::count_if(manifest_.ranks.begin(), manifest_.ranks.end(),
                                                 [&](int rank) { return rank < run_.world_size(); }));
  }
  for (const Rank& rank : ranks_) most = std::max(most, rank.tail->steps().size());
  return ranks_.size() >= expected || most > kMostSteps;
}

void Watch::compare_replicas(std::vector<WatchFinding>* out) {
  std::vector<StreamTail*> tails;
  size_t dictionary = 0;
  for (const Rank& rank : ranks_) {
    tails.push_back(rank.tail);
    dictionary += rank.tail->dictionary_size();
  }
  if (dictionary != dictionary_) {  // communicators may have become known
    dictionary_ = dictionary;
    run_ = Run::of(run_.directory(), manifest_, run_.take_streams());
  }
  for (ReplicaDesync& desync : replicas_.compare(run_, tails)) {
    const std::vector<int>& ranks = desync.outliers;
    if (std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return desynced_.contains(rank); })) {
      ++desync_records_;
      continue;
    }
    desynced_.insert(ranks.begin(), ranks.end());
    WatchFinding finding;
    finding.replicas = true;
    finding.what = words_of(desync);
    finding.at = std::move(desync.at);
    finding.ranks = ranks;
    out->push_back(std::move(finding));
  }
  if (replicas_.steps_left_out() > 0 && !std::exchange(said_left_out_, true)) {
    problems_.push_back(
        "steps are not compared between ranks any more: they are not whole on every rank (a rank is far "
        "behind, ended, or lost records)");
  }
}

void Watch::note_pace() {
  const auto newest = newest_step();
  const auto now = Clock::now();
  if (!newest || *newest < 0) return;
  if (!pace_step_ || *newest < *pace_step_) {
    pace_step_ = newest, pace_since_ = now;
    return;
  }
  const double seconds = std::chrono::duration<double>(now - pace_since_).count();
  if (*newest == *pace_step_ || seconds < kPaceSeconds) return;
  step_seconds_ = seconds / static_cast<double>(*newest - *pace_step_);
  pace_step_ = newest, pace_since_ = now;
}

double Watch::step_seconds() const {
  const bool in_it = pace_step_ && newest_step() == pace_step_;
  const double so_far = in_it ? std::chrono::duration<double>(Clock::now() - pace_since_).count() : 0;
  if (step_seconds_ == 0 && so_far < kPaceSeconds) return 0;
  return std::max(step_seconds_, so_far);
}

std::vector<const StreamHeader*> Watch::headers() const {
  std::vector<const StreamHeader*> headers;
  for (const Rank& rank : ranks_) headers.push_back(&rank.tail->header());
  return headers;
}

std::optional<int64_t> Watch::newest_step() const {
  std::optional<int64_t> newest;
  for (const Rank& rank : ranks_) {
    int64_t step = rank.ended;
    if (!rank.tail->steps().empty()) step = std::max(step, rank.tail->steps().back().step);
    if (step >= kPrologueStep) newest = std::max(newest.value_or(step), step);
  }
  return newest;
}

std::optional<int64_t> Watch::oldest_step() const {
  std::optional<int64_t> oldest;
  for (const Rank& rank : ranks_) {
    if (rank.tail->ended() || !rank.tail->damage().empty()) continue;
    oldest = std::min(oldest.value_or(rank.ended + 1), rank.ended + 1);
  }
  return oldest;
}

std::string Watch::uneven_steps() const {
  std::map<std::vector<int64_t>, std::vector<int>> ranks_by_steps;
  for (const Rank& rank : ranks_) ranks_by_steps[rank.deep].push_back(rank.rank);
  if (ranks_by_steps.size() < 2) return {};
  std::string text = "not the same steps were recorded by layer on every rank:";
  for (const auto& [steps, ranks] : ranks_by_steps) {
    text += fmt::format(" {}: {};", rank_list(ranks), steps.empty() ? "none" : number_list(steps));
  }
  text.pop_back();
  return text;
}

std::vector<std::string> Watch::summary() const {
  std::vector<std::string> out;
  if (following_records_ > 0) {
    const std::vector<int> ranks(followed_.begin(), followed_.end());
    out.push_back(fmt::format("not finite after that: {}{}", counted(following_records_, "more record"),
                              ranks.empty() ? "" : ", also on " + rank_list(ranks)));
  }
  if (desync_records_ > 0) {
    out.push_back(fmt::format("also not alike after that: {}", counted(desync_records_, "more tensor")));
  }
  uint64_t skipped = 0;
  for (const Rank& rank : ranks_) skipped = std::max(skipped, rank.nonfinite.skipped_steps());
  if (skipped > 0)
    out.push_back(
        fmt::format("{} with gradients that are not finite, skipped by a gradient scaler", counted(skipped, "step")));
  if (const std::string uneven = uneven_steps(); !uneven.empty()) out.push_back(uneven);
  if (!options_.replicas) return out;
  if (ranks_.size() == 1) {
    out.push_back("there was one rank, which has no replica: nothing was compared");
  } else if (ranks_.size() > 1 && !replicas_.any_compared()) {
    out.push_back(
        "no two ranks hold a parameter, optimizer state or reduced gradient that must be equal: nothing was compared");
  }
  if (replicas_.steps_left_out() > 0) {
    out.push_back(fmt::format("{} not compared between ranks: not whole on all of them",
                              counted(replicas_.steps_left_out(), "step")));
  }
  for (const std::string& text : replicas_.unknown()) {
    out.push_back("not known to be replicas: " + text);
    if (out.size() > 8) break;
  }
  return out;
}

}  // namespace forkpoint
