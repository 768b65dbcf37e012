#include "lib/hash_stream_tail.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "lib/error.h"
#include "lib/hash_stream_load.h"

namespace forkpoint {
namespace {

constexpr size_t kWindowBytes = 64u << 10;
constexpr uint64_t kMostAtOnce = 64u << 20;

class Tail final : public StreamTail {
 public:
  explicit Tail(const std::string& path) : file_(path), reader_(file_, contents_) {}

  bool read_start() {
    if (file_.size_bytes() < kPrefixBytes + kFrameHeaderBytes) return false;
    FrameSource source(file_, file_.size_bytes(), kWindowBytes);
    std::string fault;
    const auto frame = source.frame_at(kPrefixBytes, &fault);
    if (!frame) return false;
    contents_.header = HashStreamReader::open(path())->header();  // says what is wrong with it, where it is no stream
    at_ = frame->end();
    contents_.state = StreamState::recording;
    return true;
  }

  std::vector<Advance> advance() override {
    std::vector<Advance> news;
    more_follows_ = false;
    const uint64_t size = current_size_bytes();
    if (size <= at_ || ended_ || !damage_.empty()) return news;
    contents_.end = size;
    FrameSource source(file_, size, kWindowBytes);
    const uint64_t stop = at_ + kMostAtOnce;
    std::string fault;
    while (at_ < size && !ended_ && damage_.empty()) {
      if (at_ >= stop) {
        more_follows_ = true;
        break;
      }
      const auto frame = source.frame_at(at_, &fault);
      if (!frame) {
        wait_for_rest(fault);
        break;
      }
      take(*frame, &source, &news);
      if (damage_.empty()) at_ = frame->end();
    }
    return news;
  }

  bool more_follows() const override { return more_follows_; }
  bool ended() const override { return ended_; }
  const std::string& damage() const override { return damage_; }

  void give_up(size_t step_index) override {
    steps_.erase(steps_.begin() + static_cast<std::ptrdiff_t>(step_index));
    spare_.push_back(std::move(columns_[step_index]));
    columns_.erase(columns_.begin() + static_cast<std::ptrdiff_t>(step_index));
    if (spare_.size() > 4) spare_.pop_back();
  }
  const StepColumns& columns(size_t step_index) const override { return columns_[step_index]; }
  size_t dictionary_size() const override {
    return contents_.sites.size() + contents_.layouts.size() + contents_.communicators.size();
  }

  const std::string& path() const override { return file_.path(); }
  const StreamHeader& header() const override { return contents_.header; }
  StreamState state() const override { return contents_.state; }
  uint64_t size_bytes() const override { return at_; }
  std::span<const Site> sites() const override { return contents_.sites; }
  std::span<const Digest> site_keys() const override { return contents_.site_keys; }
  std::span<const Layout> layouts() const override { return contents_.layouts; }
  std::span<const uint64_t> layout_keys() const override { return contents_.layout_keys; }
  std::span<const Communicator> communicators() const override { return contents_.communicators; }
  std::span<const StepSummary> steps() const override { return steps_; }
  std::span<const Gap> gaps() const override { return contents_.gaps; }
  std::span<const CoverageLimit> coverage_limits() const override { return contents_.limits; }
  void read_step(size_t step_index, StepColumns* columns) const override { *columns = columns_[step_index]; }
  void read_launches(size_t, LaunchColumns* launches) const override { launches->clear(); }  // they are passed over
  std::string verify(uint64_t* frames) const override {
    if (frames != nullptr) *frames = next_sequence_;
    return damage_;
  }

  std::vector<PhaseSummary> phases(size_t step_index) const override {
    StepSums sums;
    add_to_sums(contents_, columns_[step_index], 0, &sums);
    std::vector<PhaseSummary> result;
    for (int phase = 0; phase < kPhaseCount; ++phase) {
      if (sums.records[phase] != 0)
        result.push_back({static_cast<Phase>(phase), sums.phase[phase], sums.records[phase]});
    }
    return result;
  }

  std::vector<LayerSummary> layers(size_t step_index) const override {
    const StepColumns& columns = columns_[step_index];
    std::vector<LayerSummary> result;
    for (size_t i = 0; i < columns.size(); ++i) {
      if (columns.flags[i] & kRecordEval) continue;
      const Site& site = contents_.sites[columns.site[i]];
      const auto same = [&](const LayerSummary& sum) { return sum.phase == site.phase && sum.layer == site.layer; };
      auto at = std::find_if(result.begin(), result.end(), same);
      if (at == result.end()) at = result.insert(at, {site.phase, site.layer, 0, 0});
      at->digest +=
          tree_leaf(contents_.site_keys[columns.site[i]], contents_.layout_keys[columns.layout[i]], columns.row(i)).a;
      ++at->records;
    }
    return result;
  }

