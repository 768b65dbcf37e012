// What a program records is what the stream holds.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "tests/probe/harness.h"
#include "tests/probe/sample_data.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

std::vector<Row> record(const std::vector<std::string>& scenario, const Environment& more = {}) {
  const TempFolder folder;
  const Outcome outcome = run_program(client(scenario), under_probe(folder.run(), more));
  INFO(outcome.err);
  REQUIRE(outcome.status == 0);
  const auto stream = open_stream(folder.run());
  REQUIRE(stream->state() == StreamState::whole);
  REQUIRE(stream->verify() == "");
  return all_rows(*stream);
}

Digest digest_of(const std::vector<float>& values, size_t first = 0) {
  return digest_bytes(values.data() + first, (values.size() - first) * sizeof(float), DType::f32).digest;
}

}  // namespace

TEST_CASE("every kind of record comes back as it was made") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"kinds"}), under_probe(folder.run(), {{"RANK", "2"}, {"WORLD_SIZE", "3"}}));
  REQUIRE(outcome.status == 0);
  CHECK(outcome.out == "");
  CHECK(outcome.err == "");
  const auto stream = open_stream(folder.run(), 2);
  CHECK(stream->state() == StreamState::whole);
  CHECK(stream->gaps().empty());
  CHECK(stream->coverage_limits().empty());

  SUBCASE("the header says who") {
    const StreamHeader& header = stream->header();
    CHECK(header.rank == 2);
    CHECK(header.world_size == 3);
    CHECK(header.level == Level::layer);
    CHECK(header.step_base == "step(n)");
    CHECK(header.every == 1);
    const std::pair<std::string, std::string> fact = {"tp_rank", "3"};
    CHECK(std::count(header.facts.begin(), header.facts.end(), fact) == 1);
  }
  SUBCASE("steps are the prologue and those that the program began") {
    std::vector<int64_t> steps;
    for (const StepSummary& step : stream->steps()) {
      steps.push_back(step.step);
      CHECK(step.complete);
    }
    CHECK(steps == std::vector<int64_t>{kPrologueStep, 7, 8});
  }
  SUBCASE("tensors") {
    const auto rows = all_rows(*stream);
    const auto weight = rows_of(rows, "weight");
    REQUIRE(weight.size() == 1);
    CHECK(weight[0].step == kPrologueStep);
    CHECK(weight[0].site == Site{Phase::load, Kind::tensor, Role::parameter, "", "", "weight", ""});
    CHECK(weight[0].layout == Layout{DType::f32, {3, 4}, {}, {}, {}});
    CHECK(weight[0].record.digest == digest_of(sample_floats(12, 1)));
    const auto batch = rows_of(rows, "batch");
    REQUIRE(batch.size() == 2);
    CHECK(batch[0].site.phase == Phase::data);
    CHECK(batch[0].layout.dtype == DType::i64);
    CHECK(batch[0].record.stats.absmax == 7);
    const auto input = rows_of(rows, "input");
    REQUIRE(input.size() == 4);
    CHECK(input[1].record.micro_step == 1);
    CHECK(input[1].record.call == 0);
    CHECK(input[1].site == Site{Phase::forward, Kind::tensor, Role::input, "blocks.0.fc1", "linear", "input", ""});
    CHECK(input[1].record.digest == digest_of(sample_floats(24, 2)));
  }
  SUBCASE("an inner scope inherits, and the n-th record of a site is its call n") {
    const auto output = rows_of(all_rows(*stream), "output");
    REQUIRE(output.size() == 8);
    for (const Row& row : output) CHECK(row.site == Site{Phase::forward, Kind::tensor, Role::output, "blocks.0.fc1", "gelu", "output", ""});
    CHECK(output[0].record.call == 0);
    CHECK(output[1].record.call == 1);
    CHECK(output[1].layout.shape == std::vector<int64_t>{23});
    CHECK(output[1].record.digest == digest_of(sample_floats(24, 2), 1));
    CHECK(output[2].record.micro_step == 1);
    CHECK(output[2].record.call == 0);
    CHECK(output[4].step == 8);
    CHECK(output[4].record.call == 0);
  }
  SUBCASE("collectives") {
    const auto grad = rows_of(all_rows(*stream), "grad");
    REQUIRE(grad.size() == 4);
    CHECK(grad[0].site == Site{Phase::collective, Kind::collective, Role::input, "blocks.0.fc1", "all_reduce", "grad", "dp"});
    CHECK(grad[1].site == Site{Phase::collective, Kind::collective, Role::output, "", "all_gather", "grad", "0,1,2"});
    const auto communicators = stream->communicators();
    REQUIRE(communicators.size() == 2);
    CHECK(communicators[0] == Communicator{"dp", {0, 2}});
    CHECK(communicators[1] == Communicator{"0,1,2", {0, 1, 2}});
  }
  SUBCASE("scalars and states") {
    const auto rows = all_rows(*stream);
    const auto loss = rows_of(rows, "loss");
    REQUIRE(loss.size() == 2);
    CHECK(loss[0].site == Site{Phase::forward, Kind::scalar, Role::loss, "", "", "loss", ""});
    CHECK(scalar_value(loss[0].record.digest) == -1.25);
    CHECK(loss[0].record.stats.absmax == 1.25f);
    const auto scale = rows_of(rows, "scale");
    REQUIRE(scale.size() == 2);
    CHECK(std::isinf(scalar_value(scale[0].record.digest)));
    CHECK(scale[0].record.stats.nonfinite == 1);
    const auto rng = rows_of(rows, "torch");
    REQUIRE(rng.size() == 2);
    CHECK(rng[0].site == Site{Phase::state, Kind::state, Role::rng, "", "", "torch", ""});
    CHECK(rng[0].layout == Layout{DType::raw, {16}, {}, {}, {}});
    CHECK(rng[0].record.digest == digest_bytes("generator state", 16).digest);
  }
}

