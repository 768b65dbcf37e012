// Opening a stream that has no whole index: it is being recorded, its writer died, or the file is damaged. Every whole
// frame is used; what cannot be used becomes a Gap that says where and why.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lib/error.h"
#include "lib/hash_stream_load.h"

namespace forkpoint {
namespace {

constexpr size_t kScanWindowBytes = 4096;  // mostly headers: hop from one to the next

// Whether gap and ids of steps are decided is known only when all frames have been seen.
struct ScannedStep {
  int64_t step = 0;
  StepPlace place;
  StepSums stored;          // of the step frame
  bool has_end = false;     // the step frame was read
  bool is_damaged = false;  // frames are missing; a Gap says so already
  bool has_hole = false;    // something was lost right before one of its frames: it may have been records
};

class Scanner {
 public:
  Scanner(const InputFile& file, StreamContents* contents)
      : file_(file), contents_(*contents), source_(file, file.size_bytes(), kScanWindowBytes) {}

  void run() {
    scan_frames();
    const bool alive = !ended_ && writer_is_alive(contents_.header, file_);
    // A live writer is in the middle of its last frame: that is no damage.
    if (alive && tail_is_open_) {
      contents_.gaps.pop_back();
      damages_.pop_back();
    }
    if (!damages_.empty()) contents_.first_damage = damages_.front();
    for (size_t i = 0; i < steps_.size(); ++i) add_step(i, alive);
    if (contents_.first_damage.empty() && !damages_.empty()) contents_.first_damage = damages_.front();
    const bool whole = ended_ && damages_.empty();
    contents_.state = whole ? StreamState::whole : alive ? StreamState::recording : StreamState::died;
  }

 private:
  void scan_frames() {
    uint64_t offset = kPrefixBytes;
    while (offset < file_.size_bytes()) {
      std::string fault;
      auto frame = source_.frame_at(offset, &fault);
      if (!frame) {
        frame = source_.find_frame(offset + 1);
        add_damage(offset, fault, frame ? frame->offset : file_.size_bytes());
        tail_is_open_ = !frame;
        if (!frame) break;
        after_damage_ = true;
      }
      take_frame(*frame);
      offset = frame->end();
    }
    contents_.end = offset;
    close_gaps(next_step());
  }

  void take_frame(const Frame& frame) {
    const FrameHeader& header = frame.header;
    if (ended_) return add_damage(frame.offset, "a frame after the end of the stream", frame.end());
    if (header.sequence < next_sequence_) {
      return add_damage(frame.offset, fmt::format("frame number {} a second time", header.sequence), frame.end());
    }
    if (header.sequence > next_sequence_ && !after_damage_) {
      add_damage(frame.offset, fmt::format("expected frame number {}, found {}", next_sequence_, header.sequence),
                 frame.offset);
    }
    after_damage_ = false;
    next_sequence_ = header.sequence + 1;
    const bool is_known = header.type >= FrameType::header && header.type <= FrameType::header_addition;
    if (!is_known && (header.flags & kFrameSkippable)) return;
    if (!is_known || (header.flags & ~(kFrameZstd | kFrameSkippable))) {
      throw Error(
          fmt::format("{}: a frame of type {} with flags {:#x} at byte {} is not known to hash stream format {}.",
                      file_.path(), static_cast<int>(header.type), header.flags, frame.offset, kFormatVersion),
          "Read it with a later forkpoint.");
    }
    switch (header.type) {
      case FrameType::header:
      case FrameType::index:
      case FrameType::launch_index:
        break;
      case FrameType::records:
        enter_step(header).place.frame_count++;
        contents_.record_frames.push_back(frame.offset);
        break;
      case FrameType::launches:
        enter_step(header).place.launch_frame_count++;
        contents_.launch_frames.push_back(frame.offset);
        break;
      default:
        take_payload(frame);
    }
  }

  void take_payload(const Frame& frame) {
    std::string fault;
    const auto payload = source_.payload(frame, &fault);
    if (!payload || !take_known(frame, *payload, &fault)) add_damage(frame.offset, fault, frame.end());
  }

