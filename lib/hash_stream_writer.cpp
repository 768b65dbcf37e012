// No global state and no threads: a writer lives inside other people's processes.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <unordered_map>

#include "lib/error.h"
#include "lib/hash_stream_columns.h"
#include "lib/hash_stream_file.h"
#include "lib/hash_stream_index.h"
#include "lib/hash_stream_launches.h"

namespace forkpoint {
namespace {

// Names compress well at any level; dictionaries are written once.
constexpr int kMetaLevel = 3;

struct SiteHash {
  size_t operator()(const Site& site) const {
    const std::hash<std::string_view> hash;
    size_t sum =
        static_cast<size_t>(site.phase) | static_cast<size_t>(site.kind) << 8 | static_cast<size_t>(site.role) << 16;
    for (const auto* text : {&site.layer, &site.op, &site.tensor, &site.communicator}) sum = sum * 31 + hash(*text);
    return sum;
  }
};

struct LayoutHash {
  size_t operator()(const Layout& layout) const {
    auto sum = static_cast<size_t>(layout.dtype);
    for (const auto* numbers : {&layout.shape, &layout.strides, &layout.global_shape, &layout.global_offset}) {
      for (int64_t number : *numbers) sum = (sum ^ static_cast<size_t>(number)) * 0x9E3779B97F4A7C15ull;
      sum = sum * 31 + numbers->size();
    }
    return sum;
  }
};

class Writer final : public HashStreamWriter {
 public:
  Writer(const std::string& path, StreamHeader header) : path_(path), file_(path) {
    if (header.pid == 0) describe_this_process(&header);
    encode(header, &body_);
    out_.insert(out_.end(), kStreamMagic, kStreamMagic + sizeof(kStreamMagic));
    ByteWriter version;
    version.u32(kFormatVersion);
    version.u32(0);
    out_.insert(out_.end(), version.bytes().begin(), version.bytes().end());
    put_meta_frame(FrameType::header);
    try {
      write_out();
    } catch (const Error&) {
      unlink(path.c_str());  // ours, and empty
      throw;
    }
  }

  uint32_t site_id(const Site& site) override {
    const auto [entry, is_new] = site_ids_.try_emplace(site, static_cast<uint32_t>(site_ids_.size()));
    if (is_new) {
      check_enums(site);
      sites_.push_back({site.phase, site_key(site)});
      pending_.sites.push_back(site);
    }
    return entry->second;
  }

  uint32_t layout_id(const Layout& layout) override {
    const auto found = layout_ids_.find(layout);
    if (found != layout_ids_.end()) return found->second;
    check_dims(layout);
    const auto id = static_cast<uint32_t>(layout_ids_.size());
    layout_ids_.emplace(layout, id);
    layout_keys_.push_back(layout_key(layout));
    pending_.layouts.push_back(layout);
    return id;
  }

  void add_communicator(const Communicator& communicator) override {
    if (std::find(communicators_.begin(), communicators_.end(), communicator) != communicators_.end()) return;
    communicators_.push_back(communicator);
    pending_.communicators.push_back(communicator);
  }

  void begin_step(int64_t step) override {
    check_usable();
    if (in_step_) throw Error(fmt::format("{}: step {} began within step {}.", path_, step, step_.summary.step));
    in_step_ = true;
    step_ = {};
    step_.summary.step = step;
    step_.ordinal = next_ordinal_++;
    sums_ = {};
  }

  void append(const Record& record, uint64_t bytes_hashed) override {
    check_usable();
    if (!in_step_) throw Error(fmt::format("{}: a record was appended outside any step.", path_));
    if (record.site >= sites_.size() || record.layout >= layout_keys_.size()) {
      throw Error(fmt::format("{}: a record names site {} of {} and layout {} of {}.", path_, record.site,
                              sites_.size(), record.layout, layout_keys_.size()));
    }
    const KnownSite& site = sites_[record.site];
    if (record.flags & kRecordEval) {
      ++sums_.eval_records;
    } else {
      sums_.add(site.phase, tree_leaf(site.key, layout_keys_[record.layout], record));
    }
    sums_.bytes_hashed += bytes_hashed;
    forkpoint::append(record, &rows_);
    if (rows_.size() >= kRecordsPerFrame) flush();
  }

