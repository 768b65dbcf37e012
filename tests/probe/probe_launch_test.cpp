// The launch level on programs that know nothing of the probe, against a libcuda and a libcupti made of host memory: what
// rows a program leaves, and that it does what it did without us.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "lib/diff.h"
#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

struct Launches {
  probe_test::Outcome outcome;
  std::unique_ptr<HashStreamReader> stream;
  std::vector<std::pair<int64_t, LaunchColumns>> steps;  // with their number

  // All rows of one kind, in order.
  std::vector<LaunchRow> of(LaunchKind kind) const {
    std::vector<LaunchRow> rows;
    for (const auto& [step, columns] : steps) {
      for (const LaunchRow& row : columns.rows) {
        if (row.kind == kind) rows.push_back(row);
      }
    }
    return rows;
  }
  // The n-th row that does work, over all steps, and its buffers.
  std::pair<LaunchRow, std::vector<BufferRow>> work(size_t n) const {
    for (const auto& [step, columns] : steps) {
      size_t buffer = 0;
      for (const LaunchRow& row : columns.rows) {
        if (is_work(row.kind) && n-- == 0) {
          return {row, {columns.buffers.begin() + static_cast<long>(buffer), columns.buffers.begin() + static_cast<long>(buffer + row.buffers)}};
        }
        buffer += row.buffers;
      }
    }
    FAIL("there are not so many rows");
    return {};
  }
  std::string name_of(const LaunchRow& row) const { return stream->sites()[row.site].tensor; }
};

Environment at_launch_level(const std::string& run, const Environment& more = {}) {
  Environment environment = {{"FORKPOINT_LEVEL", "launch"}, {"FORKPOINT_CUPTI", client_path("libcupti.so.13")}};
  environment.insert(more.begin(), more.end());
  return under_probe(run, environment);
}

Launches record(const std::string& scenario, const Environment& more = {}) {
  const TempFolder folder;
  Launches launches;
  Environment environment = at_launch_level(folder.run(), more);
  for (const auto& [name, value] : more) environment[name] = value;
  launches.outcome = run_program({client_path("launch_client"), client_path("libcuda.so.1"), scenario}, environment);
  INFO(launches.outcome.err);
  REQUIRE(launches.outcome.status == 0);
  launches.stream = open_stream(folder.run());
  REQUIRE(launches.stream != nullptr);
  CHECK(launches.stream->state() == StreamState::whole);
  for (size_t i = 0; i < launches.stream->steps().size(); ++i) {
    launches.steps.emplace_back(launches.stream->steps()[i].step, LaunchColumns());
    launches.stream->read_launches(i, &launches.steps.back().second);
  }
  return launches;
}

std::string unrecorded(const std::string& scenario) {
  return run_program({client_path("launch_client"), client_path("libcuda.so.1"), scenario}, {}).out;
}

Digest digest_of(const std::vector<float>& values) { return digest_only(values.data(), values.size() * sizeof(float)); }

std::vector<float> ramp(int count, float scale, float add = 0) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) values[static_cast<size_t>(i)] = scale * static_cast<float>(i) + add;
  return values;
}

}  // namespace

