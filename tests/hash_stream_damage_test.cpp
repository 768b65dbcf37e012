// Cut, flipped, foreign and forged bytes: every whole frame is returned, the rest is a Gap with a sentence, and nothing
// that differs from what was written ever looks whole.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "lib/digest_mix.h"
#include "lib/error.h"
#include "lib/hash_stream_format.h"
#include "lib/hash_stream_frames.h"
#include "tests/support/sample_stream.h"
#include "tests/support/stream_exercise.h"
#include "tests/support/temporary_folder.h"

using namespace forkpoint;

namespace {

struct Sample {
  std::vector<uint8_t> bytes;
  std::vector<Frame> frames;
  Exercise whole;
};

// Not finished: no index, so that the frames alone must tell everything.
Sample make(bool finished) {
  const TemporaryFolder folder;
  const std::string path = folder / "s.fkp";
  {
    const auto writer = HashStreamWriter::create(path, sample_header());
    write_sample(writer.get());
    if (finished) writer->finish();
  }
  Sample sample;
  sample.bytes = read_bytes(path);
  sample.whole = exercise_stream(path);
  const InputFile file(path);
  FrameSource source(file, file.size_bytes(), 4096);
  std::string fault;
  for (uint64_t offset = kPrefixBytes; offset < sample.bytes.size();) {
    sample.frames.push_back(*source.frame_at(offset, &fault));
    offset = sample.frames.back().end();
  }
  return sample;
}

Exercise read(std::span<const uint8_t> bytes, bool forged = false) {
  const MemoryFile file(bytes);
  return exercise_stream(file.path(), forged);
}

const Frame& frame_of(const Sample& sample, FrameType type, int number = 0) {
  for (const Frame& frame : sample.frames) {
    if (frame.header.type == type && number-- == 0) return frame;
  }
  throw std::logic_error("the sample has no such frame");
}

// Makes the checksums of a frame that was changed fit again.
void seal(std::vector<uint8_t>* bytes, uint64_t offset, FrameHeader header) {
  header.checksum = digest_only(bytes->data() + offset + kFrameHeaderBytes, header.stored_bytes);
  encode(header, bytes->data() + offset);
}

// Steps that claim to be complete and can be read hold what was written.
void check_only_truth(const Exercise& damaged, const Exercise& whole) {
  for (const ReadStep& step : damaged.steps) {
    if (!step.summary.complete || !step.error.empty()) continue;
    const auto original = std::find_if(whole.steps.begin(), whole.steps.end(),
                                       [&](const ReadStep& other) { return other.summary.step == step.summary.step; });
    REQUIRE(original != whole.steps.end());
    CHECK(equal_rows(step.rows, original->rows));
    CHECK(step.summary.digest == original->summary.digest);
  }
  for (const ReadStep& step : damaged.steps) {
    const auto original = std::find_if(whole.steps.begin(), whole.steps.end(),
                                       [&](const ReadStep& other) { return other.summary.step == step.summary.step; });
    REQUIRE(original != whole.steps.end());
    CHECK(is_prefix(step.launches, original->launches));  // never a row under another index
    if (!step.summary.complete || !step.launch_error.empty()) continue;
    CHECK(equal_rows(step.launches, original->launches));
    CHECK(step.summary.launch_sum == original->summary.launch_sum);
  }
}

}  // namespace