TEST_CASE("level step leaves inputs and outputs of layers out, but not those of collectives") {
  const auto rows = record({"kinds"}, {{"FORKPOINT_LEVEL", "step"}});
  CHECK(rows_of(rows, "input").empty());
  CHECK(rows_of(rows, "output").empty());
  CHECK(rows_of(rows, "grad").size() == 4);
  CHECK(rows_of(rows, "loss").size() == 2);
}

TEST_CASE("views are digested in logical order and shards add up to the whole") {
  const auto rows = record({"views"});
  const std::vector<float> values = sample_floats(64, 4);
  std::vector<float> transposed, reversed;
  for (size_t i = 0; i < 64; ++i) transposed.push_back(values[i % 8 * 8 + i / 8]);
  for (size_t i = 0; i < 64; ++i) reversed.push_back(values[(7 - i / 8) * 8 + i % 8]);
  const auto only = [&](const std::string& name) {
    const auto found = rows_of(rows, name);
    REQUIRE(found.size() == 1);
    return found[0];
  };
  CHECK(only("whole").record.digest == digest_of(values));
  CHECK(only("contiguous").record.digest == digest_of(values));
  CHECK(only("contiguous").layout.strides.empty());
  CHECK(only("transposed").record.digest == digest_of(transposed));
  CHECK(only("transposed").layout.strides == std::vector<int64_t>{1, 8});
  CHECK(only("reversed").record.digest == digest_of(reversed));
  CHECK(only("shard0").record.digest + only("shard1").record.digest == digest_of(values));
  CHECK(only("shard1").layout == Layout{DType::f32, {8, 4}, {8, 1}, {8, 8}, {0, 4}});
  CHECK(only("scalar tensor").record.digest == digest_of({values[0]}));
  CHECK(only("scalar tensor").layout == Layout{DType::f32, {}, {}, {}, {}});
  CHECK(only("empty").record.digest == Digest{});
  CHECK(only("empty").layout == Layout{DType::f32, {0, 8}, {}, {}, {}});
}

TEST_CASE("records between two steps belong to the next one, and those after the last are a coverage limit") {
  const TempFolder folder;
  REQUIRE(run_program(client({"between"}), under_probe(folder.run())).status == 0);
  const auto stream = open_stream(folder.run());
  const auto rows = all_rows(*stream);
  CHECK(rows_of(rows, "prologue")[0].step == kPrologueStep);
  const auto before = rows_of(rows, "before");
  REQUIRE(before.size() == 3);
  CHECK(before[0].step == kPrologueStep);
  CHECK(before[1].step == 1);
  CHECK(before[2].step == 2);
  CHECK(rows_of(rows, "inside").size() == 3);
  CHECK(rows_of(rows, "after").empty());
  CHECK(has_limit(*stream, "after the end of the last step"));
}

