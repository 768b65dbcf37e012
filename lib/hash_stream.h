// One rank's hash stream on disk: an append-only file of checksummed frames. FORMAT.md has the grammar.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/launch.h"
#include "lib/record.h"

namespace forkpoint {

inline constexpr uint32_t kFormatVersion = 1;

using HeaderFacts = std::vector<std::pair<std::string, std::string>>;  // name, value

// What of the header became known after it was written: a process may record before it knows itself (a rank of PyTorch
// sends weights around before its first step). Readers see it in header().
struct HeaderAddition {
  std::string step_base;       // empty: as it was
  HeaderFacts facts;                 // new ones, and new values
};

// First frame of every stream. create() fills in the writing process (host to pid_namespace) where pid is 0.
struct StreamHeader {
  int rank = 0;
  int world_size = 1;
  std::string host;
  int64_t pid = 0;
  std::string boot_id;         // with pid, its start time and namespace: is the writer still alive?
  uint64_t pid_start_ticks = 0;
  uint64_t pid_namespace = 0;
  Level level = Level::step;
  std::string step_base;       // "step(n)", "first-step", "checkpoint", "unknown"
  int64_t every = 1;           // every n-th step is recorded
  std::string device;          // "NVIDIA H200", "cpu"
  HeaderFacts facts;                 // versions, parallel coordinates ("tp_rank")
};

// Sums over one step of one rank, by which equal steps are recognised without reading records. Records of an evaluation
// (kRecordEval) are in no sum: a run that evaluates more often than another is not another training.
struct PhaseSummary {
  Phase phase = Phase::forward;
  Digest digest;
  uint64_t records = 0;
};
struct LayerSummary {          // a leaf group: all records of one phase and layer
  Phase phase = Phase::forward;
  std::string_view layer;      // lives as long as the reader
  uint64_t digest = 0;         // sum of its leaves, first lane
  uint64_t records = 0;
};
struct StepSummary {
  int64_t step = 0;
  Digest digest;               // root of the tree
  uint64_t records = 0;        // in the tree; read_step gives records + eval_records rows
  uint64_t eval_records = 0;
  uint64_t bytes_hashed = 0;   // 0 when not known (complete is false)
  bool complete = true;        // false: the stream ended (or was damaged) within this step; sums over what is there
  uint64_t launches = 0;       // rows of read_launches; in no phase and not in `records`
  Digest launch_sum;           // sum of launch_leaf over them
};

// Appends to one file. Not thread-safe: one writer thread owns it. Errors (disk full, a second writer, unwritable
// folder) throw Error with the file's name; after a failed write the file is cut back to its last whole frame.
class HashStreamWriter {
 public:
  // Creates path (which must not exist) and locks it for this process.
  static std::unique_ptr<HashStreamWriter> create(const std::string& path, const StreamHeader& header);
  virtual ~HashStreamWriter() = default;  // without finish(): the stream reads as "died"

  // Ids count from 0 in order of first use; equal values give the same id.
  virtual uint32_t site_id(const Site& site) = 0;
  virtual uint32_t layout_id(const Layout& layout) = 0;
  virtual void add_communicator(const Communicator& communicator) = 0;

  // REQUIRES: steps begin in any order, but one at a time; append only within a step. micro_step and call as in Record.
  virtual void begin_step(int64_t step) = 0;
  virtual void append(const Record& record, uint64_t bytes_hashed) = 0;
  // Level::launch: the next row of the step's launches, and its row.buffers buffers. row.site: of site_id. As append,
  // only within a step; a row of LaunchKind::record only after the record that it stands for.
  virtual void append_launch(const LaunchRow& row, const BufferRow* buffers) = 0;
  virtual void end_step() = 0;

  virtual void add_gap(const Gap& gap) = 0;
  virtual void add_coverage_limit(const CoverageLimit& limit) = 0;
  virtual void add_to_header(const HeaderAddition& addition) = 0;

  // Puts what has been appended so far on disk as whole frames (also within a step).
  virtual void flush() = 0;
  // Ends the open step as incomplete if there is one, writes the index; nothing may be called afterwards.
  virtual void finish() = 0;

  virtual uint64_t size_bytes() const = 0;  // on disk so far
};

enum class StreamState { recording, died, whole };
std::string_view name(StreamState state);

// Columns of one step's records, in order of arrival. Reused between calls to avoid allocation.
struct StepColumns {
  std::vector<uint32_t> site;
  std::vector<uint32_t> layout;
  std::vector<int32_t> micro_step;
  std::vector<uint32_t> call;
  std::vector<Digest> digest;
  std::vector<float> absmax;
  std::vector<uint64_t> nonfinite;
  std::vector<uint32_t> word_sum;
  std::vector<uint8_t> flags;
  size_t size() const { return site.size(); }
  Record row(size_t i) const;
};

// Reads a stream that may be whole, cut anywhere, damaged, or still growing (then: a snapshot of what was there when it
// was opened). Const methods may be called from several threads at once.
class HashStreamReader {
 public:
  // Throws Error when path cannot be read, is not a hash stream, is of an unknown version or holds no whole header.
  static std::unique_ptr<HashStreamReader> open(const std::string& path);
  virtual ~HashStreamReader() = default;

  virtual const std::string& path() const = 0;
  virtual const StreamHeader& header() const = 0;
  virtual StreamState state() const = 0;
  virtual uint64_t size_bytes() const = 0;

  virtual std::span<const Site> sites() const = 0;
  virtual std::span<const Digest> site_keys() const = 0;        // site_key of each
  virtual std::span<const Layout> layouts() const = 0;
  virtual std::span<const uint64_t> layout_keys() const = 0;    // layout_key of each
  virtual std::span<const Communicator> communicators() const = 0;

  // Steps in file order. Where a frame of a step was lost, complete is false and gaps() says why.
  virtual std::span<const StepSummary> steps() const = 0;
  // The three below throw Error (file, byte offset, what was found) when a frame of the step fails its checksum. Phases
  // are stored (about 2 us); layers are added up from the records (about 50 us for 2,000), so read_step costs no more.
  virtual std::vector<PhaseSummary> phases(size_t step_index) const = 0;
  virtual std::vector<LayerSummary> layers(size_t step_index) const = 0;
  virtual void read_step(size_t step_index, StepColumns* columns) const = 0;
  // The step's launches, in order; none where none were recorded; where some were lost, those before the first of them.
  // Throws as read_step. The site, the record and the launch that a row names exist.
  virtual void read_launches(size_t step_index, LaunchColumns* launches) const = 0;

  // Gaps the recorder wrote, and those that reading found: a damaged frame, a cut tail.
  virtual std::span<const Gap> gaps() const = 0;
  virtual std::span<const CoverageLimit> coverage_limits() const = 0;

  // Checks the checksum of every frame of the file at memory speed, without decompressing. Returns a sentence about the
  // first damaged frame, or an empty string. diff calls it before it says identical. frames: how many were checked.
  virtual std::string verify(uint64_t* frames = nullptr) const = 0;
};

}  // namespace forkpoint
