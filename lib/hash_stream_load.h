// What opening a hash stream finds: through the index of a whole stream, else by going over its frames. Not for callers
// outside lib.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lib/hash_stream_columns.h"
#include "lib/hash_stream_frames.h"
#include "lib/hash_stream_launches.h"

namespace forkpoint {

// Where the frames of one step lie.
struct StepPlace {
  uint32_t ordinal = 0;
  uint64_t step_frame = 0;   // byte offset; 0: none
  size_t first_frame = 0;    // into StreamContents::record_frames
  size_t frame_count = 0;
  size_t first_launch_frame = 0;  // into StreamContents::launch_frames
  size_t launch_frame_count = 0;
};

struct StreamContents {
  StreamHeader header;
  std::vector<Site> sites;
  std::vector<Digest> site_keys;
  std::vector<Layout> layouts;
  std::vector<uint64_t> layout_keys;
  std::vector<Communicator> communicators;
  // Names lost with a damaged dictionary frame; their places hold empty values. Both ascending, mostly empty.
  std::vector<uint32_t> lost_sites, lost_layouts;

  std::vector<StepSummary> steps;
  std::vector<StepPlace> places;        // one a step
  std::vector<uint64_t> record_frames;  // byte offsets, step by step
  std::vector<uint64_t> launch_frames;  // likewise
  std::vector<Gap> gaps;
  std::vector<CoverageLimit> limits;

  StreamState state = StreamState::died;
  uint64_t end = 0;                     // of the last frame that opening looked at
  std::string first_damage;             // a sentence; empty: none found
};

// Throws Error when the file has no readable header or is of a later version.
std::unique_ptr<StreamContents> load_stream(const InputFile& file);

// Parts of load_stream. add_meta: a dictionary, gap or coverage limit frame; false and *fault when it says nonsense, or
// names ids out of turn (with may_skip_ids: only when it names them twice). load_by_index: false when the stream has no
// whole index; *contents is then half filled.
bool add_meta(const Frame& frame, std::span<const uint8_t> payload, bool may_skip_ids, StreamContents* contents,
              std::string* fault);
bool load_by_index(const InputFile& file, StreamContents* contents);
void load_by_scan(const InputFile& file, StreamContents* contents);

// Reads the records and launches of steps. Not thread-safe; keeps its memory between calls.
class StepReader {
 public:
  StepReader(const InputFile& file, const StreamContents& contents) : file_(file), contents_(contents) {}
  // Empty when all is well, else a clause about the first fault ("byte 8192: a records frame ..."); the rows are then
  // those of the frames before it.
  std::string read(const StepPlace& place, int64_t step, StepColumns* columns);
  // As read. The step's launches are those that its summary counts; a step that is not complete may hold more rows on
  // disk, which are left out (FORMAT.md, Reading).
  std::string read_launches(const StepPlace& place, const StepSummary& summary, LaunchColumns* launches);
  // As read, of one frame, appended to *columns. next: where the step's next frame begins, if that is known (else 0).
  std::string append_frame(uint64_t offset, uint64_t next, const StepPlace& place, int64_t step, StepColumns* columns);
  // The same of a launches frame, whose first row must have the index that follows those in *launches.
  std::string append_launches(uint64_t offset, uint64_t next, const StepPlace& place, int64_t step, uint64_t index,
                              LaunchColumns* launches);

 private:
  // The payload of the step's frame of that type at offset, in buffer_; else an empty optional and *fault.
  std::optional<std::span<const uint8_t>> payload_at(uint64_t offset, FrameType type, uint64_t next,
                                                     const StepPlace& place, int64_t step, FrameHeader* header,
                                                     std::string* fault);
  uint64_t frame_after(uint64_t offset, const StepPlace& place) const;
  uint64_t count_records(const StepPlace& place) const;
  std::string check_ids(const StepColumns& columns, size_t first) const;
  std::string check_launches(std::span<const LaunchRow> rows, uint64_t index) const;
  const InputFile& file_;
  const StreamContents& contents_;
  ColumnDecoder decoder_;
  LaunchDecoder launch_decoder_;
  std::vector<uint8_t> buffer_;
};

// Adds records [first, size) to the sums; bytes_hashed stays as it is.
void add_to_sums(const StreamContents& contents, const StepColumns& columns, size_t first, StepSums* sums);
// Adds all launches, the first of which has the index sums->launches.
void add_to_sums(const StreamContents& contents, const LaunchColumns& launches, StepSums* sums);

// How many of the rows there are before one that stands for a record with a number from `records` on.
size_t rows_before_lost_record(std::span<const LaunchRow> rows, uint64_t records);
// Leaves the first `rows` rows and their buffers.
void truncate(LaunchColumns* launches, size_t rows);

}  // namespace forkpoint