TEST_CASE("a batch that is drawn before its step begins belongs to it, also to the first") {
  const TempFolder folder, stepless;
  REQUIRE(run_program(client({"batch_first"}), under_probe(folder.run())).status == 0);
  std::vector<int64_t> steps;
  for (const Row& row : rows_of(all_rows(*open_stream(folder.run())), "batch")) steps.push_back(row.step);
  CHECK(steps == std::vector<int64_t>{5, 6, 7});
  REQUIRE(run_program(client({"no_step"}), under_probe(stepless.run())).status == 0);
  const auto rows = rows_of(all_rows(*open_stream(stepless.run())), "batch");
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].step == kPrologueStep);
}

TEST_CASE("what comes before a wanted step is kept when the steps before it are not wanted") {
  const TempFolder folder;
  REQUIRE(run_program(client({"between"}), under_probe(folder.run(), {{"FORKPOINT_STEPS", "2:2"}})).status == 0);
  std::vector<int64_t> steps;
  for (const Row& row : rows_of(all_rows(*open_stream(folder.run())), "before")) steps.push_back(row.step);
  CHECK(steps == std::vector<int64_t>{kPrologueStep, 2});
}

TEST_CASE("a step that nobody ends is ended by the next one and by the program's end") {
  const TempFolder folder;
  REQUIRE(run_program(client({"without_end"}), under_probe(folder.run())).status == 0);
  const auto stream = open_stream(folder.run());
  REQUIRE(stream->steps().size() == 3);
  for (const StepSummary& step : stream->steps()) CHECK(step.complete);
  CHECK(has_limit(*stream, "the program ends no step itself"));
}

TEST_CASE("only wanted steps and ranks are recorded") {
  const auto steps_of = [](const Environment& more) {
    std::set<int64_t> steps;
    const TempFolder folder;
    const Outcome outcome = run_program(client({"steps", "10"}), under_probe(folder.run(), more));
    CHECK(outcome.status == 3);
    CHECK(outcome.out == "trained\n");
    for (const Row& row : all_rows(*open_stream(folder.run()))) steps.insert(row.step);
    return steps;
  };
  CHECK(steps_of({{"FORKPOINT_STEPS", "3:5"}}) == std::set<int64_t>{3, 4, 5});
  CHECK(steps_of({{"FORKPOINT_EVERY", "4"}}) == std::set<int64_t>{0, 4, 8});
  CHECK(steps_of({{"FORKPOINT_EVERY", "2"}, {"FORKPOINT_STEPS", "3:6"}}) == std::set<int64_t>{4, 6});

  const TempFolder folder;
  for (const char* rank : {"0", "1", "2", "3"}) {
    const Environment more = {{"RANK", rank}, {"WORLD_SIZE", "4"}, {"FORKPOINT_RANKS", "0,2-3"}};
    CHECK(run_program(client({"steps"}), under_probe(folder.run(), more)).status == 3);
  }
  const Run run = Run::open(folder.run());
  CHECK(run.stream_of(1) == nullptr);
  CHECK(run.streams().size() == 3);
  CHECK(run.state() == RunState::whole);
  CHECK(run.manifest().ranks == std::vector<int>{0, 2, 3});
  const TempFolder other;
  CHECK(run_program(client({"steps", "2", "1", "4"}), under_probe(other.run(), {{"FORKPOINT_RANKS", "0"}})).status == 3);
  CHECK_THROWS(read_manifest(other.run()));
}

TEST_CASE("masked names are hashes, equal in every process, and hide no difference of sites") {
  const Environment mask = {{"FORKPOINT_MASK_NAMES", "1"}};
  const auto first = record({"kinds"}, mask), second = record({"kinds"}, mask), plain = record({"kinds"});
  REQUIRE(first.size() == plain.size());
  REQUIRE(first.size() == second.size());
  std::set<std::string> masked_sites, plain_sites;
  const auto text = [](const Site& site) { return site.layer + "|" + site.op + "|" + site.tensor + "|" + site.communicator; };
  for (size_t i = 0; i < first.size(); ++i) {
    CHECK(first[i].site == second[i].site);
    CHECK(first[i].record.digest == plain[i].record.digest);
    CHECK(first[i].site.tensor.size() == 17);
    CHECK(first[i].site.layer.find("fc1") == std::string::npos);
    CHECK(first[i].site.layer.empty() == plain[i].site.layer.empty());
    masked_sites.insert(text(first[i].site));
    plain_sites.insert(text(plain[i].site));
  }
  CHECK(masked_sites.size() == plain_sites.size());
}