  void append_launch(const LaunchRow& row, const BufferRow* buffers) override {
    check_usable();
    check_launch(row);
    // Before the row: so that a row's buffers are in its frame.
    if (launches_.rows.size() >= kLaunchesPerFrame || launches_.buffers.size() + row.buffers > kBuffersPerFrame)
      flush();
    sums_.launch_sum += launch_leaf(sites_[row.site].key, sums_.launches++, row, buffers);
    // A record's bytes were counted with the record.
    for (uint32_t i = 0; i < row.buffers && row.kind != LaunchKind::record; ++i) {
      if (!(buffers[i].flags & kBufferNoDigest)) sums_.bytes_hashed += buffers[i].bytes;
    }
    launches_.rows.push_back(row);
    launches_.buffers.insert(launches_.buffers.end(), buffers, buffers + row.buffers);
  }

  void end_step() override {
    check_usable();
    if (!in_step_) throw Error(fmt::format("{}: a step ended that had not begun.", path_));
    put_pending();
    step_.step_frame = file_.size_bytes() + out_.size();
    encode(sums_, &body_);
    put_meta_frame(FrameType::step, step_.summary.step, step_.ordinal);
    write_out();
    leave_step(true);
  }

  void add_gap(const Gap& gap) override {
    check_usable();
    encode(gap, &body_);
    index_.meta_frames.push_back(file_.size_bytes() + out_.size());
    put_meta_frame(FrameType::gap);
    write_out();
  }

  void add_coverage_limit(const CoverageLimit& limit) override {
    check_usable();
    encode(limit, &body_);
    index_.meta_frames.push_back(file_.size_bytes() + out_.size());
    put_meta_frame(FrameType::coverage_limit);
    write_out();
  }

  void add_to_header(const HeaderAddition& addition) override {
    check_usable();
    encode(addition, &body_);
    index_.meta_frames.push_back(file_.size_bytes() + out_.size());
    put_meta_frame(FrameType::header_addition);
    write_out();
  }

  void flush() override {
    check_usable();
    put_pending();
    write_out();
  }

  void finish() override {
    check_usable();
    put_pending();
    write_out();
    if (in_step_) leave_step(false);
    put_index();
    EndPart end;
    end.frames = sequence_ + 1;
    end.index_frames = index_frames_;
    encode(end, file_.size_bytes() + out_.size(), &body_);
    put_frame(FrameType::end, 0, body_.bytes(), static_cast<uint32_t>(body_.bytes().size()), {});
    write_out();
    broken_ = fmt::format("{}: the stream is finished.", path_);
  }

  uint64_t size_bytes() const override { return file_.size_bytes(); }

 private:
  struct KnownSite {
    Phase phase;
    Digest key;
  };

  void check_usable() const {
    if (!broken_.empty()) throw Error(broken_);
  }

  void check_enums(const Site& site) const {
    if (static_cast<int>(site.phase) >= kPhaseCount || static_cast<int>(site.kind) >= kKindCount ||
        static_cast<int>(site.role) >= kRoleCount) {
      throw Error(fmt::format("{}: site {} has a phase, kind or role that does not exist.", path_, site.tensor));
    }
  }

  void check_dims(const Layout& layout) const {
    const size_t dims = layout.shape.size();
    const auto fits = [&](const std::vector<int64_t>& numbers) { return numbers.empty() || numbers.size() == dims; };
    if (!fits(layout.strides) || !fits(layout.global_shape) ||
        layout.global_offset.size() != layout.global_shape.size() || static_cast<int>(layout.dtype) >= kDTypeCount) {
      throw Error(
          fmt::format("{}: layout {} does not have one stride and one place a dimension.", path_, to_string(layout)));
    }
  }