 private:
  uint64_t current_size_bytes() const {
    std::error_code error;
    const auto size = std::filesystem::file_size(path(), error);
    return error ? 0 : size;
  }

  // The writer is in the middle of its last frame. What is there of it may also come later than the file's size (a
  // network file system): zeros are looked at again for a while.
  void wait_for_rest(const std::string& fault) {
    constexpr int kMostTries = 100;
    if (fault.starts_with("the file ends")) return;
    tries_ = at_ == waiting_at_ ? tries_ + 1 : 0;
    waiting_at_ = at_;
    if (tries_ > kMostTries) set_damage(at_, fault);
  }

  void set_damage(uint64_t offset, const std::string& fault) {
    damage_ = fmt::format("{}: damaged at byte {}: {}.", path(), offset, fault);
  }

  void take(const Frame& frame, FrameSource* source, std::vector<Advance>* news) {
    const FrameHeader& header = frame.header;
    if (header.sequence != next_sequence_) {
      return set_damage(frame.offset,
                        fmt::format("expected frame number {}, found {}", next_sequence_, header.sequence));
    }
    ++next_sequence_;
    switch (header.type) {
      case FrameType::records:
        return take_records(frame, news);
      case FrameType::step:
        return take_step(frame, source, news);
      case FrameType::dictionary:
      case FrameType::gap:
      case FrameType::coverage_limit:
      case FrameType::header_addition:
        return take_meta(frame, source);
      case FrameType::end:
        ended_ = true;
        contents_.state = StreamState::whole;
        news->push_back({Advance::Kind::stream_end, steps_.size(), 0, 0});
        return;
      default:
        return;  // launches, indices, and what a later version added: nothing that is looked at here
    }
  }

  void take_meta(const Frame& frame, FrameSource* source) {
    std::string fault;
    const auto payload = source->payload(frame, &fault);
    if (!payload || !add_meta(frame, *payload, false, &contents_, &fault)) return set_damage(frame.offset, fault);
    // Of a stream that goes on losing records only the last are of interest.
    constexpr size_t kMostGaps = 4096;
    if (contents_.gaps.size() > kMostGaps) contents_.gaps.erase(contents_.gaps.begin());
  }

  // The step of a frame; the one before it did not end where it is another.
  size_t enter(const FrameHeader& header) {
    if (open_ && (ordinal_ != header.step_ordinal || steps_.back().step != header.step)) open_ = false;
    if (!open_) {
      StepSummary summary;
      summary.step = header.step;
      summary.complete = false;
      steps_.push_back(summary);
      if (spare_.empty()) {
        columns_.emplace_back();
      } else {
        columns_.push_back(std::move(spare_.back()));
        spare_.pop_back();
        resize(&columns_.back(), 0);
      }
      open_ = true, ordinal_ = header.step_ordinal, frames_ = 0;
    }
    return steps_.size() - 1;
  }

  void take_records(const Frame& frame, std::vector<Advance>* news) {
    const size_t index = enter(frame.header);
    StepColumns& columns = columns_[index];
    const size_t first = columns.size();
    StepPlace place;
    place.ordinal = frame.header.step_ordinal;
    const std::string fault = reader_.append_frame(frame.offset, frame.end(), place, frame.header.step, &columns);
    if (!fault.empty()) return set_damage(frame.offset, fault);
    ++frames_;
    news->push_back({Advance::Kind::rows, index, first, columns.size()});
  }

  void take_step(const Frame& frame, FrameSource* source, std::vector<Advance>* news) {
    const size_t index = enter(frame.header);
    std::string fault;
    const auto payload = source->payload(frame, &fault);
    StepSums sums;
    if (!payload || !decode(ByteReader(*payload), &sums)) {
      return set_damage(frame.offset, fault.empty() ? "a step frame does not hold what it should" : fault);
    }
    steps_[index] = summarize(frame.header.step, sums, sums.frames == frames_);
    open_ = false;
    news->push_back({Advance::Kind::step_end, index, columns_[index].size(), columns_[index].size()});
  }

  InputFile file_;
  StreamContents contents_;
  StepReader reader_;
  std::vector<StepSummary> steps_;
  std::deque<StepColumns> columns_;
  std::vector<StepColumns> spare_;
  uint64_t at_ = 0;  // of the next frame
  uint64_t next_sequence_ = 1;
  bool open_ = false;  // the last of steps_ goes on
  uint32_t ordinal_ = 0;
  uint64_t frames_ = 0;  // records frames of the open step
  bool ended_ = false, more_follows_ = false;
  uint64_t waiting_at_ = 0;
  int tries_ = 0;
  std::string damage_;
};

}  // namespace

std::unique_ptr<StreamTail> StreamTail::open(const std::string& path) {
  auto tail = std::make_unique<Tail>(path);
  if (!tail->read_start()) return nullptr;
  return tail;
}

}  // namespace forkpoint
