// What a writer was given is what a reader returns.
#include "lib/hash_stream.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <thread>

#include "lib/error.h"
#include "lib/hash_stream_format.h"
#include "lib/hash_stream_tail.h"
#include "tests/support/run_generator.h"
#include "tests/support/sample_stream.h"
#include "tests/support/stream_exercise.h"

using namespace forkpoint;

namespace {

std::map<std::string, Digest> roots_by_step(const HashStreamReader& reader) {
  std::map<std::string, Digest> roots;
  for (const StepSummary& step : reader.steps()) roots[std::to_string(step.step)] = step.digest;
  return roots;
}

// One step with one record; what changes the record changes the root or does not.
Digest root_with(void (*change)(Site*, Layout*, Record*)) {
  const TemporaryFolder folder;
  Site site = sample_site(8);
  Layout layout = sample_layout(3);
  Record record;
  record.digest = {1, 2};
  change(&site, &layout, &record);
  const auto writer = HashStreamWriter::create(folder / "s.fkp", sample_header());
  record.site = writer->site_id(site);
  record.layout = writer->layout_id(layout);
  writer->begin_step(0);
  writer->append(record, 8);
  writer->end_step();
  writer->finish();
  return HashStreamReader::open(folder / "s.fkp")->steps()[0].digest;
}

}  // namespace

TEST_CASE("every field of header, names, records, gaps and limits comes back as it was written") {
  const TemporaryFolder folder;
  make_sample(folder / "s.fkp");
  const auto reader = HashStreamReader::open(folder / "s.fkp");
  const StreamHeader expected = sample_header();
  const StreamHeader& header = reader->header();
  CHECK(header.rank == expected.rank);
  CHECK(header.world_size == expected.world_size);
  CHECK(header.host == expected.host);
  CHECK(header.pid == expected.pid);
  CHECK(header.boot_id == expected.boot_id);
  CHECK(header.pid_start_ticks == expected.pid_start_ticks);
  CHECK(header.pid_namespace == expected.pid_namespace);
  CHECK(header.level == expected.level);
  CHECK(header.step_base == expected.step_base);
  CHECK(header.every == expected.every);
  CHECK(header.device == expected.device);
  CHECK(header.facts == expected.facts);
  CHECK(reader->state() == StreamState::whole);
  CHECK(reader->verify() == "");
  REQUIRE(reader->communicators().size() == 1);
  CHECK(reader->communicators()[0] == Communicator{"dp", {0, 2, 3, 7}});
  REQUIRE(reader->coverage_limits().size() == 1);
  CHECK(reader->coverage_limits()[0] == CoverageLimit{"cuda graph captured before attach", "2 graphs"});
  REQUIRE(reader->gaps().size() == 1);
  CHECK(reader->gaps()[0].first_step == 2);
  CHECK(reader->gaps()[0].last_step == 4);
  CHECK(reader->gaps()[0].records_lost == 17);
  CHECK(reader->gaps()[0].reason == "ring full for 10000 ms");
  for (size_t i = 0; i < reader->sites().size(); ++i) {
    CHECK(reader->sites()[i] == sample_site(static_cast<int>(i)));
    CHECK(reader->site_keys()[i] == site_key(reader->sites()[i]));
  }
  REQUIRE(reader->layouts().size() == 5);
  for (int i = 0; i < 5; ++i) {
    CHECK(reader->layouts()[i] == sample_layout(i));
    CHECK(reader->layout_keys()[i] == layout_key(sample_layout(i)));
  }
}

TEST_CASE("what becomes known of the header later is in it, read by the index, from a stream that was cut, and while it grows") {
  const TemporaryFolder folder;
  const std::string path = folder / "s.fkp";
  StreamHeader header = sample_header();
  header.step_base = "step(n)";
  header.facts = {{"torch", "2.11"}, {"tp_rank", "0"}};
  const auto writer = HashStreamWriter::create(path, header);
  const std::unique_ptr<StreamTail> tail = StreamTail::open(path);
  writer->add_to_header({"checkpoint", {{"tp_rank", "1"}, {"cuda", "13.0"}}});
  Record record;
  record.site = writer->site_id(sample_site(1));
  record.layout = writer->layout_id(sample_layout(1));
  writer->begin_step(4);
  writer->append(record, 8);
  writer->end_step();
  writer->add_to_header({"", {{"late", "yes"}}});
  tail->advance();
  writer->finish();
  const std::string cut = folder / "cut.fkp";
  std::filesystem::copy(path, cut);
  std::filesystem::resize_file(cut, std::filesystem::file_size(path) - 9);  // the index is not found
  const auto whole = HashStreamReader::open(path), scanned = HashStreamReader::open(cut);
  CHECK(whole->state() == StreamState::whole);
  CHECK(scanned->state() != StreamState::whole);
  const HeaderFacts facts = {{"torch", "2.11"}, {"tp_rank", "1"}, {"cuda", "13.0"}, {"late", "yes"}};
  for (const HashStreamReader* reader : {whole.get(), scanned.get(), static_cast<HashStreamReader*>(tail.get())}) {
    CHECK(reader->header().step_base == "checkpoint");
    CHECK(reader->header().facts == facts);
  }
}

