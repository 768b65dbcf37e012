// Whatever goes wrong: one line on stderr, a Gap where one can be written, and the job goes on.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

TEST_CASE("a malformed variable is named once, and nothing is recorded") {
  const std::vector<Environment> malformed = {
      {{"FORKPOINT_LEVEL", "deep"}},        {{"FORKPOINT_STEPS", "5"}},          {{"FORKPOINT_STEPS", "5:4"}},
      {{"FORKPOINT_STEPS", "a:b"}},         {{"FORKPOINT_RANKS", "1,,2"}},       {{"FORKPOINT_RANKS", "3-1"}},
      {{"FORKPOINT_EVERY", "0"}},           {{"FORKPOINT_MAX_SIZE_BYTES", "1G"}}, {{"FORKPOINT_MASK_NAMES", "yes"}},
      {{"FORKPOINT_FIRST_STEP", "-1"}},     {{"FORKPOINT_RING_SLOTS", "100"}},   {{"FORKPOINT_RING_SLOTS", "1"}},
      {{"FORKPOINT_RING_WAIT_MS", "never"}}, {{"FORKPOINT_RUN", "relative/path"}},
      {{"FORKPOINT_EVERY", "99999999999999999999999"}},
  };
  for (const Environment& more : malformed) {
    const TempFolder folder;
    const Outcome outcome = run_program(client({"steps"}), under_probe(folder.run(), more));
    INFO(more.begin()->first << "=" << more.begin()->second << ": " << outcome.err);
    CHECK(outcome.status == 3);
    CHECK(outcome.out == "trained\n");
    CHECK(line_count(outcome.err) == 1);
    CHECK(outcome.err.find("forkpoint: " + more.begin()->first) == 0);
    CHECK_FALSE(std::filesystem::exists(folder.run()));
  }
}

TEST_CASE("bad descriptors never crash: one line of each kind and gaps with counts") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"bad"}), under_probe(folder.run()));
  INFO(outcome.err);
  CHECK(outcome.status == 0);
  const auto stream = open_stream(folder.run());
  CHECK(stream->state() == StreamState::whole);
  const auto rows = all_rows(*stream);
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].site.tensor == "good");
  CHECK(line_count(outcome.err) == 12);
  CHECK(stream->gaps().size() == 12);
  CHECK(records_lost(*stream) == 1 + 1 + 15 * 2 + 3 + 1);
  for (const Gap& gap : stream->gaps()) {
    CHECK((gap.first_step == 3 || gap.reason.find("number is negative") != std::string::npos));
  }
}

TEST_CASE("a full ring waits, and then loses records with a count") {
  // No thread can be that quick to write: the wait is 0 ms, and the ring has two places.
  const TempFolder folder;
  const Environment more = {{"FORKPOINT_RING_SLOTS", "2"}, {"FORKPOINT_RING_WAIT_MS", "0"}};
  const Outcome outcome = run_program(client({"flood", "20000"}), under_probe(folder.run(), more));
  CHECK(outcome.status == 0);
  const auto stream = open_stream(folder.run());
  CHECK(stream->state() == StreamState::whole);
  const auto rows = all_rows(*stream);
  CHECK(has_gap(*stream, "ring full"));
  CHECK(rows.size() + records_lost(*stream) == 20'000);
  for (const Row& row : rows) CHECK(row.step == 4);
  CHECK(line_count(outcome.err) >= 1);
  CHECK(line_count(outcome.err) <= 2);  // the end of the step may have found the ring full as well
}

TEST_CASE("a small ring that may wait loses nothing") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"flood", "20000"}), under_probe(folder.run(), {{"FORKPOINT_RING_SLOTS", "2"}}));
  CHECK(outcome.status == 0);
  CHECK(outcome.err == "");
  CHECK(all_rows(*open_stream(folder.run())).size() == 20'000);
}

TEST_CASE("a full disk ends the recording, not the job, and what was written stays readable") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"limited_file", "65536"}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  CHECK(outcome.out == "trained\n");
  CHECK(line_count(outcome.err) == 1);
  CHECK(outcome.err.find("forkpoint: recording of rank 0 ended, the job goes on: " + folder.run() + "/rank-00000.fkp") == 0);
  const auto stream = open_stream(folder.run());
  CHECK(stream->state() == StreamState::died);
  CHECK(stream->steps().size() > 2);
  CHECK(stream->steps().size() < 40);
}

