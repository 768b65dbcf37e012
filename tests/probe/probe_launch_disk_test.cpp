// The launch level on a disk that is full: the recording ends in one line, the job does what it does by itself.
#include <doctest/doctest.h>

#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

// launch_client, whose files must not grow beyond so many KiB.
std::vector<std::string> limited(const std::string& scenario, const std::string& kib) {
  const std::string script = "ulimit -f " + kib + "; exec \"$0\" \"$@\"";
  return {"bash", "-c", script, client_path("launch_client"), client_path("libcuda.so.1"), scenario};
}

Environment at_launch_level(const std::string& run) {
  return under_probe(run, {{"FORKPOINT_LEVEL", "launch"}, {"FORKPOINT_CUPTI", client_path("libcupti.so.13")}});
}

}  // namespace

TEST_CASE("a disk that becomes full ends the recording of launches, not the job, and what was written stays readable") {
  for (const char* scenario : {"many_records", "epochs", "modules"}) {
    const Outcome alone = run_program({client_path("launch_client"), client_path("libcuda.so.1"), scenario});
    const TempFolder folder;
    const Outcome outcome = run_program(limited(scenario, "1"), at_launch_level(folder.run()));
    INFO(scenario << ": " << outcome.err);
    CHECK(outcome.status == 0);
    CHECK(outcome.out == alone.out);
    CHECK(line_count(outcome.err) == 1);
    CHECK(outcome.err.find("forkpoint: recording of rank 0 ended, the job goes on: ") == 0);
    CHECK(open_stream(folder.run())->state() == StreamState::died);
  }
}

TEST_CASE("where nothing can be written at all, one line says so and the program's own status is kept") {
  // Its output goes through a pipe: a file would be limited as well.
  for (const char* scenario : {"steps", "no such scenario"}) {
    const std::vector<std::string> alone = {client_path("launch_client"), client_path("libcuda.so.1"), scenario};
    const std::string script = "set -o pipefail; (ulimit -f 0; exec \"$0\" \"$@\") 2>&1 | cat";
    const TempFolder folder;
    const Outcome outcome =
        run_program({"bash", "-c", script, alone[0], alone[1], alone[2]}, at_launch_level(folder.run()));
    INFO(scenario << ": " << outcome.out);
    const Outcome unrecorded = run_program(alone);
    CHECK(outcome.status == unrecorded.status);
    if (unrecorded.status != 0) continue;  // it asked CUDA for nothing
    CHECK(line_count(outcome.out) == 1);
    CHECK(outcome.out.find("forkpoint: recording of rank 0 ended, the job goes on: ") == 0);
  }
}