TEST_CASE("a launch leaves its kernel, its shape and a digest of each buffer that it was handed") {
  const Launches launches = record("plain");
  CHECK(launches.outcome.out == unrecorded("plain"));
  CHECK(launches.stream->gaps().empty());
  const auto kernels = launches.of(LaunchKind::kernel);
  REQUIRE(kernels.size() == 2);
  const auto [copy, copied] = launches.work(0);
  CHECK(copy.kind == LaunchKind::copy);
  CHECK((copy.flags & kLaunchFromHost) != 0);
  const auto [first, buffers] = launches.work(1);
  CHECK(launches.name_of(first) == "scale");
  CHECK(first.grid[0] == 1);
  CHECK(first.block[0] == 32);
  CHECK(first.param_bytes == 24);
  REQUIRE(buffers.size() == 2);
  CHECK(buffers[0].place == 0);
  CHECK(buffers[0].digest == digest_of(ramp(1000, 2)));
  CHECK((buffers[0].flags & kBufferFresh) != 0);
  CHECK(buffers[1].place == 8);
  CHECK(buffers[1].digest == digest_of(ramp(1000, 1)));
  CHECK((buffers[1].flags & kBufferFresh) == 0);  // a copy has filled it
  CHECK(buffers[0].bytes == 4000);
  CHECK(buffers[0].allocation != buffers[1].allocation);
  CHECK(copied[0].allocation == buffers[1].allocation);
  const auto [second, same] = launches.work(2);
  REQUIRE(same.size() == 2);  // one buffer by two pointers
  CHECK(same[0].digest == digest_of(ramp(1000, 6)));
  CHECK(same[1].digest == same[0].digest);
  const auto [back, read] = launches.work(3);
  CHECK((back.flags & kLaunchToHost) != 0);
  CHECK(read[0].digest == digest_of(ramp(1000, 6)));
  CHECK(launches.of(LaunchKind::synchronize).size() >= 1);
  const auto released = launches.of(LaunchKind::release);
  REQUIRE(released.size() == 1);
  CHECK(released[0].object == buffers[0].allocation);
}

TEST_CASE("parameters without their pointers have one digest in every process, and a scalar changes it") {
  const Launches a = record("plain"), b = record("plain");
  CHECK(a.work(1).first.params == b.work(1).first.params);
  CHECK(a.work(1).first.params != a.work(2).first.params);  // by 2, by 3
  const Launches one = record("number", {{"SEED", "12884902912"}}), other = record("number", {{"SEED", "12884902913"}});
  CHECK(one.work(0).first.params != other.work(0).first.params);
  CHECK(one.work(0).second.size() == 1);
}

TEST_CASE("pointers inside a struct that is passed by value are found, with their offset into the allocation") {
  const Launches launches = record("struct");
  const auto [row, buffers] = launches.work(1);
  REQUIRE(buffers.size() == 2);
  CHECK(buffers[0].place == 0);
  CHECK(buffers[0].offset == 2000);
  CHECK(buffers[0].start == 0);
  CHECK(buffers[0].bytes == 4000);  // the whole allocation
  CHECK(buffers[1].place == 16);
  CHECK(row.param_bytes == 28);
}

TEST_CASE("addresses of the program's own memory among the parameters mean nothing, until the driver knows of that memory") {
  const Launches first = record("own_memory_in_struct"), second = record("own_memory_in_struct");
  for (const Launches* run : {&first, &second}) {
    for (size_t i = 0; i < 15; ++i) {
      const auto [row, buffers] = run->work(i + 1);  // the first one is a copy from the host
      CHECK(row.params == first.work(1).first.params);
      CHECK(buffers.size() == (i < 10 ? 1 : 2));
    }
  }
}

TEST_CASE("parameters in one buffer (extra) are read as those in an array are") {
  const auto [row, buffers] = record("extra").work(1);
  REQUIRE(buffers.size() == 2);
  CHECK(buffers[0].digest == digest_of(ramp(1000, 2)));
  CHECK(row.params == record("plain").work(1).first.params);
}

TEST_CASE("an address that comes round again is another allocation") {
  const Launches launches = record("reused");
  std::set<uint64_t> ordinals;
  for (const LaunchRow& row : launches.of(LaunchKind::allocate)) ordinals.insert(row.object);
  CHECK(ordinals.size() == 3);
  CHECK(launches.of(LaunchKind::release).size() == 3);
}

TEST_CASE("a copy into a small part of a large allocation hashes that part, never the whole in silence") {
  const Launches launches = record("copies");
  const auto [to_device, target] = launches.work(1);
  REQUIRE(target.size() == 2);
  CHECK(target[1].place == kPlaceTarget);
  CHECK(target[1].start == 1024);
  CHECK(target[1].bytes == 4000);
  CHECK(target[1].digest == digest_of(ramp(1000, 1)));
  const auto [set, set_target] = launches.work(3);
  CHECK(set.kind == LaunchKind::set);
  CHECK(set.bytes == 40);
  CHECK(set_target[0].bytes == 4000);
  const auto [to_host, source] = launches.work(4);
  CHECK(source[0].start == 1024);
  CHECK(source[0].digest == digest_of(ramp(1000, 1)));
}

