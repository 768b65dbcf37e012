// The generator is what other tests believe in: its runs must differ exactly where they are said to.
#include "tests/support/run_generator.h"

#include <doctest/doctest.h>

#include <map>
#include <set>

#include "tests/support/stream_exercise.h"

using namespace forkpoint;

namespace {

GeneratorOptions options_of(int records) {
  GeneratorOptions options;
  options.ranks = 2;
  options.steps = 4;
  options.records_per_step = records;
  return options;
}

// "phase layer tensor" of the records of a step that differ.
std::set<std::string> differing(const Run& a, const Run& b, int rank, int64_t step) {
  std::set<std::string> names;
  const auto* left = a.stream_of(rank);
  const auto* right = b.stream_of(rank);
  StepColumns rows_a, rows_b;
  for (size_t i = 0; i < left->steps().size(); ++i) {
    if (left->steps()[i].step != step) continue;
    left->read_step(i, &rows_a);
    right->read_step(i, &rows_b);
    for (size_t k = 0; k < rows_a.size(); ++k) {
      const Site& site = left->sites()[rows_a.site[k]];
      CHECK(site == right->sites()[rows_b.site[k]]);
      if (rows_a.digest[k] != rows_b.digest[k])
        names.insert(std::string(name(site.phase)) + " " + site.layer + " " + site.tensor);
    }
    CHECK((names.empty()) == (left->steps()[i].digest == right->steps()[i].digest));
  }
  return names;
}

}  // namespace

TEST_CASE("generated runs of equal options are equal, those of another seed are not") {
  const TemporaryFolder folder;
  GeneratorOptions options = options_of(64);
  generate_run(folder / "a", options);
  generate_run(folder / "b", options);
  options.seed = 2;
  generate_run(folder / "c", options);
  const Run a = Run::open(folder / "a"), b = Run::open(folder / "b"), c = Run::open(folder / "c");
  for (int64_t step : {kPrologueStep, int64_t{0}, int64_t{3}}) {
    CHECK(differing(a, b, 1, step).empty());
    CHECK(differing(a, c, 1, step).size() > 5);
  }
}

TEST_CASE("a generated step holds the records asked for, with the data flow of a training") {
  const TemporaryFolder folder;
  generate_run(folder / "a", options_of(67));
  const Run run = Run::open(folder / "a");
  const auto* stream = run.stream_of(0);
  REQUIRE(stream->steps().size() == 5);
  CHECK(stream->steps()[1].records == 67);
  StepColumns rows;
  stream->read_step(1, &rows);
  std::map<std::string, Digest> values;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Site& site = stream->sites()[rows.site[i]];
    values[std::string(name(site.phase)) + " " + site.layer + " " + site.tensor] = rows.digest[i];
  }
  const std::string first = generated_layer_name(0), second = generated_layer_name(1);
  CHECK(values.at("forward " + first + " output") == values.at("forward " + second + " input"));
  CHECK(values.at("backward " + second + " grad_input") == values.at("backward " + first + " grad_output"));
  CHECK(values.at("backward " + first + " weight.grad") == values.at("collective " + first + " input"));
  StepColumns other_rows;
  run.stream_of(1)->read_step(1, &other_rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Site& site = stream->sites()[rows.site[i]];
    const bool reduced = site.phase == Phase::collective && site.role == Role::output;
    if (reduced || site.phase == Phase::optimizer) CHECK(rows.digest[i] == other_rows.digest[i]);
    if (site.role == Role::gradient) CHECK(rows.digest[i] != other_rows.digest[i]);
  }
}

TEST_CASE("a fault shows first where it was planted and reaches other ranks through the collective") {
  const TemporaryFolder folder;
  GeneratorOptions options = options_of(34);  // three layers
  generate_run(folder / "a", options);
  const std::string layer = generated_layer_name(1);
  const int record = find_generated(options, Phase::backward, layer, "weight.grad");
  REQUIRE(record > 0);
  options.fault = GeneratedFault{2, 1, record};
  generate_run(folder / "b", options);
  const Run a = Run::open(folder / "a"), b = Run::open(folder / "b");
  CHECK(differing(a, b, 0, 1).empty());
  CHECK(differing(a, b, 1, 1).empty());
  const std::set<std::string> after = {"collective " + layer + " output", "optimizer " + layer + " weight",
                                       "optimizer " + layer + " weight.exp_avg",
                                       "optimizer " + layer + " weight.exp_avg_sq"};
  CHECK(differing(a, b, 0, 2) == after);
  std::set<std::string> at = after;
  at.insert({"backward " + layer + " weight.grad", "collective " + layer + " input"});
  CHECK(differing(a, b, 1, 2) == at);
  const std::set<std::string> next = differing(a, b, 0, 3);
  CHECK_FALSE(next.contains("data  tokens"));
  CHECK_FALSE(next.contains("forward " + generated_layer_name(0) + " output"));
  CHECK_FALSE(next.contains("forward " + layer + " input"));
  CHECK(next.contains("forward " + layer + " output"));
  CHECK(next.contains("backward " + generated_layer_name(2) + " weight.grad"));
}

TEST_CASE("a fault in the batch changes everything computed from it, on its rank only up to the collective") {
  const TemporaryFolder folder;
  GeneratorOptions options = options_of(34);
  generate_run(folder / "a", options);
  options.fault = GeneratedFault{1, 0, 0};
  generate_run(folder / "b", options);
  const Run a = Run::open(folder / "a"), b = Run::open(folder / "b");
  const std::set<std::string> own = differing(a, b, 0, 1), other = differing(a, b, 1, 1);
  CHECK(own.contains("data  tokens"));
  CHECK(own.contains("forward " + generated_layer_name(0) + " input"));
  CHECK_FALSE(own.contains("optimizer  lr"));
  CHECK(own.size() == 32);  // all but the learning rate and the RNG state
  CHECK(other.size() == 3 * 4);
}

TEST_CASE("a fault that does not propagate, or in one word, is one record") {
  const TemporaryFolder folder;
  GeneratorOptions options = options_of(34);
  generate_run(folder / "a", options);
  options.fault =
      GeneratedFault{1, 1, find_generated(options, Phase::forward, generated_layer_name(2), "output"), false, true};
  generate_run(folder / "b", options);
  const Run a = Run::open(folder / "a"), b = Run::open(folder / "b");
  CHECK(differing(a, b, 0, 1).empty());
  CHECK(differing(a, b, 1, 1) == std::set<std::string>{"forward " + generated_layer_name(2) + " output"});
  CHECK(differing(a, b, 1, 2).empty());
  StepColumns left, right;
  a.stream_of(1)->read_step(2, &left);
  b.stream_of(1)->read_step(2, &right);
  const auto at = static_cast<size_t>(options.fault->record);
  WordChange change;
  REQUIRE(find_single_word_change(left.digest[at], right.digest[at], 4096, &change));
  CHECK(change.word == 7);
  CHECK(change.delta == 32);
}