TEST_CASE("a stream cut at any byte gives every whole frame before the cut and is never whole") {
  for (const bool finished : {false, true}) {
    const Sample sample = make(finished);
    for (size_t cut = 0; cut < sample.bytes.size(); ++cut) {
      CAPTURE(cut);
      const Exercise damaged = read(std::span(sample.bytes).first(cut));
      size_t steps = 0;
      uint64_t rows = 0, launches = 0;
      bool within_frame = true;
      for (const Frame& frame : sample.frames) {
        if (frame.end() == cut) within_frame = false;
        if (frame.end() > cut) break;
        steps += frame.header.type == FrameType::step;
        rows += frame.header.type == FrameType::records ? frame.header.records : 0;
        launches += frame.header.type == FrameType::launches ? frame.header.records : 0;
      }
      if (cut < sample.frames.front().end()) {
        CHECK(damaged.error != "");
        continue;
      }
      REQUIRE(damaged.error == "");
      CHECK(damaged.state == StreamState::died);
      CHECK(damaged.complete_steps() == steps);
      CHECK(damaged.rows() == rows);
      CHECK(damaged.launches() == launches);
      CHECK((damaged.damage != "") == within_frame);
      if (within_frame)
        CHECK(damaged.gaps.back().reason.find("the file ends at byte " + std::to_string(cut)) != std::string::npos);
      check_only_truth(damaged, sample.whole);
    }
  }
}

TEST_CASE("a flipped bit at any byte is found, and every step that can still be read is as it was written") {
  for (const bool finished : {false, true}) {
    const Sample sample = make(finished);
    std::vector<uint8_t> bytes = sample.bytes;
    for (size_t at = 0; at < bytes.size(); ++at) {
      for (const uint8_t mask : {static_cast<uint8_t>(1u << mix64(at) % 8), uint8_t{0xFF}}) {
        if (mask == 0xFF && at % 8 != 0) continue;
        CAPTURE(at);
        bytes[at] ^= mask;
        const Exercise damaged = read(bytes);
        CHECK_FALSE(damaged.looks_perfect());
        if (damaged.error.empty()) {
          CHECK(damaged.damage != "");
          check_only_truth(damaged, sample.whole);
        }
        bytes[at] ^= mask;
      }
    }
  }
}

TEST_CASE("after a damaged frame the reader goes on with the next whole one") {
  const Sample sample = make(false);
  for (const Frame& frame : sample.frames) {
    if (frame.header.type == FrameType::header) continue;
    CAPTURE(name(frame.header.type));
    std::vector<uint8_t> bytes = sample.bytes;
    bytes[frame.offset + 20] ^= 4;  // in its header: its length cannot be trusted either
    const Exercise damaged = read(bytes);
    REQUIRE(damaged.error == "");
    CHECK(damaged.damage.find("damaged at byte " + std::to_string(frame.offset)) != std::string::npos);
    const bool of_step = frame.header.type == FrameType::records || frame.header.type == FrameType::step ||
                         frame.header.type == FrameType::launches;
    if (of_step) {
      uint64_t lost = frame.header.type == FrameType::records ? frame.header.records : 0;
      if (frame.header.step == 6) CHECK(damaged.steps.size() == kSampleSteps - 1);  // nothing else tells of it
      if (frame.header.step != 6) CHECK(damaged.complete_steps() == kSampleSteps - 1);
      CHECK(damaged.rows() == sample.whole.rows() - lost);
      const auto covers = [&](const Gap& gap) {
        return gap.first_step <= frame.header.step && frame.header.step <= gap.last_step;
      };
      CHECK(std::any_of(damaged.gaps.begin(), damaged.gaps.end(), covers));
    }
    check_only_truth(damaged, sample.whole);
  }
}

TEST_CASE("records whose names were lost with a damaged dictionary are a Gap, not records of another name") {
  const Sample sample = make(true);
  std::vector<uint8_t> bytes = sample.bytes;
  bytes[frame_of(sample, FrameType::dictionary, 1).offset + kFrameHeaderBytes + 3] ^= 1;
  const Exercise damaged = read(bytes);
  REQUIRE(damaged.error == "");
  CHECK(damaged.state == StreamState::died);
  CHECK(damaged.complete_steps() < sample.whole.complete_steps());
  const auto tells = [](const Gap& gap) { return gap.reason.find("names were lost") != std::string::npos; };
  CHECK(std::any_of(damaged.gaps.begin(), damaged.gaps.end(), tells));
  check_only_truth(damaged, sample.whole);
}