TEST_CASE("a copy that the host waits for is digested as it was, whatever another stream does to its ends afterwards") {
  for (const char* mode : {"at_once", "deferred", "slow"}) {
    const Launches launches = record("overwritten", {{"FAKE_CUDA_MODE", mode}});
    INFO(mode);
    const auto [first, target] = launches.work(0);
    CHECK(target[0].digest == digest_of(ramp(1000, 1)));
    const auto [to_host, source] = launches.work(1);
    CHECK(source[0].digest == digest_of(ramp(1000, 1)));
    CHECK(launches.work(2).second[0].digest == digest_of(ramp(1000, 2)));
    CHECK(launches.work(3).second[0].digest == digest_of(ramp(1000, 1)));
  }
}

TEST_CASE("streams and events have numbers, and waits stand where they were made") {
  const Launches launches = record("ordered");
  const auto kernels = launches.of(LaunchKind::kernel);
  REQUIRE(kernels.size() == 2);
  CHECK(kernels[0].stream != kernels[1].stream);
  CHECK((kernels[0].flags & kLaunchNonBlocking) != 0);
  const auto recorded = launches.of(LaunchKind::event_record), waited = launches.of(LaunchKind::event_wait);
  REQUIRE(recorded.size() == 1);
  REQUIRE(waited.size() == 1);
  CHECK(recorded[0].object == waited[0].object);
  CHECK(recorded[0].stream == kernels[0].stream);
  CHECK(waited[0].stream == kernels[1].stream);
}

TEST_CASE("each replay of a captured graph gives the rows of its nodes, with the digests of that replay") {
  const Launches launches = record("graph");
  CHECK(launches.outcome.out == unrecorded("graph"));
  CHECK(launches.of(LaunchKind::graph).size() == 3);
  const auto kernels = launches.of(LaunchKind::kernel);
  REQUIRE(kernels.size() == 6);
  float scale = 1, add = 0;
  for (size_t replay = 0; replay < 3; ++replay) {
    scale *= 2, add *= 2;
    CHECK(launches.work(1 + 2 * replay).second[0].digest == digest_of(ramp(1000, scale, add)));
    add += 1;
    CHECK(launches.work(2 + 2 * replay).second[0].digest == digest_of(ramp(1000, scale, add)));
    CHECK((kernels[2 * replay].flags & kLaunchInGraph) != 0);
  }
  CHECK(launches.stream->gaps().empty());
}

TEST_CASE("a graph whose nodes were added one by one is a declared limit") {
  const Launches launches = record("graph_by_hand");
  const auto graphs = launches.of(LaunchKind::graph);
  REQUIRE(graphs.size() == 1);
  CHECK((graphs[0].flags & kLaunchParamsUnread) != 0);
  CHECK(has_limit(*launches.stream, "one by one"));
}

TEST_CASE("a table of addresses on its way to the device is marked, for it differs between processes") {
  const Launches launches = record("table");
  const auto kernels = launches.of(LaunchKind::kernel);
  REQUIRE(kernels.size() == 1);
  const auto [row, buffers] = launches.work(5);
  CHECK(launches.name_of(row) == "scale_all");
  REQUIRE(buffers.size() == 1);
  CHECK((buffers[0].flags & kBufferAddresses) != 0);
}

TEST_CASE("with --inputs each buffer has a digest before the launch too") {
  const Launches launches = record("plain", {{"FORKPOINT_INPUTS", "1"}});
  const auto [row, buffers] = launches.work(2);
  REQUIRE(buffers.size() == 4);
  CHECK((buffers[0].flags & kBufferBefore) != 0);
  CHECK(buffers[0].digest == digest_of(ramp(1000, 2)));
  CHECK((buffers[2].flags & kBufferBefore) == 0);
  CHECK(buffers[2].digest == digest_of(ramp(1000, 6)));
}