TEST_CASE("the records of a step come back in order of arrival, also from several frames") {
  const TemporaryFolder folder;
  make_sample(folder / "s.fkp");
  const auto reader = HashStreamReader::open(folder / "s.fkp");
  // A second writer only tells the ids that the sample's records must have.
  const auto ids = HashStreamWriter::create(folder / "ids.fkp", sample_header());
  write_sample(ids.get());
  REQUIRE(reader->steps().size() == kSampleSteps);
  const int64_t numbers[] = {kPrologueStep, 0, 2, 4, 6};
  StepColumns rows;
  for (size_t i = 0; i < reader->steps().size(); ++i) {
    const StepSummary& step = reader->steps()[i];
    CHECK(step.step == numbers[i]);
    CHECK(step.complete);
    reader->read_step(i, &rows);
    const int count = i == 0 ? 3 : i == 4 ? 0 : 24;
    REQUIRE(rows.size() == static_cast<size_t>(count));
    CHECK(step.records + step.eval_records == rows.size());
    if (step.launches == 0) CHECK(step.bytes_hashed == 100u * static_cast<uint64_t>(count));
    StepColumns expected;
    for (int k = 0; k < count; ++k) {
      const Record want = sample_record(ids.get(), step.step, k + static_cast<int>(std::max<int64_t>(step.step, 0)));
      const Record got = rows.row(static_cast<size_t>(k));
      CHECK(got.site == want.site);
      CHECK(got.layout == want.layout);
      CHECK(got.micro_step == want.micro_step);
      CHECK(got.call == want.call);
      CHECK(got.digest == want.digest);
      CHECK(got.stats.absmax == want.stats.absmax);
      CHECK(got.stats.nonfinite == want.stats.nonfinite);
      CHECK(got.stats.word_sum == want.stats.word_sum);
      CHECK(got.flags == want.flags);
    }
  }
}

TEST_CASE("equal names and layouts get one id, in order of first use, and ids hold across steps") {
  const TemporaryFolder folder;
  const auto writer = HashStreamWriter::create(folder / "s.fkp", sample_header());
  CHECK(writer->site_id(sample_site(4)) == 0);
  CHECK(writer->site_id(sample_site(2)) == 1);
  CHECK(writer->site_id(sample_site(4)) == 0);
  CHECK(writer->layout_id(sample_layout(3)) == 0);
  CHECK(writer->layout_id(sample_layout(2)) == 1);
  writer->begin_step(0);
  writer->end_step();
  CHECK(writer->site_id(sample_site(2)) == 1);
  CHECK(writer->site_id(sample_site(9)) == 2);
  CHECK(writer->layout_id(sample_layout(3)) == 0);
  writer->finish();
  const auto reader = HashStreamReader::open(folder / "s.fkp");
  REQUIRE(reader->sites().size() == 3);
  CHECK(reader->sites()[1] == sample_site(2));
}

TEST_CASE("the tree adds up: phases to the root, layers to their phase, leaves to their layer") {
  const TemporaryFolder folder;
  GeneratorOptions options;
  options.records_per_step = 200;
  options.steps = 2;
  generate_stream(folder / "s.fkp", 0, options);
  const auto reader = HashStreamReader::open(folder / "s.fkp");
  for (size_t i = 0; i < reader->steps().size(); ++i) {
    Digest root;
    std::map<Phase, uint64_t> records_of_phase, sum_of_phase;
    for (const PhaseSummary& phase : reader->phases(i)) {
      root += phase.digest;
      records_of_phase[phase.phase] = phase.records;
      sum_of_phase[phase.phase] = phase.digest.a;
    }
    CHECK(root == reader->steps()[i].digest);
    std::map<Phase, uint64_t> records, sums;
    for (const LayerSummary& layer : reader->layers(i)) {
      records[layer.phase] += layer.records;
      sums[layer.phase] += layer.digest;
    }
    CHECK(records == records_of_phase);
    CHECK(sums == sum_of_phase);
  }
  const std::vector<LayerSummary> layers = reader->layers(1);
  const auto first_forward = std::find_if(layers.begin(), layers.end(), [](const LayerSummary& layer) {
    return layer.phase == Phase::forward && layer.layer == "model.blocks.0.ln_1";
  });
  REQUIRE(first_forward != layers.end());
  CHECK(first_forward->records == 2);
}