TEST_CASE("a damaged index costs the index only") {
  const Sample sample = make(true);
  for (const FrameType type : {FrameType::index, FrameType::end}) {
    std::vector<uint8_t> bytes = sample.bytes;
    bytes[frame_of(sample, type).offset + kFrameHeaderBytes] ^= 1;
    const Exercise damaged = read(bytes);
    CHECK(damaged.complete_steps() == kSampleSteps);
    CHECK(damaged.rows() == sample.whole.rows());
    CHECK(damaged.damage != "");
  }
}

TEST_CASE("frames that are missing, doubled or exchanged are found by their number") {
  const Sample sample = make(true);
  const Frame& first = frame_of(sample, FrameType::step, 1);
  const auto slice = [&](uint64_t from, uint64_t to) {
    return std::vector<uint8_t>(sample.bytes.begin() + static_cast<long>(from),
                                sample.bytes.begin() + static_cast<long>(to));
  };
  std::vector<uint8_t> missing = sample.bytes;
  missing.erase(missing.begin() + static_cast<long>(first.offset), missing.begin() + static_cast<long>(first.end()));
  std::vector<uint8_t> doubled = sample.bytes;
  const std::vector<uint8_t> copy = slice(first.offset, first.end());
  doubled.insert(doubled.begin() + static_cast<long>(first.end()), copy.begin(), copy.end());
  std::vector<uint8_t> longer = sample.bytes;
  longer.insert(longer.end(), copy.begin(), copy.end());
  for (const auto& bytes : {missing, doubled, longer}) {
    const Exercise damaged = read(bytes);
    REQUIRE(damaged.error == "");
    CHECK(damaged.state == StreamState::died);
    CHECK(damaged.damage != "");
    check_only_truth(damaged, sample.whole);
  }
  CHECK(read(missing).complete_steps() == kSampleSteps - 1);
  CHECK(read(doubled).complete_steps() == kSampleSteps);
}

TEST_CASE("a hole of zeros, as a crashed file system leaves it, is a Gap") {
  const Sample sample = make(false);
  std::vector<uint8_t> bytes = sample.bytes;
  const Frame& from = frame_of(sample, FrameType::records, 1);
  const Frame& to = frame_of(sample, FrameType::records, 4);
  std::fill(bytes.begin() + static_cast<long>(from.offset), bytes.begin() + static_cast<long>(to.offset), 0);
  const Exercise damaged = read(bytes);
  REQUIRE(damaged.error == "");
  REQUIRE(damaged.gaps.size() >= 2);
  CHECK(damaged.gaps[0].reason.find("found bytes 00 00 00 00") != std::string::npos);
  CHECK(damaged.gaps[0].first_step == 1);  // after kPrologueStep, every second step
  CHECK(damaged.gaps[0].last_step == 2);
  check_only_truth(damaged, sample.whole);
}

TEST_CASE("what is no hash stream of this version is refused in words") {
  Sample sample = make(true);
  CHECK(read({}).error.find("is empty") != std::string::npos);
  const std::string text = "{\"not\": \"a stream, though it is long enough for one\"}";
  CHECK(read(std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size())).error.find("not a hash stream") !=
        std::string::npos);
  std::vector<uint8_t> later = sample.bytes;
  later[8] = 9;
  CHECK(read(later).error.find("format 9; this forkpoint reads format 1") != std::string::npos);
  std::vector<uint8_t> extended = sample.bytes;
  extended[12] = 2;
  CHECK(read(extended).error.find("extensions 0x2") != std::string::npos);
  // A transfer in text mode turns \r\n into \n.
  std::vector<uint8_t> text_mode = sample.bytes;
  text_mode.erase(text_mode.begin() + 4);
  CHECK(read(text_mode).error.find("not a hash stream") != std::string::npos);
  const TemporaryFolder folder;
  CHECK(exercise_stream(folder.path()).error.find("not a regular file") != std::string::npos);
  CHECK(exercise_stream(folder / "none.fkp").error.find("No such file") != std::string::npos);
}