  void check_launch(const LaunchRow& row) const {
    if (!in_step_) throw Error(fmt::format("{}: a launch was appended outside any step.", path_));
    const uint64_t records = sums_.total_records() + sums_.eval_records;
    std::string fault;
    if (row.site >= sites_.size()) fault = fmt::format("names site {} of {}", row.site, sites_.size());
    if (static_cast<int>(row.kind) >= kLaunchKindCount) fault = "is of a kind that does not exist";
    if (row.buffers > kBuffersPerFrame) fault = fmt::format("has {} buffers", row.buffers);
    if (row.kind == LaunchKind::record && row.object >= records) {
      fault = fmt::format("stands for record {} of the {} that were appended", row.object, records);
    }
    if (row.kind == LaunchKind::retry && row.retry_of >= sums_.launches) {
      fault = fmt::format("repeats launch {} of the {} before it", row.retry_of, sums_.launches);
    }
    if (!fault.empty())
      throw Error(fmt::format("{}: launch {} of step {} {}.", path_, sums_.launches, step_.summary.step, fault));
  }

  // What waits, as frames: names first, so that no frame on disk names an id that is not there yet, and records before
  // the launches that stand for them.
  void put_pending() {
    if (!pending_.empty()) {
      encode(pending_, &body_);
      index_.meta_frames.push_back(file_.size_bytes() + out_.size());
      put_meta_frame(FrameType::dictionary);
      pending_ = {};
      pending_.first_site = static_cast<uint32_t>(sites_.size());
      pending_.first_layout = static_cast<uint32_t>(layout_keys_.size());
      pending_.first_communicator = static_cast<uint32_t>(communicators_.size());
    }
    if (rows_.size() != 0) put_records();
    if (!launches_.rows.empty()) put_launches();
  }

  void put_records() {
    step_.record_frames.push_back(file_.size_bytes() + out_.size());
    ++sums_.frames;
    stored_.clear();
    encoder_.encode(rows_, &stored_);
    put_rows(FrameType::records, rows_.size(), static_cast<uint32_t>(rows_.size()) * kRawRecordBytes);
    resize(&rows_, 0);
  }

  void put_launches() {
    step_.launch_frames.push_back(file_.size_bytes() + out_.size());
    ++sums_.launch_frames;
    stored_.clear();
    const size_t rows = launches_.rows.size();
    launch_encoder_.encode(launches_, sums_.launches - rows, &stored_);
    put_rows(FrameType::launches, rows, static_cast<uint32_t>(stored_.size()));
    launches_.clear();
  }

  // stored_ becomes a frame of the open step.
  void put_rows(FrameType type, size_t rows, uint32_t raw_bytes) {
    FrameHeader header;
    header.step = step_.summary.step;
    header.step_ordinal = step_.ordinal;
    header.records = static_cast<uint32_t>(rows);
    put_frame(type, 0, stored_, raw_bytes, header);
  }

  void leave_step(bool complete) {
    step_.summary = summarize(step_.summary.step, sums_, complete);
    if (sums_.frames != 0 || sums_.launch_frames != 0 || complete) index_.steps.push_back(step_);
    in_step_ = false;
    if (index_.steps.size() >= kStepsPerIndex) {
      put_index();
      write_out();
    }
  }

  void put_index() {
    if (index_.steps.empty() && index_.meta_frames.empty()) return;
    encode(index_, &body_);
    index_frames_.push_back(file_.size_bytes() + out_.size());
    put_meta_frame(FrameType::index);
    if (const LaunchIndexPart launches = launch_index_of(index_); !launches.empty()) {
      encode(launches, &body_);
      index_frames_.push_back(file_.size_bytes() + out_.size());
      put_meta_frame(FrameType::launch_index);
    }
    index_ = {};
  }

