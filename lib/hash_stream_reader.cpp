#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "lib/error.h"
#include "lib/hash_stream_load.h"

namespace forkpoint {
namespace {

// Large enough that a call costs nothing, small enough to be checked out of the L2 cache.
constexpr size_t kVerifyWindowBytes = 512 << 10;

// Whether the frames of one type are those that opening knows of, in their order.
struct FrameCheck {
  std::string_view kind;
  std::span<const uint64_t> named;  // byte offsets
  size_t seen = 0;
  bool is_next(uint64_t offset) { return seen < named.size() && named[seen++] == offset; }
};

class Reader final : public HashStreamReader {
 public:
  explicit Reader(const std::string& path) : file_(path), contents_(load_stream(file_)) {}

  const std::string& path() const override { return file_.path(); }
  const StreamHeader& header() const override { return contents_->header; }
  StreamState state() const override { return contents_->state; }
  uint64_t size_bytes() const override { return file_.size_bytes(); }
  std::span<const Site> sites() const override { return contents_->sites; }
  std::span<const Digest> site_keys() const override { return contents_->site_keys; }
  std::span<const Layout> layouts() const override { return contents_->layouts; }
  std::span<const uint64_t> layout_keys() const override { return contents_->layout_keys; }
  std::span<const Communicator> communicators() const override { return contents_->communicators; }
  std::span<const StepSummary> steps() const override { return contents_->steps; }
  std::span<const Gap> gaps() const override { return contents_->gaps; }
  std::span<const CoverageLimit> coverage_limits() const override { return contents_->limits; }

  std::vector<PhaseSummary> phases(size_t step_index) const override {
    const StepSums sums = sums_of(step_index);
    std::vector<PhaseSummary> result;
    for (int phase = 0; phase < kPhaseCount; ++phase) {
      if (sums.records[phase] != 0)
        result.push_back({static_cast<Phase>(phase), sums.phase[phase], sums.records[phase]});
    }
    return result;
  }

  std::vector<LayerSummary> layers(size_t step_index) const override {
    StepColumns columns;
    read_step(step_index, &columns);
    std::vector<LayerSummary> sums(layer_groups().size());
    for (size_t i = 0; i < columns.size(); ++i) {
      if (columns.flags[i] & kRecordEval) continue;
      const uint32_t site = columns.site[i];
      LayerSummary& sum = sums[group_of_site_[site]];
      sum.digest += tree_leaf(contents_->site_keys[site], contents_->layout_keys[columns.layout[i]], columns.row(i)).a;
      ++sum.records;
    }
    std::vector<LayerSummary> result;
    for (size_t group = 0; group < sums.size(); ++group) {
      if (sums[group].records == 0) continue;
      result.push_back({groups_[group].first, groups_[group].second, sums[group].digest, sums[group].records});
    }
    return result;
  }

  void read_step(size_t step_index, StepColumns* columns) const override {
    auto reader = take_step_reader();
    const std::string fault = reader->read(contents_->places[step_index], contents_->steps[step_index].step, columns);
    give_back(std::move(reader));
    if (!fault.empty()) throw_damaged(step_index, fault);
  }

  void read_launches(size_t step_index, LaunchColumns* launches) const override {
    auto reader = take_step_reader();
    const std::string fault =
        reader->read_launches(contents_->places[step_index], contents_->steps[step_index], launches);
    give_back(std::move(reader));
    if (!fault.empty()) throw_damaged(step_index, fault);
  }

  std::string verify(uint64_t* frames) const override;

 private:
  using LayerGroup = std::pair<Phase, std::string_view>;

  [[noreturn]] void throw_damaged(size_t step_index, const std::string& fault) const {
    throw Error(fmt::format("{}: step {} is damaged at {}.", path(), contents_->steps[step_index].step, fault),
                "Restore the file from a copy, or record this rank again.");
  }