  bool take_known(const Frame& frame, std::span<const uint8_t> payload, std::string* fault) {
    if (frame.header.type == FrameType::step) {
      ScannedStep& step = enter_step(frame.header);
      step.has_end = decode(ByteReader(payload), &step.stored);
      if (step.has_end) step.place.step_frame = frame.offset;
      if (!step.has_end) *fault = "a step frame does not hold what it should";
      return step.has_end;
    }
    if (frame.header.type == FrameType::end) {
      ended_ = true;
      return true;
    }
    return add_meta(frame, payload, true, &contents_, fault);
  }

  // The step of a frame that belongs to one.
  ScannedStep& enter_step(const FrameHeader& header) {
    const bool after_hole = !open_gaps_.empty();
    close_gaps(header.step);
    if (steps_.empty() || steps_.back().place.ordinal != header.step_ordinal || steps_.back().step != header.step) {
      ScannedStep step;
      step.step = header.step;
      step.place.ordinal = header.step_ordinal;
      step.place.first_frame = contents_.record_frames.size();
      step.place.first_launch_frame = contents_.launch_frames.size();
      steps_.push_back(step);
    }
    steps_.back().has_hole |= after_hole;
    return steps_.back();
  }

  // Where whatever comes after the frames seen so far belongs: to the open step, else to the one after the last.
  int64_t next_step() const {
    if (steps_.empty()) return kPrologueStep;
    const ScannedStep& last = steps_.back();
    const uint64_t every = static_cast<uint64_t>(std::max<int64_t>(contents_.header.every, 1));
    return last.has_end ? static_cast<int64_t>(static_cast<uint64_t>(last.step) + every) : last.step;
  }

  // Bytes [offset, next) are of no use.
  void add_damage(uint64_t offset, const std::string& fault, uint64_t next) {
    std::string reason = fmt::format("{}: damaged at byte {}: {}", file_.path(), offset, fault);
    if (next > offset) reason += fmt::format("; {} bytes skipped", next - offset);
    damages_.push_back(reason + ".");
    contents_.gaps.push_back({next_step(), next_step(), 0, reason});
    open_gaps_.push_back(contents_.gaps.size() - 1);
  }

  // What was lost lies between the last step seen before the damage and the first one after.
  void close_gaps(int64_t step) {
    for (size_t index : open_gaps_) {
      Gap& gap = contents_.gaps[index];
      gap.first_step = std::min(gap.first_step, step);
      gap.last_step = step;
    }
    open_gaps_.clear();
  }

  // Decides what is known of a step. Records are looked at only where the step frame cannot be trusted alone.
  void add_step(size_t index, bool alive) {
    ScannedStep& scanned = steps_[index];
    const bool frames_there = scanned.has_end && scanned.stored.frames == scanned.place.frame_count &&
                              scanned.stored.launch_frames == scanned.place.launch_frame_count;
    if (frames_there && damages_.empty()) {
      contents_.steps.push_back(summarize(scanned.step, scanned.stored, true));
      contents_.places.push_back(scanned.place);
      return;
    }
    StepSums sums;
    drop_damaged_frames(&scanned, &sums);
    const bool records_there = !scanned.is_damaged && scanned.stored.frames == scanned.place.frame_count;
    const bool records_shifted = scanned.is_damaged || (scanned.has_hole && !(scanned.has_end && records_there));
    drop_lost_launches(&scanned, records_shifted ? 0 : sums.total_records() + sums.eval_records, &sums);
    const bool complete = frames_there && !scanned.is_damaged && sums.root() == scanned.stored.root() &&
                          sums.launches == scanned.stored.launches && sums.launch_sum == scanned.stored.launch_sum;
    if (!complete && !has_gap(scanned.step)) explain_incomplete(scanned, index + 1 == steps_.size(), alive);
    if (complete) sums.bytes_hashed = scanned.stored.bytes_hashed;
    contents_.steps.push_back(summarize(scanned.step, sums, complete));
    contents_.places.push_back(scanned.place);
  }

