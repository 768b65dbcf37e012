// Launches in a hash stream: what was appended is what is read, row by row under the same index, or nothing.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "lib/digest_mix.h"
#include "lib/error.h"
#include "lib/hash_stream_frames.h"
#include "lib/run.h"
#include "tests/support/launch_generator.h"
#include "tests/support/sample_stream.h"
#include "tests/support/stream_exercise.h"
#include "tests/support/temporary_folder.h"

using namespace forkpoint;

namespace {

void add(const SampleLaunch& launch, LaunchColumns* launches) {
  launches->rows.push_back(launch.row);
  launches->buffers.insert(launches->buffers.end(), launch.buffers.begin(), launch.buffers.end());
}

Digest sum_of(const LaunchColumns& launches, const std::string& path) {
  const auto writer = writer_in_step(path);
  append_all(launches, writer.get());
  writer->end_step();
  writer->finish();
  const Exercise read = exercise_stream(path);
  CHECK(read.looks_perfect());
  REQUIRE(read.steps.size() == 1);
  CHECK(equal_rows(read.steps[0].launches, launches));
  return read.steps[0].summary.launch_sum;
}

}  // namespace

TEST_CASE("every kind, flag and field of launches and buffers comes back, from steps of several frames too") {
  const TemporaryFolder folder;
  make_sample(folder / "s.fkp");
  const auto ids = HashStreamWriter::create(folder / "ids.fkp", sample_header());
  write_sample(ids.get());
  ids->flush();
  for (const char* file : {"s.fkp", "ids.fkp"}) {  // finished, and not
    const Exercise read = exercise_stream(folder / file);
    REQUIRE(read.error == "");
    REQUIRE(read.steps.size() == kSampleSteps);
    for (const ReadStep& step : read.steps) {
      const bool has_launches = step.summary.step == 2 || step.summary.step == 4;
      LaunchColumns expected;
      for (int i = 0; has_launches && i < kSampleLaunches; ++i)
        add(sample_launch(ids.get(), step.summary.step, i), &expected);
      CHECK(step.summary.complete);
      CHECK(step.summary.launches == expected.rows.size());
      CHECK(equal_rows(step.launches, expected));
      CHECK((step.summary.launch_sum == Digest{}) != has_launches);
    }
  }
  CHECK(frames_of(folder / "s.fkp", FrameType::launches).size() == kSampleFramesInStep2 + 1);
}

TEST_CASE("random launches of any shape come back") {
  const TemporaryFolder folder;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    sum_of(random_launches(seed, seed % 3 == 0 ? seed : 40 * seed), folder / fmt::format("{}.fkp", seed));
  }
}

TEST_CASE("a step with more launches or buffers than a frame holds is split and read back whole") {
  const TemporaryFolder folder;
  const LaunchColumns many = random_launches(7, 2 * kLaunchesPerFrame + 1000);
  sum_of(many, folder / "rows.fkp");
  CHECK(frames_of(folder / "rows.fkp", FrameType::launches).size() == 3);

  LaunchColumns wide;
  for (uint32_t i = 0; i < 5; ++i) {
    LaunchRow row;
    row.buffers = i == 2 ? static_cast<uint32_t>(kBuffersPerFrame) : 30000;
    wide.rows.push_back(row);
    for (uint32_t k = 0; k < row.buffers; ++k) wide.buffers.emplace_back().allocation = mix64(i + k) % 1000;
  }
  sum_of(wide, folder / "buffers.fkp");
  const std::vector<Frame> frames = frames_of(folder / "buffers.fkp", FrameType::launches);
  CHECK(frames.size() == 3);  // two rows, the one that fills a frame, two rows

  const auto writer = writer_in_step(folder / "too-wide.fkp");
  wide.rows[0].buffers = kBuffersPerFrame + 1;
  CHECK_THROWS_WITH_AS(writer->append_launch(wide.rows[0], wide.buffers.data()), doctest::Contains("65537 buffers"),
                       Error);
}

