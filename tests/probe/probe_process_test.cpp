// The probe's life in other people's processes: dormant, forked, ended in every way, and never noticed.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

Outcome shell(const std::string& command, const Environment& environment = {}) {
  return run_program({"bash", "-c", command}, environment);
}

}  // namespace

TEST_CASE("the library exports its entry points and links nothing but libc") {
  const Outcome names = shell("nm -D --defined-only '" + probe_path() + "' | awk '{print $3}' | LC_ALL=C sort | tr '\\n' ' '");
  CHECK(names.out ==
        "InitializeInjection InitializeInjectionNvtx2 _Exit _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE "
        "__assert_fail _exit abort forkpoint_get_api forkpoint_probe_abi ncclAllGather ncclAllReduce ncclAlltoAll ncclBcast ncclBroadcast ncclCommAbort ncclCommDestroy "
        "ncclCommFinalize ncclCommGetAsyncError ncclCommInitAll ncclCommInitRank ncclCommInitRankConfig ncclCommInitRankScalable ncclCommShrink "
        "ncclCommSplit ncclGather ncclGroupEnd ncclGroupSimulateEnd ncclGroupStart ncclRecv ncclRedOpCreatePreMulSum "
        "ncclRedOpDestroy ncclReduce ncclReduceScatter ncclScatter ncclSend quick_exit ");
  const Outcome needed = shell("readelf -d '" + probe_path() + "' | grep NEEDED | grep -v -e libc.so.6 -e ld-linux | wc -l");
  CHECK(needed.out == "0\n");
}

TEST_CASE("tools under the preload do what they do without it, and leave no trace") {
  const std::vector<std::string> commands = {
      "echo hello; false; echo $?; (exit 3)",
      "printf 'all:\\n\\t@echo made\\n' | make -f -; exit 4",
      "python3 -c \"import os,sys; print('py', os.getpid() > 0, flush=True); os._exit(6)\"",
      "python3 -c \"import subprocess; print(subprocess.check_output(['echo', 'sub']))\"",
      "git --version; git -C / status 2>&1 | head -n 1",
      "ls / | sort | head -n 3 | wc -l; x=$(bash -c 'kill -9 $$'); echo $?",
      "/bin/true | /bin/cat && exec /bin/sh -c 'exit 9'",
  };
  for (const std::string& command : commands) {
    const TempFolder folder;
    const Outcome plain = shell(command);
    for (const Environment& environment : {Environment{{"LD_PRELOAD", preload()}}, under_probe(folder.run()),
                                           under_probe(folder.run(), {{"FORKPOINT_STEPS", "nonsense"}})}) {
      const Outcome loaded = shell(command, environment);
      INFO(command);
      CHECK(loaded.status == plain.status);
      CHECK(loaded.out == plain.out);
      CHECK(loaded.err == plain.err);
    }
    CHECK_FALSE(std::filesystem::exists(folder.run()));
  }
}

TEST_CASE("dormant: no FORKPOINT_RUN, no activity") {
  const Outcome dormant = run_program(client({"active"}), {{"LD_PRELOAD", preload()}});
  CHECK(dormant.out == "0 0\n0\n");
  CHECK(dormant.err == "");
  const TempFolder folder;
  CHECK(run_program(client({"active"}), under_probe(folder.run())).out == "1 1\n1\n");
  CHECK_FALSE(std::filesystem::exists(folder.run()));  // a step without a record
}

TEST_CASE("a dormant process has no further thread, and no file of ours") {
  const std::vector<std::string> command = {"awk", "/^Threads/ {print; system(\"ls /proc/self/fd\")}", "/proc/self/status"};
  const Outcome plain = run_program(command);
  CHECK(plain.out.starts_with("Threads:\t1\n"));
  CHECK(run_program(command, {{"LD_PRELOAD", preload()}}).out == plain.out);
  const TempFolder folder;
  CHECK(run_program(command, under_probe(folder.run())).out == plain.out);
}

TEST_CASE("however a process ends that can end in order, its stream is whole") {
  const std::vector<std::string> ways = {"return", "whole step", "_exit", "_Exit", "quick_exit", "exit in a thread",
                                         "_exit in a handler", "main thread gone", "static destructor"};
  for (const std::string& way : ways) {
    INFO(way);
    const TempFolder folder;
    const Outcome outcome = run_program(client({"leave", way}), under_probe(folder.run()));
    CHECK(outcome.status == 5);
    CHECK(outcome.err == "");
    CHECK(outcome.seconds < 3);
    const auto stream = open_stream(folder.run());
    CHECK(stream->state() == StreamState::whole);
    REQUIRE(stream->steps().size() == 4);
    CHECK(stream->steps()[3].complete == (way == "whole step"));
    const auto rows = all_rows(*stream);
    CHECK(rows_of(rows, "half").size() == 1);
    CHECK(rows_of(rows, "late").size() == (way == "main thread gone" || way == "static destructor"));
  }
}

TEST_CASE("abort keeps the steps that had ended") {
  const TempFolder folder;
  CHECK(run_program(client({"leave", "abort"}), under_probe(folder.run())).status == 128 + 6);
  const auto stream = open_stream(folder.run());
  CHECK(stream->state() == StreamState::died);
  CHECK(std::count_if(stream->steps().begin(), stream->steps().end(), [](const auto& step) { return step.complete; }) == 3);
}