  // body_ becomes a frame, compressed where that saves anything.
  void put_meta_frame(FrameType type, int64_t step = 0, uint32_t ordinal = 0) {
    const std::vector<uint8_t>& raw = body_.bytes();
    FrameHeader header;
    header.step = step;
    header.step_ordinal = ordinal;
    const auto raw_bytes = static_cast<uint32_t>(std::min<size_t>(raw.size(), UINT32_MAX));
    stored_.resize(ZSTD_compressBound(raw.size()));
    const size_t stored = ZSTD_compress(stored_.data(), stored_.size(), raw.data(), raw.size(), kMetaLevel);
    if (ZSTD_isError(stored) || stored >= raw.size() || raw.size() / kMaxExpansion >= stored) {
      put_frame(type, 0, raw, raw_bytes, header);
    } else {
      stored_.resize(stored);
      put_frame(type, kFrameZstd, stored_, raw_bytes, header);
    }
  }

  void put_frame(FrameType type, uint8_t flags, const std::vector<uint8_t>& payload, uint32_t raw_bytes,
                 FrameHeader header) {
    if (raw_bytes > kMaxPayloadBytes) {
      broken_ = fmt::format("{}: a {} frame of {} bytes is larger than the {} that the format allows.", path_,
                            name(type), raw_bytes, kMaxPayloadBytes);
      throw Error(broken_);
    }
    header.type = type;
    header.flags = flags;
    header.stored_bytes = static_cast<uint32_t>(payload.size());
    header.raw_bytes = raw_bytes;
    header.sequence = sequence_++;
    header.checksum = digest_only(payload.data(), payload.size());
    uint8_t bytes[kFrameHeaderBytes];
    encode(header, bytes);
    out_.insert(out_.end(), bytes, bytes + sizeof(bytes));
    out_.insert(out_.end(), payload.begin(), payload.end());
    body_.bytes().clear();
  }

  // After a failure nothing more is written: what a frame lost must not be hidden by later ones.
  void write_out() {
    try {
      file_.append(out_);
    } catch (const Error& error) {
      broken_ = error.what();
      throw;
    }
    out_.clear();
  }

  std::string path_;
  AppendFile file_;
  std::string broken_;
  std::unordered_map<Site, uint32_t, SiteHash> site_ids_;
  std::unordered_map<Layout, uint32_t, LayoutHash> layout_ids_;
  std::vector<KnownSite> sites_;
  std::vector<uint64_t> layout_keys_;
  std::vector<Communicator> communicators_;
  DictionaryPart pending_;
  bool in_step_ = false;
  uint32_t next_ordinal_ = 0;
  IndexedStep step_;
  StepSums sums_;
  StepColumns rows_;
  LaunchColumns launches_;
  IndexPart index_;
  std::vector<uint64_t> index_frames_;
  uint64_t sequence_ = 0;
  ColumnEncoder encoder_;
  LaunchEncoder launch_encoder_;
  ByteWriter body_;
  std::vector<uint8_t> stored_;
  std::vector<uint8_t> out_;  // whole frames that are not written yet
};

// Who has the file that is in the way, as far as it can be told.
[[noreturn]] void throw_exists(const std::string& path) {
  std::string who = "it is not a readable hash stream";
  std::string hint = "Record to a new run folder.";
  try {
    const auto other = HashStreamReader::open(path);
    if (other->state() == StreamState::recording) {
      who = describe_writer(other->header()) + " is recording to it";
      hint = "Record to another run folder, or wait until that process ends.";
    } else {
      who = fmt::format("it was recorded by {} ({})", describe_writer(other->header()), name(other->state()));
    }
  } catch (const Error&) {
  }
  throw Error(fmt::format("{}: exists already: {}.", path, who), hint);
}

}  // namespace

std::unique_ptr<HashStreamWriter> HashStreamWriter::create(const std::string& path, const StreamHeader& header) {
  try {
    return std::make_unique<Writer>(path, header);
  } catch (const FileExistsError&) {
    throw_exists(path);
  }
}

}  // namespace forkpoint
