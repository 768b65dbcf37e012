#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/cli/made_run.h"
#include "tests/cli/program.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
auto lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

struct Runs {
  TemporaryFolder folder;
  std::string small = folder / "small", large = folder / "large";
  Runs() {
    make_run(small, {});
    make_run(large, {.ranks = 40, .steps = 2, .layers = 96});
  }
};
const Runs& runs() {
  static const Runs made;
  return made;
}

// One rank, two steps; in step 1 a kernel with two buffers, a copy to the host, an allocation and a wait for all
// streams.
void make_launch_run(const std::string& directory) {
  Manifest manifest;
  manifest.command = {"./train"};
  manifest.world_size = 1;
  manifest.level = Level::launch;
  create_run(directory, manifest);
  StreamHeader header;
  header.level = Level::launch;
  const auto writer = HashStreamWriter::create(directory + "/" + stream_file_name(0), header);
  const auto site = [&](const char* layer, const char* op, const char* tensor) {
    return writer->site_id({Phase::forward, Kind::launch, Role::other, layer, op, tensor, ""});
  };
  writer->begin_step(0);
  writer->end_step();
  writer->begin_step(1);
  LaunchRow row;
  row.site = site("blocks.0.mlp", "aten::fill_",
                  "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_");
  row.stream = 3;
  row.grid[0] = 4096, row.grid[1] = 2, row.grid[2] = 1;
  row.block[0] = 128, row.block[1] = row.block[2] = 1;
  row.shared_bytes = 2048;
  row.params = {0xABC, 0xDEF};
  row.flags = kLaunchInGraph;
  row.buffers = 2;
  BufferRow buffers[2];
  buffers[0].place = 16;
  buffers[0].flags = kBufferBefore;
  buffers[0].allocation = 12;
  buffers[0].offset = 640;
  buffers[0].address = 0x7F0000000280;
  buffers[0].bytes = 4096;
  buffers[0].digest = {1, 2};
  buffers[1].place = 24;
  buffers[1].flags = kBufferNoDigest;
  buffers[1].allocation = 13;
  buffers[1].bytes = 1024;
  writer->append_launch(row, buffers);

  LaunchRow copy;
  copy.kind = LaunchKind::copy;
  copy.flags = kLaunchToHost;
  copy.site = site("", "", "cuMemcpyDtoHAsync");
  copy.stream = 3;
  copy.bytes = 64;
  copy.buffers = 2;
  buffers[0].place = kPlaceSource;
  buffers[0].flags = kBufferRead;
  buffers[0].offset = 0;
  buffers[1].place = kPlaceTarget;
  buffers[1].flags = kBufferWritten;
  buffers[1].allocation = 0;
  for (BufferRow& buffer : buffers) buffer.bytes = 64, buffer.digest = {3, 4};
  writer->append_launch(copy, buffers);

  LaunchRow other;
  other.site = site("", "", "");
  other.kind = LaunchKind::allocate;
  other.stream = 3;
  other.object = 14;
  other.bytes = 1 << 20;
  writer->append_launch(other, nullptr);
  other = {};
  other.site = site("", "", "");
  other.kind = LaunchKind::synchronize;
  other.stream = kEveryStream;
  writer->append_launch(other, nullptr);
  writer->end_step();
  writer->finish();
  manifest.state = RunState::whole;
  write_manifest(directory, manifest);
}

nlohmann::json json_of(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"show", "--json"});
  return nlohmann::json::parse(run_forkpoint(arguments).out);
}

}  // namespace

TEST_CASE("without filters a run is shown on one screen, however large") {
  for (const std::string& run : {runs().small, runs().large}) {
    const ProgramResult result = run_forkpoint({"show", run});
    CHECK(result.status == 0);
    CHECK(result.out.starts_with(run + "\n"));
    CHECK(lines(result.out) <= 40);
    CHECK(contains(result.out, "state     whole; command: exited with status 0"));
    CHECK(contains(result.out, "./train --steps"));
  }
  const std::string small = run_forkpoint({"show", runs().small}).out;
  CHECK(contains(small, "6 (0 to 5), all complete"));
  CHECK(contains(small, "2 of 2: ranks 0, 1"));
  CHECK(contains(small, "blocks.*.mlp.fc1"));
}