TEST_CASE("a suspect is run again from its own inputs, and the program goes on with what its own launch gave") {
  const std::string without = unrecorded("unstable");
  const Launches whole = record("unstable");
  uint64_t index = 0;
  for (const LaunchRow& row : whole.steps[0].second.rows) {
    if (row.kind == LaunchKind::kernel && whole.name_of(row) == "unstable_sum") break;
    ++index;
  }
  const Launches launches = record("unstable", {{"FORKPOINT_RETRY", "6"}, {"FORKPOINT_LAUNCH", "-1:" + std::to_string(index)}});
  CHECK(launches.outcome.out == without);
  CHECK(launches.of(LaunchKind::retry).size() == 6);
  std::set<uint64_t> outputs;
  size_t buffer = 0;
  for (const LaunchRow& row : launches.steps[0].second.rows) {
    if (row.kind == LaunchKind::retry) {
      CHECK(row.retry_of == index);
      outputs.insert(launches.steps[0].second.buffers[buffer].digest.a);
    }
    buffer += row.buffers;
  }
  CHECK(outputs.size() == 3);  // it has three outputs, in turn
}

TEST_CASE("steps, layers and records of the program stand among its launches") {
  const Launches launches = record("steps");
  REQUIRE(launches.steps.size() == 5);
  CHECK(launches.steps[0].first == kPrologueStep);
  for (size_t i = 1; i < 5; ++i) {
    const auto& [step, columns] = launches.steps[i];
    CHECK(step == static_cast<int64_t>(i) - 1);
    REQUIRE(columns.rows.size() >= 2);
    CHECK(columns.rows[0].kind == LaunchKind::kernel);
    CHECK(launches.stream->sites()[columns.rows[0].site].layer == "net.fc");
    CHECK(columns.rows[1].kind == LaunchKind::record);
    CHECK(columns.rows[1].object == 0);
    const BufferRow& of_record = columns.buffers.back();
    CHECK(of_record.digest == columns.buffers[0].digest);
    CHECK(of_record.allocation == columns.buffers[0].allocation);
    CHECK((of_record.flags & kBufferNoDigest) == 0);
  }
}

TEST_CASE("a suspect in a step is repeated as often as was asked, and found to be unstable only if it is") {
  const Launches launches = record("steps", {{"FORKPOINT_RETRY", "5"}, {"FORKPOINT_LAUNCH", "2:0"}});
  const auto retries = launches.of(LaunchKind::retry);
  REQUIRE(retries.size() == 5);
  for (const LaunchRow& row : retries) CHECK(row.retry_of == 0);
  const LaunchColumns& step = launches.steps[3].second;
  std::set<uint64_t> outputs;
  size_t buffer = 0;
  for (const LaunchRow& row : step.rows) {
    if (row.kind == LaunchKind::retry) outputs.insert(step.buffers[buffer].digest.a);
    buffer += row.buffers;
  }
  CHECK(outputs.size() == 1);
  CHECK(*outputs.begin() == step.buffers[0].digest.a);
  // Nothing was left changed: the steps after it are those of a run without it.
  const Launches plain = record("steps");
  CHECK(launches.steps[4].second.buffers[0].digest == plain.steps[4].second.buffers[0].digest);
}

TEST_CASE("only launches of the steps asked for are recorded, with memory that was there before") {
  const Launches launches = record("steps", {{"FORKPOINT_STEPS", "2:2"}});
  size_t rows = 0;
  for (const auto& [step, columns] : launches.steps) {
    rows += columns.rows.size();
    if (step != 2) continue;
    REQUIRE(columns.rows.size() >= 2);
    REQUIRE(columns.rows[0].buffers == 2);
    CHECK(columns.buffers[0].bytes == 4000);
    CHECK(columns.buffers[0].digest == digest_of(ramp(1000, 8)));
  }
  CHECK(rows == launches.steps.back().second.rows.size());
}