TEST_CASE("equal records give equal trees in any order of arrival") {
  const TemporaryFolder folder;
  GeneratorOptions options;
  options.records_per_step = 300;
  options.steps = 5;
  generate_stream(folder / "a.fkp", 0, options);
  options.shuffle_arrival = true;
  generate_stream(folder / "b.fkp", 0, options);
  options.seed_of_arrival = 2;
  generate_stream(folder / "c.fkp", 0, options);
  const auto a = HashStreamReader::open(folder / "a.fkp");
  const auto b = HashStreamReader::open(folder / "b.fkp");
  const auto c = HashStreamReader::open(folder / "c.fkp");
  CHECK(roots_by_step(*a) == roots_by_step(*b));
  CHECK(roots_by_step(*b) == roots_by_step(*c));
  StepColumns rows_b, rows_c;
  b->read_step(2, &rows_b);
  c->read_step(2, &rows_c);
  CHECK_FALSE(rows_b.digest == rows_c.digest);
}

TEST_CASE("the root differs when a name, the form, the place or the value of one record differs, and only then") {
  const Digest root = root_with([](Site*, Layout*, Record*) {});
  CHECK(root_with([](Site*, Layout*, Record*) {}) == root);
  CHECK(root_with([](Site* s, Layout*, Record*) { s->tensor = "other"; }) != root);
  CHECK(root_with([](Site* s, Layout*, Record*) { s->phase = Phase::state; }) != root);
  CHECK(root_with([](Site*, Layout* l, Record*) { l->dtype = DType::i8; }) != root);
  CHECK(root_with([](Site*, Layout* l, Record*) { l->global_offset = {8, 0}; }) != root);
  CHECK(root_with([](Site*, Layout*, Record* r) { r->micro_step = 1; }) != root);
  CHECK(root_with([](Site*, Layout*, Record* r) { r->call = 1; }) != root);
  CHECK(root_with([](Site*, Layout*, Record* r) { r->digest.b = 3; }) != root);
  CHECK(root_with([](Site*, Layout*, Record* r) { r->flags = kRecordRecompute; }) != root);
  CHECK(root_with([](Site*, Layout* l, Record*) { l->strides = {64, 1}; }) == root);
  CHECK(root_with([](Site*, Layout*, Record* r) { r->stats = {1, 2, 3}; }) == root);
}

TEST_CASE("evaluation records are kept, but in no sum") {
  const TemporaryFolder folder;
  const auto write = [&](const std::string& name, bool evaluates) {
    const auto writer = HashStreamWriter::create(folder / name, sample_header());
    writer->begin_step(0);
    for (int i = 0; i < 6; ++i) {
      writer->append(sample_record(writer.get(), 0, i), 1);
      if (!evaluates) continue;
      Record record = sample_record(writer.get(), 9, i);
      record.flags = kRecordEval;
      writer->append(record, 1);
    }
    writer->end_step();
    writer->finish();
    return HashStreamReader::open(folder / name);
  };
  const auto without = write("a.fkp", false);
  const auto with = write("b.fkp", true);
  CHECK(without->steps()[0].digest == with->steps()[0].digest);
  CHECK(with->steps()[0].records == 6);
  CHECK(with->steps()[0].eval_records == 6);
  CHECK(with->phases(0).size() == without->phases(0).size());
  StepColumns rows;
  with->read_step(0, &rows);
  CHECK(rows.size() == 12);
}

TEST_CASE("a record of a step of 2,000 costs at most 26 bytes, names, tree and frames included") {
  const TemporaryFolder folder;
  GeneratorOptions options;
  options.steps = 100;
  for (const bool shuffled : {false, true}) {
    options.shuffle_arrival = shuffled;
    const std::string path = folder / (shuffled ? "b.fkp" : "a.fkp");
    generate_stream(path, 0, options);
    const auto reader = HashStreamReader::open(path);
    uint64_t records = 0;
    for (const StepSummary& step : reader->steps()) records += step.records;
    const double bytes_a_record = static_cast<double>(reader->size_bytes()) / static_cast<double>(records);
    INFO(shuffled);
    CHECK(bytes_a_record <= 26);
  }
}

TEST_CASE("a step larger than a frame is split and read back whole") {
  const TemporaryFolder folder;
  GeneratorOptions options;
  options.records_per_step = static_cast<int>(kRecordsPerFrame) * 2 + 1000;
  options.steps = 2;
  options.prologue = false;
  generate_stream(folder / "s.fkp", 0, options);
  const Exercise read = exercise_stream(folder / "s.fkp");
  CHECK(read.looks_perfect());
  REQUIRE(read.steps.size() == 2);
  CHECK(read.steps[1].rows.size() == static_cast<size_t>(options.records_per_step));
  CHECK(read.steps[1].summary.complete);
}