TEST_CASE("a filter lists the records that match, with form, digest and statistics") {
  const ProgramResult result = run_forkpoint(
      {"show", runs().small, "--steps", "2", "--ranks", "1", "--phase", "backward", "--layer", "blocks.1.*"});
  CHECK(result.status == 0);
  CHECK(lines(result.out) == 3);
  CHECK(result.out.starts_with("rank 1, step 2\n"));
  CHECK(contains(result.out, "backward   blocks.1.mlp.fc1: weight.grad"));
  CHECK(contains(result.out, "f32[64, 32]"));
  CHECK(contains(result.out, "absmax "));
  const ProgramResult scalars =
      run_forkpoint({"show", runs().small, "--tensor", "l[ro]*", "--steps", "0:1", "--ranks", "0"});
  CHECK(contains(scalars.out, "loss  scalar  value 4"));
  CHECK(contains(scalars.out, "value 0.001"));
}

TEST_CASE("--records lists everything and --summary a line a step and rank") {
  CHECK(lines(run_forkpoint({"show", runs().small, "--records"}).out) > 200);
  const ProgramResult result = run_forkpoint({"show", runs().small, "--summary", "--ranks", "0", "--steps", "1:3"});
  CHECK(lines(result.out) == 3);
  CHECK(contains(result.out, "step 2"));
  CHECK(run_forkpoint({"show", runs().small, "--summary", "--layer", "x"}).status == 2);
}

TEST_CASE("--json is one object with the same fields whatever was asked for") {
  for (const std::vector<std::string>& more :
       std::vector<std::vector<std::string>>{{}, {"--records"}, {"--summary"}, {"--steps", "99"}}) {
    std::vector<std::string> arguments{runs().small};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto json = json_of(arguments);
    for (const char* key :
         {"run",          "state",     "manifest",         "ranks",        "missing_ranks", "step_count",
          "first_step",   "last_step", "incomplete_steps", "record_count", "bytes_hashed",  "size_bytes",
          "layers",       "gaps",      "coverage_limits",  "steps",        "records",       "launches",
          "launch_count", "problems"}) {
      CHECK_MESSAGE(json.contains(key), key);
    }
  }
  const auto json = json_of({runs().small, "--steps", "4", "--ranks", "0", "--tensor", "loss"});
  REQUIRE(json["records"].size() == 1);
  const auto& record = json["records"][0];
  for (const char* key : {"step",          "rank",   "micro_step", "call",         "phase", "layer", "op",
                          "tensor",        "kind",   "role",       "communicator", "dtype", "shape", "global_shape",
                          "global_offset", "digest", "absmax",     "nonfinite",    "value", "eval",  "recompute"}) {
    CHECK_MESSAGE(record.contains(key), key);
  }
  CHECK(record["value"] == 4.0 / std::sqrt(5.0));
  CHECK(record["digest"].get<std::string>().size() == 32);
  CHECK(json["manifest"]["command"][0] == "./train");
  CHECK(json_of({runs().small, "--steps", "99"})["records"].empty());
}

TEST_CASE("nothing that matches is said on stderr") {
  const ProgramResult result = run_forkpoint({"show", runs().small, "--layer", "no.such.layer"});
  CHECK(result.status == 0);
  CHECK(result.out.empty());
  CHECK(contains(result.err, "nothing in it matches"));
  CHECK(contains(run_forkpoint({"show", runs().small, "--phase", "sideways"}).err, "backward"));
}

TEST_CASE("a broken run shows what can be read, and what is wrong") {
  const TemporaryFolder folder;
  make_run(folder / "run", {.ranks = 3, .leave_out = {2}});
  std::ofstream(folder / "run/rank-00001.fkp") << "this is no stream";
  fs::resize_file(folder / "run/rank-00000.fkp", fs::file_size(folder / "run/rank-00000.fkp") * 2 / 3);
  const ProgramResult result = run_forkpoint({"show", folder / "run"});
  CHECK(result.status == 0);
  CHECK(contains(result.out, "state     died"));
  CHECK(contains(result.out, "1 of 3: rank 0; missing: ranks 1, 2"));
  CHECK(contains(result.out, "  problem   "));
  CHECK(contains(result.out, "rank-00001.fkp"));
  CHECK(contains(result.out, "  gap       rank 0"));
}

TEST_CASE("of a run without a readable stream the manifest is shown, and that it is trouble") {
  const TemporaryFolder folder;
  make_run(folder / "run", {.leave_out = {0, 1}});
  const ProgramResult result = run_forkpoint({"show", folder / "run"});
  CHECK(result.status == 2);
  CHECK(contains(result.out, "./train"));
  CHECK(contains(result.out, "  problem   "));
  CHECK(json_of({folder / "run"})["problems"].size() == 1);
  CHECK(run_forkpoint({"show", folder / "absent"}).status == 2);
}