TEST_CASE("a later version's frame is skipped where it allows that, else the file is refused") {
  const Sample sample = make(false);
  const Frame& gap = frame_of(sample, FrameType::gap);
  for (const bool skippable : {true, false}) {
    std::vector<uint8_t> bytes = sample.bytes;
    FrameHeader header = gap.header;
    header.type = static_cast<FrameType>(77);
    header.flags = static_cast<uint8_t>(header.flags | (skippable ? kFrameSkippable : 0));
    seal(&bytes, gap.offset, header);
    const Exercise later = read(bytes);
    if (skippable) {
      CHECK(later.error == "");
      CHECK(later.complete_steps() == kSampleSteps);
      CHECK(later.gaps.empty());
    } else {
      CHECK(later.error.find("type 77") != std::string::npos);
    }
  }
}

TEST_CASE("lengths that lie, with checksums that fit, allocate nothing and crash nothing") {
  const Sample sample = make(true);
  const uint32_t most = std::numeric_limits<uint32_t>::max();
  for (const Frame& frame : sample.frames) {
    for (int field = 0; field < 5; ++field) {
      CAPTURE(name(frame.header.type));
      CAPTURE(field);
      std::vector<uint8_t> bytes = sample.bytes;
      FrameHeader header = frame.header;
      if (field == 0) header.raw_bytes = most;
      if (field == 1) header.raw_bytes = kMaxPayloadBytes;
      if (field == 2) header.records = most;
      if (field == 3) header.sequence = std::numeric_limits<uint64_t>::max();
      if (field == 4) header.step = std::numeric_limits<int64_t>::max();
      seal(&bytes, frame.offset, header);
      read(bytes, true);
      header = frame.header;
      header.stored_bytes = field == 0   ? most
                            : field == 1 ? kMaxPayloadBytes
                                         : header.stored_bytes + static_cast<uint32_t>(field);
      encode(header, bytes.data() + frame.offset);
      CHECK_FALSE(read(bytes, true).looks_perfect());
    }
  }
}

TEST_CASE("every byte of a payload flipped under checksums that fit crashes nothing") {
  const Sample sample = make(true);
  for (const Frame& frame : sample.frames) {
    for (uint32_t at = 0; at < frame.header.stored_bytes; ++at) {
      std::vector<uint8_t> bytes = sample.bytes;
      bytes[frame.offset + kFrameHeaderBytes + at] ^= static_cast<uint8_t>(mix64(frame.offset + at) | 1);
      seal(&bytes, frame.offset, frame.header);
      read(bytes, true);
    }
  }
}

TEST_CASE("a file full of frame marks is searched once, not once a mark") {
  Sample sample = make(false);
  for (size_t i = 0; i < (4u << 20); ++i) sample.bytes.push_back(static_cast<uint8_t>(kFrameMark[i % 4]));
  const Exercise damaged = read(sample.bytes);
  CHECK(damaged.complete_steps() == kSampleSteps);
  CHECK(damaged.damage != "");
}

TEST_CASE("a file that is cut while it is read ends in an Error or a sentence") {
  const TemporaryFolder folder;
  make_sample(folder / "s.fkp");
  std::vector<uint8_t> bytes = read_bytes(folder / "s.fkp");
  const auto reader = HashStreamReader::open(folder / "s.fkp");
  CHECK(reader->verify() == "");
  bytes.resize(bytes.size() / 4);
  write_bytes(folder / "s.fkp", bytes);
  StepColumns rows;
  CHECK_THROWS_WITH_AS(reader->read_step(3, &rows), doctest::Contains("s.fkp: step 4 is damaged at byte"), Error);
  CHECK(reader->verify().find("damaged at byte") != std::string::npos);
}
