// Launches of damaged, foreign and forged streams: rows keep their index or are not there, and no length is believed.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "lib/error.h"
#include "lib/hash_stream_index.h"
#include "lib/hash_stream_launches.h"
#include "tests/support/sample_stream.h"
#include "tests/support/stream_exercise.h"
#include "tests/support/temporary_folder.h"

using namespace forkpoint;

TEST_CASE("of a step that lost a launches frame the rows before it are left, and a Gap says so") {
  const TemporaryFolder folder;
  make_sample(folder / "s.fkp");
  const Exercise whole = exercise_stream(folder / "s.fkp");
  const std::vector<uint8_t> bytes = read_bytes(folder / "s.fkp");
  const std::vector<Frame> frames = frames_of(folder / "s.fkp", FrameType::launches);
  REQUIRE(frames.size() == 4);
  uint64_t rows_before = 0;
  for (size_t lost = 0; lost < 3; ++lost) {
    CAPTURE(lost);
    // The header is damaged, so that its length cannot be trusted either; or nothing at all is left of the frame. The
    // index would still tell of it: without the end's last byte it is not used.
    std::vector<uint8_t> damaged = bytes, missing = bytes;
    damaged[frames[lost].offset + 20] ^= 4;
    damaged.back() ^= 1;
    missing.erase(missing.begin() + static_cast<long>(frames[lost].offset),
                  missing.begin() + static_cast<long>(frames[lost].end()));
    for (const auto& left : {damaged, missing}) {
      const MemoryFile file(left);
      const Exercise read = exercise_stream(file.path());
      REQUIRE(read.steps.size() == kSampleSteps);
      const ReadStep& step = read.steps[2];
      CHECK(step.summary.step == 2);
      CHECK_FALSE(step.summary.complete);
      CHECK(step.launch_error == "");
      CHECK(step.launches.rows.size() == rows_before);
      CHECK(is_prefix(step.launches, whole.steps[2].launches));
      CHECK(equal_rows(step.rows, whole.steps[2].rows));
      CHECK(equal_rows(read.steps[3].launches, whole.steps[3].launches));
      CHECK(std::any_of(read.gaps.begin(), read.gaps.end(), [](const Gap& gap) {
        return gap.first_step <= 2 && 2 <= gap.last_step && gap.reason.find("damaged at byte") != std::string::npos;
      }));
    }
    rows_before += frames[lost].header.records;

    damaged = bytes;  // only the payload: opening does not look at it, reading the step does
    damaged[frames[lost].offset + kFrameHeaderBytes + 9] ^= 1;
    const MemoryFile other(damaged);
    const auto reader = HashStreamReader::open(other.path());
    LaunchColumns launches;
    CHECK_THROWS_WITH_AS(reader->read_launches(2, &launches), doctest::Contains("step 2 is damaged at byte"), Error);
    CHECK(reader->verify().find("launches frame") != std::string::npos);
    CHECK_NOTHROW(reader->read_launches(3, &launches));
  }
}

TEST_CASE("a launch that stands for a lost record is not given another record") {
  const TemporaryFolder folder;
  make_sample(folder / "s.fkp");
  const Exercise whole = exercise_stream(folder / "s.fkp");
  const std::vector<Frame> frames = frames_of(folder / "s.fkp", FrameType::records);
  const LaunchKind record = LaunchKind::record;
  const std::vector<LaunchRow>& rows = whole.steps[2].launches.rows;
  const auto first = std::find_if(rows.begin(), rows.end(), [&](const LaunchRow& row) { return row.kind == record; });
  REQUIRE(first != rows.end());
  for (const bool in_header : {true, false}) {
    std::vector<uint8_t> bytes = read_bytes(folder / "s.fkp");
    // The first records frame of step 2; with the end's magic gone the index is not used.
    const auto frame = std::find_if(frames.begin(), frames.end(), [](const Frame& f) { return f.header.step == 2; });
    bytes[frame->offset + (in_header ? 20 : kFrameHeaderBytes + 5)] ^= 1;
    bytes.back() ^= 1;
    const MemoryFile file(bytes);
    const Exercise read = exercise_stream(file.path());
    REQUIRE(read.steps.size() == kSampleSteps);
    CHECK_FALSE(read.steps[2].summary.complete);
    CHECK(read.steps[2].launches.rows.size() == static_cast<size_t>(first - rows.begin()));
    CHECK(is_prefix(read.steps[2].launches, whole.steps[2].launches));
    CHECK(read.steps[3].launches.rows.size() == kSampleLaunches);
  }
}