TEST_CASE("the overview counts launches where there are any, and names no kernel among the tensors") {
  const TemporaryFolder folder;
  make_launch_run(folder / "run");
  const std::string text = run_forkpoint({"show", folder / "run"}).out;
  CHECK(contains(text, "level launch"));
  CHECK(contains(text, "  launches  4, about 2 a step and rank\n"));
  CHECK_FALSE(contains(run_forkpoint({"show", runs().small}).out, "launches"));
  const auto json = json_of({folder / "run"});
  CHECK(json["launch_count"] == 4);
  CHECK(json["ranks"][0]["launches"] == 4);
  CHECK(json["launches"].is_null());
  for (const auto& layer : json["layers"]) CHECK(layer["tensors"].empty());
  CHECK(json_of({runs().small})["launch_count"] == 0);
  CHECK(contains(run_forkpoint({"show", folder / "run", "--summary", "--steps", "1"}).out, "4 launches"));
  const auto steps = json_of({folder / "run", "--summary"})["steps"];
  CHECK(steps[0]["launches"] == 0);
  CHECK(steps[0]["launch_digest"].is_null());
  CHECK(steps[1]["launches"] == 4);
  CHECK(steps[1]["launch_digest"].get<std::string>().size() == 32);
}

TEST_CASE("--launches lists what a step launched, with a line a buffer") {
  const TemporaryFolder folder;
  make_launch_run(folder / "run");
  const ProgramResult result = run_forkpoint({"show", folder / "run", "--launches", "1"});
  CHECK(result.status == 0);
  CHECK(result.out ==
        "rank 0, step 1: 4 launches\n"
        "       0  stream 3   kernel  vectorized_elementwise_kernel  grid 4096x2x1 block 128x1x1 shared 2.0 KiB"
        "  (forward: blocks.0.mlp, aten::fill_)  [in graph]\n"
        "          +0x10    #12+640             4.0 KiB  00000000000000010000000000000002  [before]\n"
        "          +0x18    #13+0               1.0 KiB  --------------------------------  [no digest]\n"
        "       1  stream 3   copy  cuMemcpyDtoHAsync  64 bytes  [to host]\n"
        "          source   #12+0              64 bytes  00000000000000030000000000000004  [read]\n"
        "          target   host memory        64 bytes  00000000000000030000000000000004  [written]\n"
        "       2  stream 3   allocate  allocation 14  1.0 MiB\n"
        "       3  stream all synchronize\n");
  const ProgramResult filtered = run_forkpoint({"show", folder / "run", "--launches", "1", "--layer", "blocks.*"});
  CHECK(lines(filtered.out) == 4);
  CHECK(contains(filtered.out, "rank 0, step 1: 4 launches"));
  CHECK(
      contains(run_forkpoint({"show", folder / "run", "--launches", "1", "--tensor", "cuMemcpy*"}).out, "       1  "));
}

TEST_CASE("--launches --json has the name as it is mangled and readable, and every field of row and buffer") {
  const TemporaryFolder folder;
  make_launch_run(folder / "run");
  const auto json = json_of({folder / "run", "--launches", "1", "--ranks", "0"});
  CHECK(json["records"].is_null());
  CHECK(json["steps"].is_null());
  REQUIRE(json["launches"].size() == 4);
  const auto& kernel = json["launches"][0];
  CHECK(kernel["step"] == 1);
  CHECK(kernel["rank"] == 0);
  CHECK(kernel["index"] == 0);
  CHECK(kernel["kind"] == "kernel");
  CHECK(kernel["name"].get<std::string>().starts_with("_ZN2at6native29vectorized"));
  CHECK(kernel["demangled"].get<std::string>().starts_with("void at::native::vectorized_elementwise_kernel<4, "));
  CHECK(kernel["short_name"] == "vectorized_elementwise_kernel");
  CHECK(kernel["layer"] == "blocks.0.mlp");
  CHECK(kernel["stream"] == 3);
  CHECK(kernel["grid"] == nlohmann::json({4096, 2, 1}));
  CHECK(kernel["block"] == nlohmann::json({128, 1, 1}));
  CHECK(kernel["shared_bytes"] == 2048);
  CHECK(kernel["params"] == "0000000000000abc0000000000000def");
  CHECK(kernel["flags"] == nlohmann::json::array({"in graph"}));
  CHECK(kernel["retry_of"].is_null());
  REQUIRE(kernel["buffers"].size() == 2);
  CHECK(kernel["buffers"][0]["place"] == 16);
  CHECK(kernel["buffers"][0]["allocation"] == 12);
  CHECK(kernel["buffers"][0]["offset"] == 640);
  CHECK(kernel["buffers"][0]["address"] == "0x7f0000000280");
  CHECK(kernel["buffers"][0]["digest"] == "00000000000000010000000000000002");
  CHECK(kernel["buffers"][1]["digest"].is_null());
  const auto& copy = json["launches"][1];
  CHECK(copy["buffers"][0]["place"] == "source");
  CHECK(copy["buffers"][1]["allocation"].is_null());
  CHECK(json["launches"][3]["stream"] == "all");
  CHECK(json["launches"][3]["name"].is_null());
  for (const auto& launch : json["launches"]) {
    for (const char* key :
         {"step",   "rank",   "index",      "kind",     "name",  "demangled", "short_name",   "phase",
          "layer",  "op",     "micro_step", "stream",   "grid",  "block",     "shared_bytes", "param_bytes",
          "params", "object", "bytes",      "retry_of", "flags", "buffers"}) {
      CHECK_MESSAGE(launch.contains(key), key);
    }
  }
}