TEST_CASE("blocks that a caching allocator hands out are buffers of their own, and what it took back is a window") {
  const Launches launches = record("blocks");
  const auto [first, buffers] = launches.work(0);
  REQUIRE(buffers.size() == 2);
  CHECK(buffers[0].bytes == 8192);
  CHECK(buffers[1].bytes == 4096);
  const auto [second, after] = launches.work(1);
  CHECK((after[1].flags & kBufferWindow) != 0);
  CHECK(after[1].bytes <= 256 << 10);
  CHECK(has_limit(*launches.stream, "large allocation"));
}

TEST_CASE("a launch that fails leaves no row, and its error is the program's") {
  const Launches launches = record("failing");
  CHECK(launches.outcome.out == unrecorded("failing"));
  CHECK(launches.of(LaunchKind::kernel).empty());
}

TEST_CASE("CUPTI that is taken, missing or something else costs the launches, one line, and nothing of the job") {
  const std::string result = unrecorded("plain");
  for (const Environment& trouble : {Environment{{"FAKE_CUPTI_TAKEN", "1"}}, Environment{{"FORKPOINT_CUPTI", "/nowhere/libcupti.so"}},
                                     Environment{{"FORKPOINT_CUPTI", client_path("libcuda.so.1")}}}) {
    const TempFolder folder;
    Environment environment = at_launch_level(folder.run());
    for (const auto& [name, value] : trouble) environment[name] = value;
    const probe_test::Outcome outcome = run_program({client_path("launch_client"), client_path("libcuda.so.1"), "plain"}, environment);
    CHECK(outcome.status == 0);
    CHECK(outcome.out == result);
    CHECK(line_count(outcome.err) == 1);
    CHECK(outcome.err.find("kernel launches are not recorded, the job goes on") != std::string::npos);
  }
  const TempFolder folder;
  Environment taken = at_launch_level(folder.run(), {{"FAKE_CUPTI_TAKEN", "1"}});
  run_program({client_path("launch_client"), client_path("libcuda.so.1"), "steps"}, taken);
  CHECK(has_limit(*open_stream(folder.run()), "another tool holds CUPTI"));
  // Records that agree are no answer to who asked for launches.
  const Run run = Run::open(folder.run());
  const Verdict verdict = diff(run, run);
  CHECK(verdict.outcome == forkpoint::Outcome::incomparable);
  CHECK(verdict.reason.find("kernel launches were not recorded") != std::string::npos);
}