TEST_CASE("a reader that does not know launches cannot pass them over") {
  const TemporaryFolder folder;
  make_sample(folder / "s.fkp");
  for (const FrameType type : {FrameType::launches, FrameType::launch_index}) {
    const std::vector<Frame> frames = frames_of(folder / "s.fkp", type);
    CHECK_FALSE(frames.empty());
    for (const Frame& frame : frames) {
      CHECK((frame.header.flags & kFrameSkippable) == 0);
      // Within the bounds of every frame, else it would be damage to such a reader and not something to refuse.
      if ((frame.header.flags & kFrameZstd) == 0) CHECK(frame.header.raw_bytes == frame.header.stored_bytes);
    }
  }
  // The end names the launch index among the index frames: who expects index frames only, looks at every frame instead.
  const InputFile file(folder / "s.fkp");
  FrameSource source(file, file.size_bytes(), 4096);
  std::string fault;
  EndPart end;
  const Frame end_frame = frames_of(folder / "s.fkp", FrameType::end).front();
  REQUIRE(decode(ByteReader(*source.payload(end_frame, &fault)), &end));
  const uint64_t index = frames_of(folder / "s.fkp", FrameType::launch_index).front().offset;
  CHECK(std::count(end.index_frames.begin(), end.index_frames.end(), index) == 1);
}

namespace {

// A stream without an index, with one step whose single launches frame holds `launches`, whatever they say.
std::vector<uint8_t> forged(const LaunchColumns& launches, const std::function<void(FrameHeader*)>& change_header,
                            const std::function<void(std::vector<uint8_t>*)>& change_payload) {
  const TemporaryFolder folder;
  const std::string path = folder / "s.fkp";
  const auto writer = writer_in_step(path);
  writer->flush();
  std::vector<uint8_t> bytes = read_bytes(path);
  FrameHeader header;
  header.type = FrameType::launches;
  header.step_ordinal = 0;
  header.records = static_cast<uint32_t>(launches.rows.size());
  header.sequence = 3;  // header, dictionary, records
  std::vector<uint8_t> payload;
  LaunchEncoder encoder;
  encoder.encode(launches, 0, &payload);
  change_payload(&payload);
  header.stored_bytes = header.raw_bytes = static_cast<uint32_t>(payload.size());
  header.checksum = digest_only(payload.data(), payload.size());
  change_header(&header);
  bytes.resize(bytes.size() + kFrameHeaderBytes);
  encode(header, bytes.data() + bytes.size() - kFrameHeaderBytes);
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  return bytes;
}

Exercise read_forged(
    const LaunchColumns& launches, const std::function<void(FrameHeader*)>& change_header = [](FrameHeader*) {},
    const std::function<void(std::vector<uint8_t>*)>& change_payload = [](std::vector<uint8_t>*) {}) {
  const MemoryFile file(forged(launches, change_header, change_payload));
  return exercise_stream(file.path());
}

}  // namespace