  StepSums sums_of(size_t step_index) const {
    const StepPlace& place = contents_->places[step_index];
    StepSums sums;
    if (contents_->steps[step_index].complete && place.step_frame != 0) {
      FrameSource source(file_, contents_->end, 1024);
      std::string fault;
      const auto frame = source.frame_at(place.step_frame, &fault);
      if (frame && frame->header.type == FrameType::step && frame->header.step_ordinal == place.ordinal) {
        const auto payload = source.payload(*frame, &fault);
        if (payload && decode(ByteReader(*payload), &sums)) return sums;
      }
      sums = {};
    }
    StepColumns columns;
    read_step(step_index, &columns);
    add_to_sums(*contents_, columns, 0, &sums);
    return sums;
  }

  // Layers by phase, in order of first appearance. Made when first asked for: equal steps never ask.
  const std::vector<LayerGroup>& layer_groups() const {
    std::call_once(groups_once_, [this] {
      std::map<LayerGroup, uint32_t> numbers;
      std::vector<LayerGroup> order;
      for (const Site& site : contents_->sites) {
        const LayerGroup group(site.phase, site.layer);
        if (numbers.try_emplace(group, 0).second) order.push_back(group);
      }
      std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      for (size_t i = 0; i < order.size(); ++i) numbers[order[i]] = static_cast<uint32_t>(i);
      for (const Site& site : contents_->sites) group_of_site_.push_back(numbers[{site.phase, site.layer}]);
      groups_ = std::move(order);
    });
    return groups_;
  }

  std::unique_ptr<StepReader> take_step_reader() const {
    const std::lock_guard lock(readers_mutex_);
    if (readers_.empty()) return std::make_unique<StepReader>(file_, *contents_);
    auto reader = std::move(readers_.back());
    readers_.pop_back();
    return reader;
  }

  void give_back(std::unique_ptr<StepReader> reader) const {
    const std::lock_guard lock(readers_mutex_);
    readers_.push_back(std::move(reader));
  }

  InputFile file_;
  std::unique_ptr<StreamContents> contents_;
  mutable std::mutex readers_mutex_;
  mutable std::vector<std::unique_ptr<StepReader>> readers_;
  mutable std::once_flag groups_once_;
  mutable std::vector<LayerGroup> groups_;
  mutable std::vector<uint32_t> group_of_site_;
};

std::string Reader::verify(uint64_t* frames) const {
  if (!contents_->first_damage.empty()) return contents_->first_damage;
  FrameSource source(file_, contents_->end, kVerifyWindowBytes);
  const auto damaged = [&](uint64_t offset, const std::string& what) {
    return fmt::format("{}: damaged at byte {}: {}.", path(), offset, what);
  };
  uint64_t sequence = 0;
  FrameCheck records{"records", contents_->record_frames}, launches{"launches", contents_->launch_frames};
  uint64_t offset = kPrefixBytes;
  for (std::string fault; offset < contents_->end; ++sequence) {
    const auto frame = source.frame_at(offset, &fault);
    if (!frame || !source.stored_payload(*frame, &fault)) return damaged(offset, fault);
    if (frame->header.sequence != sequence) {
      return damaged(offset, fmt::format("expected frame number {}, found {}", sequence, frame->header.sequence));
    }
    for (FrameCheck* check : {&records, &launches}) {
      if (name(frame->header.type) == check->kind && !check->is_next(offset)) {
        return damaged(offset, fmt::format("a {} frame that the index does not name", check->kind));
      }
    }
    offset = frame->end();
  }
  for (const FrameCheck* check : {&records, &launches}) {
    if (check->seen != check->named.size())
      return damaged(offset, fmt::format("the index names a {} frame that is not there", check->kind));
  }
  if (frames != nullptr) *frames = sequence;
  return {};
}

}  // namespace

std::string_view name(StreamState state) {
  switch (state) {
    case StreamState::recording:
      return "recording";
    case StreamState::died:
      return "died";
    case StreamState::whole:
      return "whole";
  }
  return "unknown";
}

std::unique_ptr<HashStreamReader> HashStreamReader::open(const std::string& path) {
  return std::make_unique<Reader>(path);
}

}  // namespace forkpoint