TEST_CASE("a disk that is full from the start ends in one line") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"limited_file", "16"}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  CHECK(outcome.out == "trained\n");
  CHECK(outcome.err == "forkpoint: recor");  // so much fits into that file too
}

TEST_CASE("a folder that cannot be written to ends in one line") {
  const TempFolder folder;
  std::ofstream(folder.path() + "/file") << "in the way";
  for (const std::string& run : {std::string("/proc/forkpoint-run"), folder.path() + "/file/run"}) {
    const Outcome outcome = run_program(client({"steps"}), under_probe(run));
    CHECK(outcome.status == 3);
    CHECK(outcome.out == "trained\n");
    CHECK(line_count(outcome.err) == 1);
    CHECK(outcome.err.find(run) != std::string::npos);
  }
}

TEST_CASE("a second writer of one rank is refused and harms nothing") {
  const TempFolder folder;
  CHECK(run_program(client({"steps"}), under_probe(folder.run())).status == 3);
  const auto size = std::filesystem::file_size(folder.run() + "/rank-00000.fkp");
  const Outcome second = run_program(client({"steps"}), under_probe(folder.run()));
  CHECK(second.status == 3);
  CHECK(second.out == "trained\n");
  CHECK(line_count(second.err) == 1);
  CHECK(second.err.find("exists already") != std::string::npos);
  CHECK(std::filesystem::file_size(folder.run() + "/rank-00000.fkp") == size);
  CHECK(open_stream(folder.run())->state() == StreamState::whole);
  const Run run = Run::open(folder.run());  // and the run says so
  REQUIRE(run.problems().size() == 1);
  CHECK(run.problems()[0].find("nothing is recorded of it") != std::string::npos);
}

TEST_CASE("a run folder that is removed meanwhile does not disturb the job") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"remove_run", folder.run()}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  CHECK(outcome.out == "trained\n");
  CHECK_FALSE(std::filesystem::exists(folder.run()));
}

TEST_CASE("a process that closes all descriptors ends its recording, and its own files stay clean") {
  const TempFolder folder;
  const std::string mine = folder.path() + "/mine";
  const Outcome outcome = run_program(client({"close_all", mine}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  CHECK(line_count(outcome.err) == 1);
  CHECK(outcome.err.find("was closed by the process") != std::string::npos);
  CHECK(std::filesystem::file_size(mine) == 0);
  CHECK(open_stream(folder.run())->state() == StreamState::died);
}

TEST_CASE("the size limit ends the recording with a gap") {
  const TempFolder folder;
  const Environment more = {{"FORKPOINT_MAX_SIZE_BYTES", "40000"}};
  const Outcome outcome = run_program(client({"limited_file", "100000000"}), under_probe(folder.run(), more));
  CHECK(outcome.status == 0);
  CHECK(outcome.out == "trained\n");
  CHECK(line_count(outcome.err) == 1);
  const auto stream = open_stream(folder.run());
  CHECK(stream->state() == StreamState::whole);
  CHECK(has_gap(*stream, "the stream has reached its limit of 40000 bytes (--max-size, FORKPOINT_MAX_SIZE_BYTES)"));
  CHECK(outcome.err.find("(--max-size, FORKPOINT_MAX_SIZE_BYTES)") != std::string::npos);
  CHECK(stream->size_bytes() < 60'000);
  CHECK_FALSE(stream->steps().back().complete);
}

TEST_CASE("a run made by the program keeps its manifest") {
  const TempFolder folder;
  Manifest manifest;
  manifest.command = {"made", "before"};
  create_run(folder.run(), manifest);
  CHECK(run_program(client({"steps"}), under_probe(folder.run())).status == 3);
  CHECK(read_manifest(folder.run()).command == manifest.command);
  CHECK(read_manifest(folder.run()).state == RunState::recording);
}

TEST_CASE("stderr that nobody reads any more does not kill the job") {
  const TempFolder folder;
  // The reader of stderr is gone before the probe has something to say.
  const Outcome outcome = run_program({"bash", "-c", "trap '' TERM; " + client_path() + " bad 2> >(exec true); echo $?"},
                                      under_probe(folder.run()));
  CHECK(outcome.out == "0\n");
}

TEST_CASE("a CUDA tensor without CUDA is a gap, never a crash") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"cuda_pointer"}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  const auto stream = open_stream(folder.run());
  CHECK(has_gap(*stream, "a CUDA tensor"));
  CHECK(records_lost(*stream) == 1);
  CHECK(rows_of(all_rows(*stream), "empty").size() == 1);
}