TEST_CASE("launches frames that lie, with checksums that fit, are refused in words") {
  const LaunchColumns good = random_launches(5, 20);
  const auto is_refused = [&](const Exercise& read, const char* words) {
    CAPTURE(words);
    CHECK(read.error == "");
    CHECK(read.launches() == 0);
    CHECK(read.damage.find(words) != std::string::npos);
    CHECK(read.rows() == 100);
  };
  CHECK(read_forged(good).launches() == 20);
  const auto with_row = [&](const std::function<void(LaunchRow*)>& change) {
    LaunchColumns launches = good;
    change(&launches.rows[3]);
    return read_forged(launches);
  };
  is_refused(with_row([](LaunchRow* row) { row->kind = static_cast<LaunchKind>(kLaunchKindCount); }),
             "cannot be decoded");
  is_refused(with_row([](LaunchRow* row) { row->buffers += 1; }), "cannot be decoded");
  is_refused(with_row([](LaunchRow* row) { row->buffers = 0xFFFFFFFFu; }), "cannot be decoded");
  is_refused(with_row([](LaunchRow* row) { row->site = 24; }), "names site 24 of 24");
  is_refused(with_row([](LaunchRow* row) { row->kind = LaunchKind::retry, row->retry_of = 3; }),
             "launch 3 repeats launch 3");
  // A record that is not there ends the launches that can be used: they may have been written later than the cut.
  CHECK(with_row([](LaunchRow* row) { row->kind = LaunchKind::record, row->object = 100; }).launches() == 3);
  CHECK(with_row([](LaunchRow* row) { row->kind = LaunchKind::record, row->object = 99; }).launches() == 20);

  is_refused(read_forged(good, [](FrameHeader* header) { --header->records; }), "cannot be decoded");
  is_refused(read_forged(good, [](FrameHeader* header) { header->records = 1000; }), "cannot be decoded");
  is_refused(read_forged(good, [](FrameHeader* header) { ++header->raw_bytes; }), "claims to hold");
  is_refused(read_forged(good, [](FrameHeader* header) { header->raw_bytes = kMaxPayloadBytes; }), "claims to hold");
  const auto with_payload = [&](size_t at, uint32_t value) {
    return read_forged(
        good, [](FrameHeader*) {},
        [&](std::vector<uint8_t>* payload) { std::memcpy(payload->data() + at, &value, sizeof(value)); });
  };
  is_refused(with_payload(0, 1), "expected launch 0 of the step, found launch 1");
  for (const uint32_t buffers : {0u, 1u, 65536u, 65537u, 0xFFFFFFFFu})
    is_refused(with_payload(8, buffers), "cannot be decoded");
}

TEST_CASE("a model before the first row, or a repeated digest without a model, is no launch") {
  LaunchColumns one;
  one.rows.resize(1);
  one.rows[0].buffers = 1;
  one.buffers.resize(1);
  std::vector<uint8_t> payload;
  LaunchEncoder().encode(one, 0, &payload);
  // first:u64 buffers:u32, then planes of one row each: a constant byte behind a tag of zero.
  constexpr size_t kRowModel = 12, kBufferModel = kRowModel + 8, kRepeats = kBufferModel + 8 + sizeof(Digest);
  for (const size_t at : {kRowModel, kBufferModel, kRepeats}) {
    CAPTURE(at);
    LaunchColumns decoded;
    uint64_t first = 0;
    CHECK(LaunchDecoder().decode(payload, 1, &first, &decoded));
    CHECK(equal_rows(decoded, one));
    std::vector<uint8_t> bad = payload;
    REQUIRE(bad[at] == 0);
    bad[at + 1] = 1;
    CHECK_FALSE(LaunchDecoder().decode(bad, 1, &first, &decoded));
    CHECK(equal_rows(decoded, one));  // as it was
  }
}

TEST_CASE("a small payload cannot ask for much memory, though rows that are all alike need next to none") {
  LaunchColumns alike;
  alike.rows.resize(kLaunchesPerFrame);
  std::vector<uint8_t> payload;
  LaunchEncoder().encode(alike, 0, &payload);
  const size_t least = kLaunchesPerFrame * kRawLaunchBytes / kMaxExpansion;
  CHECK(payload.size() == least);
  LaunchColumns decoded;
  uint64_t first = 0;
  CHECK_FALSE(LaunchDecoder().decode(std::span(payload).first(least - 1), kLaunchesPerFrame, &first, &decoded));
  CHECK(decoded.rows.capacity() == 0);
  CHECK(LaunchDecoder().decode(payload, kLaunchesPerFrame, &first, &decoded));
  CHECK(equal_rows(decoded, alike));
}

TEST_CASE("a payload cut at any byte is no launches frame") {
  const LaunchColumns launches = random_launches(9, 50);
  std::vector<uint8_t> payload;
  LaunchEncoder().encode(launches, 0, &payload);
  LaunchDecoder decoder;
  LaunchColumns decoded;
  uint64_t first = 0;
  for (size_t size = 0; size < payload.size(); ++size) {
    CHECK_FALSE(decoder.decode(std::span(payload).first(size), 50, &first, &decoded));
    CHECK(decoded.rows.empty());
    CHECK(decoded.buffers.empty());
  }
  payload.resize(payload.size() + 7);  // what a later version may add
  CHECK(decoder.decode(payload, 50, &first, &decoded));
  CHECK(equal_rows(decoded, launches));
}