  bool has_gap(int64_t step) const {
    return std::any_of(contents_.gaps.begin(), contents_.gaps.end(),
                       [&](const Gap& gap) { return gap.first_step <= step && step <= gap.last_step; });
  }

  void explain_incomplete(const ScannedStep& scanned, bool is_last, bool alive) {
    if (scanned.has_end) {
      const StepSums& stored = scanned.stored;
      const auto s = [](uint64_t count, const char* more) { return count == 1 ? "" : more; };
      const uint64_t records = stored.total_records();
      std::string told = fmt::format("{} record{} in {} frame{}", records, s(records, "s"), stored.frames, s(stored.frames, "s"));
      if (stored.launches != 0) {
        told += fmt::format(" and {} launch{} in {}", stored.launches, s(stored.launches, "es"), stored.launch_frames);
      }
      add_step_gap(scanned.step, fmt::format("step {} does not hold the {} that its end tells of", scanned.step, told));
    } else if (!is_last) {
      add_step_gap(scanned.step, fmt::format("step {} has no end", scanned.step));
    } else if (!alive && !ended_) {
      add_step_gap(scanned.step, fmt::format("the stream ends within step {}: {} ended before the step did",
                                             scanned.step, describe_writer(contents_.header)));
    }
  }

  void add_step_gap(int64_t step, const std::string& what) {
    contents_.gaps.push_back({step, step, 0, fmt::format("{}: {}", file_.path(), what)});
  }

  void drop_damaged_frames(ScannedStep* scanned, StepSums* sums) {
    StepReader reader(file_, contents_);
    StepColumns columns;
    auto& frames = contents_.record_frames;
    size_t kept = 0;
    for (size_t i = 0; i < scanned->place.frame_count; ++i) {
      const uint64_t offset = frames[scanned->place.first_frame + i];
      resize(&columns, 0);
      const std::string fault = reader.append_frame(offset, 0, scanned->place, scanned->step, &columns);
      if (fault.empty()) {
        add_to_sums(contents_, columns, 0, sums);
        frames[scanned->place.first_frame + kept++] = offset;
        continue;
      }
      add_step_damage(scanned, fault);
    }
    scanned->place.frame_count = kept;
  }

  // Rows are known by their index, so only those before the first that was lost can be used. A row that stands for a
  // record with a number from `records` on is lost with it.
  void drop_lost_launches(ScannedStep* scanned, uint64_t records, StepSums* sums) {
    StepReader reader(file_, contents_);
    LaunchColumns launches;
    StepPlace& place = scanned->place;
    const size_t count = std::exchange(place.launch_frame_count, 0);
    while (place.launch_frame_count < count) {
      const uint64_t offset = contents_.launch_frames[place.first_launch_frame + place.launch_frame_count];
      launches.clear();
      const std::string fault = reader.append_launches(offset, 0, place, scanned->step, sums->launches, &launches);
      if (!fault.empty()) return add_step_damage(scanned, fault);
      ++place.launch_frame_count;
      const size_t rows = launches.rows.size(), kept = rows_before_lost_record(launches.rows, records);
      truncate(&launches, kept);
      add_to_sums(contents_, launches, sums);
      if (kept < rows) return;
    }
  }

  void add_step_damage(ScannedStep* scanned, const std::string& fault) {
    scanned->is_damaged = true;
    damages_.push_back(fmt::format("{}: damaged at {}.", file_.path(), fault));
    add_step_gap(scanned->step, "damaged at " + fault);
  }

  const InputFile& file_;
  StreamContents& contents_;
  FrameSource source_;
  std::vector<ScannedStep> steps_;
  std::vector<std::string> damages_;  // sentences
  std::vector<size_t> open_gaps_;
  uint64_t next_sequence_ = 0;
  bool after_damage_ = false;
  bool ended_ = false;
  bool tail_is_open_ = false;
};

}  // namespace

void load_by_scan(const InputFile& file, StreamContents* contents) { Scanner(file, contents).run(); }

}  // namespace forkpoint