TEST_CASE("memory does not grow with the steps") {
  // A ring that has gone round before the first look: its pages, and those of the queues behind it, are touched once.
  const Launches launches = record("many", {{"FORKPOINT_RING_SLOTS", "4096"}});
  long early = 0, late = 0;
  REQUIRE(sscanf(launches.outcome.out.c_str(), "%ld\n%ld", &early, &late) == 2);
  CHECK(late - early < 1500);  // KiB in 3,500 steps, of which the index of steps takes some 500
  CHECK(launches.stream->gaps().empty());
  CHECK(launches.of(LaunchKind::kernel).size() == 160'000);
}

TEST_CASE("kernels of modules that come and go are never lost, however many there were") {
  const Launches one = record("modules"), other = record("modules", {{"LAST", "2"}});
  CHECK(one.of(LaunchKind::kernel).size() == 50'000);
  CHECK(one.stream->gaps().empty());
  CHECK(one.of(LaunchKind::kernel).back().params != other.of(LaunchKind::kernel).back().params);
}

TEST_CASE("a copy of rows is digested without what lies between them") {
  const Launches one = record("pitched", {{"FAKE_CUDA_GARBAGE", "1"}}), other = record("pitched", {{"FAKE_CUDA_GARBAGE", "2"}});
  CHECK(one.work(0).second[0].digest != other.work(0).second[0].digest);  // the gaps hold something else
  const auto [copy, source] = one.work(1);
  CHECK((copy.flags & kLaunchToHost) != 0);
  std::vector<float> rows;
  for (int row = 0; row < 10; ++row) {
    for (int i = 0; i < 100; ++i) rows.push_back(static_cast<float>(row + i));
  }
  CHECK(source[0].digest == digest_of(rows));
  CHECK(other.work(1).second[0].digest == source[0].digest);
}

TEST_CASE("a hundred thousand records leave their rows, and the launches after them as well") {
  const Launches launches = record("many_records");
  CHECK(launches.stream->gaps().empty());
  CHECK(launches.of(LaunchKind::record).size() == 100'000);
  CHECK(launches.of(LaunchKind::kernel).size() == 100);
}

TEST_CASE("behind a graph's launch the index of a row is still the one that the recording shows") {
  const Launches shown = record("after_graph");
  const LaunchColumns& step = shown.steps.back().second;
  uint32_t index = 0;
  while (shown.name_of(step.rows[index]) != "beta") ++index;
  const Launches launches =
      record("after_graph", {{"FORKPOINT_RETRY", "2"}, {"FORKPOINT_LAUNCH", "0:" + std::to_string(index)}});
  const auto retries = launches.of(LaunchKind::retry);
  REQUIRE(retries.size() == 2);
  CHECK(retries[0].retry_of == index);
  CHECK(launches.name_of(retries[0]) == "beta");
}

TEST_CASE("a context that a kernel has destroyed does not hold up the exit") {
  const Launches launches = record("broken");
  CHECK(launches.outcome.out == "700\n700\n700\n");
  CHECK(launches.outcome.seconds < 4);
  CHECK_FALSE(launches.stream->gaps().empty());
}

TEST_CASE("a thread's own default stream is not taken for everybody's") {
  const Launches launches = record("per_thread_capture", {{"LIBCUDA", client_path("libcuda.so.1")}});
  CHECK(launches.stream->gaps().empty());
  CHECK(launches.of(LaunchKind::graph).size() == 1);
  const auto kernels = launches.of(LaunchKind::kernel);
  REQUIRE(kernels.size() == 1);
  CHECK((kernels[0].flags & kLaunchInGraph) != 0);
  CHECK((kernels[0].flags & kLaunchLegacyStream) == 0);
  CHECK(launches.work(1).second[0].digest == digest_of(ramp(1000, 2)));
}

TEST_CASE("what was released while nobody watched is not hashed when watching begins again") {
  const Launches launches = record("epochs", {{"FORKPOINT_STEPS", "0:2"}});
  std::vector<uint64_t> sizes;
  for (const auto& [step, columns] : launches.steps) {
    if (!columns.buffers.empty()) sizes.push_back(columns.buffers[0].bytes);
  }
  CHECK(sizes == std::vector<uint64_t>{16 << 20, 40});
}

TEST_CASE("launches that the driver refuses, with digests before them, use nothing up") {
  const Launches launches = record("failing_often", {{"FORKPOINT_INPUTS", "1"}, {"FORKPOINT_RING_SLOTS", "256"}});
  CHECK(launches.outcome.out == "10000\n");
  CHECK(launches.outcome.seconds < 5);
  CHECK(launches.stream->gaps().empty());
  CHECK(launches.of(LaunchKind::kernel).size() == 1);
}

TEST_CASE("a rank that the program tells is recorded if it is wanted, and not if it is not") {
  const TempFolder folder;
  const std::vector<std::string> command = {client_path("launch_client"), client_path("libcuda.so.1"), "second_rank"};
  CHECK(run_program(command, at_launch_level(folder.run(), {{"FORKPOINT_RANKS", "1"}})).status == 0);
  LaunchColumns launches;
  open_stream(folder.run(), 1)->read_launches(0, &launches);
  CHECK(launches.rows.size() > 4);
  const TempFolder other;
  CHECK(run_program(command, at_launch_level(other.run(), {{"FORKPOINT_RANKS", "0"}})).status == 0);
  CHECK(run_program({"sh", "-c", "ls " + other.run() + "/*.fkp"}).status != 0);
}