TEST_CASE("rows that are all alike take next to nothing and are still read") {
  const TemporaryFolder folder;
  LaunchColumns alike;
  alike.rows.resize(kLaunchesPerFrame);
  sum_of(alike, folder / "s.fkp");
  const std::vector<Frame> frames = frames_of(folder / "s.fkp", FrameType::launches);
  REQUIRE(frames.size() == 1);
  CHECK(frames[0].header.stored_bytes < 2000);
}

TEST_CASE("what was flushed within a step can be read while the step goes on") {
  const TemporaryFolder folder;
  const auto writer = writer_in_step(folder / "s.fkp");
  const LaunchColumns launches = random_launches(3, 50);
  append_all(launches, writer.get());
  const uint64_t before = writer->size_bytes();
  writer->flush();
  CHECK(writer->size_bytes() > before);
  append_all(random_launches(4, 10), writer.get());
  const Exercise read = exercise_stream(folder / "s.fkp");
  REQUIRE(read.steps.size() == 1);
  CHECK_FALSE(read.steps[0].summary.complete);
  CHECK(equal_rows(read.steps[0].launches, launches));
  writer->finish();
  const Exercise finished = exercise_stream(folder / "s.fkp");
  CHECK(finished.state == StreamState::whole);
  CHECK(finished.damage == "");
  CHECK(finished.steps[0].launches.rows.size() == 60);
}

TEST_CASE("a step of launches alone is a step, also one that does not end") {
  const TemporaryFolder folder;
  for (const bool ends : {true, false}) {
    const std::string path = folder / (ends ? "a.fkp" : "b.fkp");
    const auto writer = HashStreamWriter::create(path, sample_header());
    LaunchRow row;
    row.site = writer->site_id(sample_site(1));
    writer->begin_step(3);
    for (int i = 0; i < 5; ++i) writer->append_launch(row, nullptr);
    if (ends) writer->end_step();
    writer->finish();
    const Exercise read = exercise_stream(path);
    CHECK(read.looks_perfect());
    REQUIRE(read.steps.size() == 1);
    CHECK(read.steps[0].summary.complete == ends);
    CHECK(read.steps[0].launches.rows.size() == 5);
  }
}

TEST_CASE("equal launches have equal sums, and a change of any field but the address another") {
  const TemporaryFolder folder;
  const LaunchColumns original = random_launches(11, 30);
  int number = 0;
  const auto sum_with = [&](const std::function<void(LaunchRow*, BufferRow*)>& change) {
    LaunchColumns changed = original;
    size_t row = 0;
    while (changed.rows[row].buffers == 0) ++row;
    change(&changed.rows[row], &changed.buffers[0]);
    return sum_of(changed, folder / fmt::format("{}.fkp", number++));
  };
  const Digest sum = sum_with([](LaunchRow*, BufferRow*) {});
  CHECK(sum_with([](LaunchRow*, BufferRow*) {}) == sum);
  CHECK(sum_with([](LaunchRow*, BufferRow* b) { b->address += 4096; }) == sum);
  const std::function<void(LaunchRow*, BufferRow*)> changes[] = {
      [](LaunchRow* r, BufferRow*) { r->kind = static_cast<LaunchKind>((static_cast<int>(r->kind) + 1) % 10); },
      [](LaunchRow* r, BufferRow*) { r->flags ^= kLaunchNonBlocking; },
      [](LaunchRow* r, BufferRow*) { r->site = (r->site + 1) % 24; },
      [](LaunchRow* r, BufferRow*) { ++r->micro_step; },
      [](LaunchRow* r, BufferRow*) { ++r->stream; },
      [](LaunchRow* r, BufferRow*) { ++r->grid[0]; },
      [](LaunchRow* r, BufferRow*) { ++r->grid[1]; },
      [](LaunchRow* r, BufferRow*) { ++r->grid[2]; },
      [](LaunchRow* r, BufferRow*) { ++r->block[0]; },
      [](LaunchRow* r, BufferRow*) { ++r->block[1]; },
      [](LaunchRow* r, BufferRow*) { ++r->block[2]; },
      [](LaunchRow* r, BufferRow*) { ++r->shared_bytes; },
      [](LaunchRow* r, BufferRow*) { ++r->param_bytes; },
      [](LaunchRow* r, BufferRow*) { ++r->params.a; },
      [](LaunchRow* r, BufferRow*) { ++r->params.b; },
      [](LaunchRow* r, BufferRow*) { ++r->object; },
      [](LaunchRow* r, BufferRow*) { ++r->bytes; },
      [](LaunchRow* r, BufferRow*) { ++r->retry_of; },
      [](LaunchRow*, BufferRow* b) { ++b->place; },
      [](LaunchRow*, BufferRow* b) { b->flags ^= kBufferFresh; },
      [](LaunchRow*, BufferRow* b) { ++b->allocation; },
      [](LaunchRow*, BufferRow* b) { ++b->offset; },
      [](LaunchRow*, BufferRow* b) { ++b->start; },
      [](LaunchRow*, BufferRow* b) { ++b->bytes; },
      [](LaunchRow*, BufferRow* b) { b->flags &= static_cast<uint8_t>(~kBufferAddresses), ++b->digest.a; },
      [](LaunchRow*, BufferRow* b) { b->flags &= static_cast<uint8_t>(~kBufferAddresses), ++b->digest.b; },
  };
  for (size_t i = 0; i < std::size(changes); ++i) {
    CAPTURE(i);
    CHECK(sum_with(changes[i]) != sum);
  }
  LaunchColumns other_order = original;
  std::swap(other_order.rows[0], other_order.rows[1]);
  other_order.rows[0].buffers = original.rows[0].buffers, other_order.rows[1].buffers = original.rows[1].buffers;
  CHECK(sum_of(other_order, folder / "order.fkp") != sum);
}