TEST_CASE("more steps than one index frame holds are all found through the index") {
  const TemporaryFolder folder;
  const auto writer = HashStreamWriter::create(folder / "s.fkp", sample_header());
  const int64_t steps = static_cast<int64_t>(kStepsPerIndex) * 2 + 10;
  for (int64_t step = 0; step < steps; ++step) {
    writer->begin_step(step);
    writer->append(sample_record(writer.get(), step, static_cast<int>(step % 50)), 1);
    writer->end_step();
  }
  writer->finish();
  const auto reader = HashStreamReader::open(folder / "s.fkp");
  CHECK(reader->state() == StreamState::whole);
  CHECK(reader->verify() == "");
  REQUIRE(reader->steps().size() == static_cast<size_t>(steps));
  CHECK(reader->steps().back().step == steps - 1);
}

TEST_CASE("one step number twice is two steps") {
  const TemporaryFolder folder;
  const auto writer = HashStreamWriter::create(folder / "s.fkp", sample_header());
  for (int round = 0; round < 2; ++round) {
    writer->begin_step(5);
    for (int i = 0; i <= round; ++i) writer->append(sample_record(writer.get(), 5, i), 1);
    writer->end_step();
  }
  writer->flush();
  for (const bool finished : {false, true}) {
    if (finished) writer->finish();
    const Exercise read = exercise_stream(folder / "s.fkp");
    REQUIRE(read.steps.size() == 2);
    CHECK(read.steps[0].rows.size() == 1);
    CHECK(read.steps[1].rows.size() == 2);
    CHECK(read.steps[1].summary.complete);
  }
}

TEST_CASE("finishing within a step leaves that step incomplete and the stream whole") {
  const TemporaryFolder folder;
  const auto writer = HashStreamWriter::create(folder / "s.fkp", sample_header());
  write_sample(writer.get());
  writer->begin_step(8);
  for (int i = 0; i < 4; ++i) writer->append(sample_record(writer.get(), 8, i), 1);
  writer->finish();
  const Exercise read = exercise_stream(folder / "s.fkp");
  CHECK(read.state == StreamState::whole);
  CHECK(read.damage == "");
  CHECK(read.gaps.size() == 1);
  REQUIRE(read.steps.size() == kSampleSteps + 1);
  CHECK_FALSE(read.steps.back().summary.complete);
  CHECK(read.steps.back().rows.size() == 4);
}

TEST_CASE("calls out of turn are refused with the file's name") {
  const TemporaryFolder folder;
  const auto writer = HashStreamWriter::create(folder / "s.fkp", sample_header());
  const Record record = sample_record(writer.get(), 0, 0);
  CHECK_THROWS_WITH_AS(writer->append(record, 1), doctest::Contains("outside any step"), Error);
  CHECK_THROWS_WITH_AS(writer->end_step(), doctest::Contains("s.fkp"), Error);
  writer->begin_step(0);
  CHECK_THROWS_WITH_AS(writer->begin_step(1), doctest::Contains("step 1 began within step 0"), Error);
  Record unknown = record;
  unknown.site = 77;
  CHECK_THROWS_WITH_AS(writer->append(unknown, 1), doctest::Contains("site 77"), Error);
  CHECK_THROWS_AS(writer->layout_id({DType::f32, {2, 3}, {1}, {}, {}}), Error);
  CHECK_THROWS_AS(writer->layout_id({DType::f32, {2, 3}, {}, {4, 3}, {}}), Error);
  writer->end_step();
  writer->finish();
  CHECK_THROWS_WITH_AS(writer->begin_step(2), doctest::Contains("finished"), Error);
}

TEST_CASE("several threads read one stream at once") {
  const TemporaryFolder folder;
  GeneratorOptions options;
  options.records_per_step = 500;
  options.steps = 8;
  generate_stream(folder / "s.fkp", 0, options);
  const auto reader = HashStreamReader::open(folder / "s.fkp");
  std::vector<uint64_t> sums(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < sums.size(); ++i) {
    threads.emplace_back([&, i] {
      StepColumns rows;
      for (size_t step = 0; step < reader->steps().size(); ++step) {
        reader->read_step(step, &rows);
        for (const Digest& digest : rows.digest) sums[i] += digest.a;
        for (const LayerSummary& layer : reader->layers(step)) sums[i] += layer.digest;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(sums[0] != 0);
  CHECK(std::count(sums.begin(), sums.end(), sums[0]) == 4);
}