TEST_CASE("steps that have ended are in the file of a process that dies at once, however little it lived") {
  for (const std::string way : {"abort at once", "assert at once", "kill at once"}) {
    INFO(way);
    const TempFolder folder;
    const Outcome outcome = run_program(client({"leave", way}), under_probe(folder.run()));
    CHECK(outcome.status == 128 + (way == "kill at once" ? 9 : 6));
    CHECK((outcome.err.find("Assertion `false' failed") != std::string::npos) == (way == "assert at once"));
    CHECK(outcome.err.find("forkpoint") == std::string::npos);
    const auto stream = open_stream(folder.run());
    CHECK(stream->state() == StreamState::died);
    CHECK(std::count_if(stream->steps().begin(), stream->steps().end(), [](const auto& step) { return step.complete; }) == 3);
    // Before an abort there is time for the step that it cut as well.
    if (way != "kill at once") CHECK(rows_of(all_rows(*stream), "half").size() == 1);
  }
}

TEST_CASE("a rank that is killed leaves its whole steps") {
  const TempFolder folder;
  CHECK(run_and_kill(client({"forever"}), under_probe(folder.run())).status == 128 + 9);
  const auto stream = open_stream(folder.run());
  CHECK(stream->state() == StreamState::died);
  CHECK(stream->steps().size() >= 20);
  CHECK(std::count_if(stream->steps().begin(), stream->steps().end(), [](const auto& step) { return step.complete; }) >= 19);
}

TEST_CASE("a rank that is killed in a long step leaves what it had of it") {
  const TempFolder folder;
  CHECK(run_and_kill(client({"long_step"}), under_probe(folder.run())).status == 128 + 9);
  const auto stream = open_stream(folder.run());
  CHECK(stream->state() == StreamState::died);
  REQUIRE(stream->steps().size() == 1);
  CHECK_FALSE(stream->steps()[0].complete);
  CHECK(stream->steps()[0].records > 50);  // of some 120
}

TEST_CASE("ranks that are forked by a parent that records nothing are ranks of their own") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"fork_ranks", "4"}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  CHECK(outcome.err == "");
  const Run run = Run::open(folder.run());
  CHECK(run.state() == RunState::whole);
  CHECK(run.missing_ranks().empty());
  REQUIRE(run.streams().size() == 4);
  for (const auto& stream : run.streams()) {
    CHECK(stream->steps().size() == 3);
    const std::pair<std::string, std::string> fact = {"launcher", "fork"};
    CHECK(std::count(stream->header().facts.begin(), stream->header().facts.end(), fact) == 1);
  }
  // Ranks raced for the manifest: no temporary file is left.
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder.run())) files.insert(entry.path().filename());
  CHECK(files.size() == 5);
}

TEST_CASE("data-loader workers of a rank stay silent, and take neither its stream nor its descriptor") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"fork_workers"}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  CHECK(outcome.err == "");
  const auto stream = open_stream(folder.run());
  CHECK(stream->state() == StreamState::whole);
  CHECK(stream->verify() == "");
  const auto rows = all_rows(*stream);
  REQUIRE(rows.size() == 2);
  CHECK(scalar_value(rows[1].record.digest) == 2);
}

TEST_CASE("a child under another rank records a stream of its own") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"fork_other_rank"}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  CHECK(outcome.err == "");
  CHECK(open_stream(folder.run(), 0)->steps().size() == 3);
  CHECK(open_stream(folder.run(), 1)->steps().size() == 3);
  CHECK(Run::open(folder.run()).state() == RunState::whole);
}

TEST_CASE("200 forks while two threads record: nobody hangs, the stream is whole") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"fork_storm", "200"}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  CHECK(outcome.err == "");
  const auto stream = open_stream(folder.run());
  CHECK(stream->state() == StreamState::whole);
  CHECK(stream->verify() == "");
  CHECK(stream->gaps().empty());
  CHECK(rows_of(all_rows(*stream), "child").empty());
}

TEST_CASE("a spawned or vforked process does not end its parent's recording") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"spawn"}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  CHECK(outcome.err == "");
  const auto stream = open_stream(folder.run());
  CHECK(stream->state() == StreamState::whole);
  CHECK(all_rows(*stream).size() == 2);
}

TEST_CASE("signal handlers that record are refused with a gap, and errno is the host's") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"handlers"}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  const auto stream = open_stream(folder.run());
  CHECK(stream->state() == StreamState::whole);
  const size_t caught = std::stoul(outcome.out);
  CHECK(caught > 0);
  CHECK(rows_of(all_rows(*stream), "in handler").size() + records_lost(*stream) == caught);
}

TEST_CASE("recording opens no descriptor and starts no thread beyond its first") {
  const TempFolder folder;
  CHECK(run_program(client({"leak"}), under_probe(folder.run())).status == 0);
}

TEST_CASE("the writer runs where the process may run, not where its caller is pinned") {
  const TempFolder folder;
  CHECK(run_program(client({"pinned"}), under_probe(folder.run())).status == 0);
}

TEST_CASE("facts that come after the first record are kept, and of two with one name the later one") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"facts"}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  CHECK(outcome.err == "");
  const auto facts = open_stream(folder.run())->header().facts;
  const auto count = [&](const char* name, const char* value) {
    return std::count(facts.begin(), facts.end(), std::pair<std::string, std::string>(name, value));
  };
  CHECK(count("early", "1") == 1);
  CHECK(count("late", "1") == 1);
  CHECK(count("changed", "2") == 1);
  CHECK(count("changed", "1") == 0);
}
