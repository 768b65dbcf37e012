// What opening a hash stream finds: through the index of a whole stream, else by going over its frames. Not for callers
// outside lib.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lib/hash_stream_columns.h"
#include "lib/hash_stream_frames.h"

namespace forkpoint {

// Where the frames of one step lie.
struct StepPlace {
  uint32_t ordinal = 0;
  uint64_t step_frame = 0;   // byte offset; 0: none
  size_t first_frame = 0;    // into StreamContents::record_frames
  size_t frame_count = 0;
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

// Reads the records of steps. Not thread-safe; keeps its memory between calls.
class StepReader {
 public:
  StepReader(const InputFile& file, const StreamContents& contents) : file_(file), contents_(contents) {}
  // Empty when all is well, else a clause about the first fault ("byte 8192: a records frame ..."); the rows are then
  // those of the frames before it.
  std::string read(const StepPlace& place, int64_t step, StepColumns* columns);
  // As read, of one frame, appended to *columns.
  std::string append_frame(uint64_t offset, uint64_t expected_end, const StepPlace& place, int64_t step,
                           StepColumns* columns);

 private:
  std::string check_ids(const StepColumns& columns, size_t first) const;
  const InputFile& file_;
  const StreamContents& contents_;
  ColumnDecoder decoder_;
  std::vector<uint8_t> buffer_;
};

// Adds records [first, size) to the sums; bytes_hashed stays as it is.
void add_to_sums(const StreamContents& contents, const StepColumns& columns, size_t first, StepSums* sums);

}  // namespace forkpoint