TEST_CASE("scopes deeper than the stack are counted, noted and survived") {
  const TempFolder folder;
  const Outcome outcome = run_program(client({"nested", "1000"}), under_probe(folder.run()));
  CHECK(outcome.status == 0);
  const auto stream = open_stream(folder.run());
  const auto rows = all_rows(*stream);
  CHECK(rows_of(rows, "deep")[0].site.layer == "layer63");
  CHECK(rows_of(rows, "out")[0].site.layer == "");
  CHECK(has_limit(*stream, "scopes nested deeper than 64"));
}

TEST_CASE("eight threads record at once and nothing is lost") {
  const auto rows = record({"threads", "8", "5000"}, {{"FORKPOINT_RING_SLOTS", "256"}});
  CHECK(rows.size() == 40'000);
  std::set<double> values;
  std::set<std::pair<std::string, uint32_t>> calls;
  for (const Row& row : rows) {
    values.insert(scalar_value(row.record.digest));
    calls.emplace(row.site.layer, row.record.call);
  }
  CHECK(values.size() == 40'000);
  CHECK(calls.size() == 40'000);
}

TEST_CASE("one communicator name with two sets of members stays two communicators") {
  const TempFolder folder;
  REQUIRE(run_program(client({"same_name"}), under_probe(folder.run())).status == 0);
  const auto stream = open_stream(folder.run());
  REQUIRE(stream->communicators().size() == 2);
  CHECK(stream->communicators()[0] == Communicator{"tp", {0, 1}});
  CHECK(stream->communicators()[1] == Communicator{"tp[2,3]", {2, 3}});
}

TEST_CASE("forkpoint.h serves a C program, with the probe and without") {
  const TempFolder folder;
  const std::vector<std::string> command = {client_path("probe_client_c")};
  const Outcome with = run_program(command, under_probe(folder.run()));
  CHECK(with.status == 4);
  CHECK(with.out == "active 1\n");
  CHECK(all_rows(*open_stream(folder.run())).size() == 2);
  const Outcome without = run_program(command);
  CHECK(without.status == 4);
  CHECK(without.out == "active 0\n");
}

TEST_CASE("the launcher's variables say which rank it is") {
  const auto rank_of = [](const Environment& more) {
    const TempFolder folder;
    CHECK(run_program(client({"steps", "1"}), under_probe(folder.run(), more)).status == 3);
    const Run run = Run::open(folder.run());
    REQUIRE(run.streams().size() == 1);
    const StreamHeader& header = run.streams()[0]->header();
    return std::pair(header.rank, header.world_size);
  };
  CHECK(rank_of({}) == std::pair(0, 1));
  CHECK(rank_of({{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}) == std::pair(3, 8));
  CHECK(rank_of({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}}) == std::pair(1, 2));
  CHECK(rank_of({{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "6"}}) == std::pair(5, 6));
  CHECK(rank_of({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}) == std::pair(1, 4));
  CHECK(rank_of({{"RANK", "nonsense"}, {"WORLD_SIZE", "8"}}) == std::pair(0, 1));
}

TEST_CASE("launcher's variables that make no sense are said in one line, with what is assumed") {
  const auto said = [](const Environment& more) {
    const TempFolder folder;
    return run_program(client({"steps", "1"}), under_probe(folder.run(), more)).err;
  };
  CHECK(said({}) == "");
  CHECK(said({{"RANK", "1"}, {"WORLD_SIZE", "2"}}) == "");
  CHECK(said({{"RANK", "8"}, {"WORLD_SIZE", "8"}}) ==
        "forkpoint: RANK is 8 and WORLD_SIZE is 8: ranks count from 0, so there is no such rank; this process is recorded as rank 0 of 1\n");
  CHECK(said({{"RANK", "two"}, {"WORLD_SIZE", "8"}}) ==
        "forkpoint: RANK is \"two\", which is no rank; this process is recorded as rank 0 of 1\n");
  CHECK(said({{"RANK", "2"}, {"WORLD_SIZE", "many"}}) ==
        "forkpoint: WORLD_SIZE is \"many\", which is no number of ranks; this process is recorded as rank 2 of at least 3\n");
  CHECK(said({{"RANK", "-1"}, {"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}) ==
        "forkpoint: RANK is \"-1\", which is no rank; this process is recorded as rank 1 of 4\n");
  // A process that records nothing is silent.
  const TempFolder folder;
  CHECK(run_program(client({"active"}), under_probe(folder.run(), {{"RANK", "8"}, {"WORLD_SIZE", "8"}})).err == "");
}