TEST_CASE("a step without launches is said in a sentence, and --launches goes with one step only") {
  const TemporaryFolder folder;
  make_launch_run(folder / "run");
  const auto said = [&](const std::string& run, const std::string& step, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments{"show", run, "--launches", step};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = run_forkpoint(arguments);
    CHECK(result.status == 0);
    CHECK(result.out.empty());
    return result.err;
  };
  CHECK(contains(said(folder / "run", "0"), "step 0 holds no launches."));
  CHECK(contains(said(folder / "run", "0"), "There are launches in step 1."));
  CHECK(contains(said(folder / "run", "7"), "there is no step 7 in it. There are launches in step 1."));
  CHECK(contains(said(folder / "run", "-1"), "it holds no launches before the first step. There are launches in step 1."));
  CHECK(contains(said(folder / "run", "1", {"--ranks", "3"}), "it has no rank that --ranks asks for."));
  CHECK(contains(said(folder / "run", "1", {"--layer", "x"}), "no launch of step 1 matches."));
  CHECK(
      contains(said(runs().small, "2"), "step 2 holds no launches: the run was recorded at level layer, not launch."));
  CHECK(json_of({folder / "run", "--launches", "0"})["launches"].empty());
  const std::vector<std::vector<std::string>> wrong{{"--launches", "1:2"},
                                                    {"--launches", "x"},
                                                    {"--launches", "1", "--steps", "1"},
                                                    {"--launches", "1", "--records"},
                                                    {"--launches", "1", "--summary"}};
  for (const std::vector<std::string>& more : wrong) {
    std::vector<std::string> arguments{"show", folder / "run"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = run_forkpoint(arguments);
    CHECK(result.status == 2);
    CHECK(contains(result.err, "--launches"));
  }
  const auto refused = [&](const std::string& text) { return run_forkpoint({"show", folder / "run", "--launches", text}).err; };
  for (const char* text : {"x", "-2", "1:2", ":", "", "99999999999999999999"}) {
    CAPTURE(text);
    CHECK(contains(refused(text), fmt::format("--launches `{}` is not the number of a step, such as 7 (-1: before the first step).", text)));
  }
  CHECK(contains(refused("1:2"), "The launches of one step are listed at a time, each with its index: --launches 1."));
}

TEST_CASE("launches that are damaged are said to be, not left out in silence") {
  const TemporaryFolder folder;
  make_launch_run(folder / "run");
  const std::string path = folder / "run/rank-00000.fkp";
  std::ifstream in(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), {});
  const size_t frame = bytes.find("FK\xf7m\x09");  // the launches frame
  REQUIRE(frame != std::string::npos);
  bytes[frame + 64 + 20] ^= 1;
  std::ofstream(path, std::ios::binary) << bytes;
  const ProgramResult result = run_forkpoint({"show", folder / "run", "--launches", "1"});
  CHECK(result.out.empty());
  CHECK(contains(result.err, "step 1 is damaged at byte " + std::to_string(frame)));
  CHECK_FALSE(contains(result.err, "holds no launches"));
}

TEST_CASE("`| head` is quiet") {
  const ProgramResult result =
      run_shell("$FORKPOINT show --records " + runs().large + " | head -n 1; echo ${PIPESTATUS[0]}");
  CHECK(result.out.ends_with("\n0\n"));
  CHECK(result.err.empty());
}

}  // namespace forkpoint