TEST_CASE("launches change nothing in the tree of the records, and count the bytes that they hashed") {
  const TemporaryFolder folder;
  const auto write = [&](const std::string& name, const LaunchColumns& launches) {
    const auto writer = writer_in_step(folder / name);
    append_all(launches, writer.get());
    writer->end_step();
    writer->finish();
    return HashStreamReader::open(folder / name)->steps()[0];
  };
  LaunchColumns launches;
  for (const LaunchKind kind : {LaunchKind::kernel, LaunchKind::record}) {
    launches.rows.emplace_back().kind = kind;
    launches.rows.back().buffers = 2;
    for (const uint8_t flags : {uint8_t{0}, uint8_t{kBufferNoDigest}}) {
      launches.buffers.emplace_back().flags = flags;
      launches.buffers.back().bytes = 1000;
    }
  }
  const StepSummary without = write("a.fkp", {}), with = write("b.fkp", launches);
  CHECK(with.digest == without.digest);
  CHECK(with.records == without.records);
  CHECK(with.bytes_hashed == without.bytes_hashed + 1000);
  CHECK(without.launches == 0);
  CHECK(frames_of(folder / "a.fkp", FrameType::launches).empty());
  CHECK(frames_of(folder / "a.fkp", FrameType::launch_index).empty());
}

TEST_CASE("more steps than one index frame holds have their launches found through the index") {
  const TemporaryFolder folder;
  const auto writer = HashStreamWriter::create(folder / "s.fkp", sample_header());
  LaunchRow row;
  row.site = writer->site_id(sample_site(1));
  const auto steps = static_cast<int64_t>(kStepsPerIndex) * 2 + 10;
  for (int64_t step = 0; step < steps; ++step) {
    writer->begin_step(step);
    row.object = static_cast<uint64_t>(step);
    if (step % 3 == 0) writer->append_launch(row, nullptr);
    writer->end_step();
  }
  writer->finish();
  const auto reader = HashStreamReader::open(folder / "s.fkp");
  CHECK(reader->state() == StreamState::whole);
  CHECK(reader->verify() == "");
  LaunchColumns launches;
  for (size_t i = 0; i < reader->steps().size(); ++i) {
    CHECK(reader->steps()[i].launches == (i % 3 == 0));
    reader->read_launches(i, &launches);
    REQUIRE(launches.rows.size() == (i % 3 == 0));
    if (i % 3 == 0) CHECK(launches.rows[0].object == i);
  }
}

TEST_CASE("runs that are joined keep their launches") {
  const TemporaryFolder folder;
  Manifest manifest;
  manifest.world_size = 2;
  manifest.level = Level::launch;
  manifest.command = {"train"};
  LaunchColumns launches[2];
  for (int rank = 0; rank < 2; ++rank) {
    const std::string run = folder / fmt::format("node{}", rank);
    manifest.state = RunState::recording;
    create_run(run, manifest);
    StreamHeader header = sample_header();
    header.rank = rank;
    header.world_size = 2;
    const auto writer = HashStreamWriter::create(run + "/" + stream_file_name(rank), header);
    for (int i = 0; i < 24; ++i) writer->site_id(sample_site(i));
    writer->begin_step(0);
    launches[rank] = random_launches(static_cast<uint64_t>(rank), 100);
    append_all(launches[rank], writer.get());
    writer->end_step();
    writer->finish();
    manifest.state = RunState::whole;
    write_manifest(run, manifest);
  }
  merge_runs({folder / "node0", folder / "node1"}, folder / "joined");
  const Run joined = Run::open(folder / "joined");
  CHECK(joined.manifest().level == Level::launch);
  for (int rank = 0; rank < 2; ++rank) {
    const HashStreamReader* stream = joined.stream_of(rank);
    REQUIRE(stream != nullptr);
    CHECK(stream->verify() == "");
    LaunchColumns read;
    stream->read_launches(0, &read);
    CHECK(equal_rows(read, launches[rank]));
  }
}

TEST_CASE("a launch of a steady training costs at most 45 bytes") {
  const TemporaryFolder folder;
  const auto writer = HashStreamWriter::create(folder / "s.fkp", sample_header());
  LaunchGenerator generator({});
  uint64_t before = 0, rows = 0, buffers = 0;
  for (int step = 0; step < 12; ++step) {
    const LaunchColumns launches = generator.next_step(writer.get());
    writer->begin_step(step);
    append_all(launches, writer.get());
    writer->end_step();
    if (step == 1) before = writer->size_bytes();
    if (step <= 1) continue;
    rows += launches.rows.size();
    buffers += launches.buffers.size();
  }
  const double bytes_a_row = static_cast<double>(writer->size_bytes() - before) / static_cast<double>(rows);
  CHECK(bytes_a_row <= 45);
  CHECK(bytes_a_row > 16.0 * static_cast<double>(buffers) / static_cast<double>(rows));  // each has a new digest
}

TEST_CASE("launches out of turn are refused with the file's name") {
  const TemporaryFolder folder;
  auto writer = HashStreamWriter::create(folder / "s.fkp", sample_header());
  LaunchRow row;
  row.site = writer->site_id(sample_site(1));
  CHECK_THROWS_WITH_AS(writer->append_launch(row, nullptr), doctest::Contains("s.fkp: a launch was appended outside"),
                       Error);
  writer->begin_step(0);
  const auto refuses = [&](const char* words, const std::function<void(LaunchRow*)>& change) {
    LaunchRow bad = row;
    change(&bad);
    CHECK_THROWS_WITH_AS(writer->append_launch(bad, nullptr), doctest::Contains(words), Error);
  };
  refuses("names site 77 of 1", [](LaunchRow* r) { r->site = 77; });
  refuses("kind that does not exist", [](LaunchRow* r) { r->kind = static_cast<LaunchKind>(kLaunchKindCount); });
  refuses("stands for record 0 of the 0", [](LaunchRow* r) { r->kind = LaunchKind::record; });
  refuses("repeats launch 0 of the 0", [](LaunchRow* r) { r->kind = LaunchKind::retry; });
  writer->append(sample_record(writer.get(), 0, 1), 1);
  row.kind = LaunchKind::record;
  CHECK_NOTHROW(writer->append_launch(row, nullptr));
  row.kind = LaunchKind::retry;
  CHECK_NOTHROW(writer->append_launch(row, nullptr));
  refuses("repeats launch 2 of the 2", [](LaunchRow* r) { r->retry_of = 2; });
  writer->end_step();
  writer->begin_step(1);  // counted anew
  refuses("repeats launch 0 of the 0", [](LaunchRow*) {});
}
