// What a hash stream costs: bytes a record and a launch on disk, and how fast one core writes, reads, checks and opens
// it. Prints `bench NAME VALUE GOAL ok|miss`; medians of several rounds.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "lib/hash_stream.h"
#include "tests/support/launch_generator.h"
#include "tests/support/run_generator.h"
#include "tests/support/sample_stream.h"

using namespace forkpoint;

namespace {

constexpr int kRounds = 7;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <typename Work>
double median_seconds(Work work) {
  std::vector<double> seconds;
  for (int round = 0; round < kRounds; ++round) {
    const double start = now();
    work();
    seconds.push_back(now() - start);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[kRounds / 2];
}

void report(const char* name, double value, double goal, bool at_least) {
  const bool ok = at_least ? value >= goal : value <= goal;
  fmt::print("bench {} {:.3f} {}{} {}\n", name, value, at_least ? ">=" : "<=", goal, ok ? "ok" : "miss");
}

uint64_t count_records(const HashStreamReader& reader) {
  uint64_t records = 0;
  for (const StepSummary& step : reader.steps()) records += step.records + step.eval_records;
  return records;
}

double decode_speed(const HashStreamReader& reader) {
  StepColumns columns;
  const double seconds = median_seconds([&] {
    for (size_t i = 0; i < reader.steps().size(); ++i) reader.read_step(i, &columns);
  });
  return static_cast<double>(count_records(reader)) / seconds / 1e6;
}

// The writer alone: records are made beforehand.
double write_speed(const TemporaryFolder& folder, const HashStreamReader& reader) {
  std::vector<StepColumns> steps(reader.steps().size());
  for (size_t i = 0; i < steps.size(); ++i) reader.read_step(i, &steps[i]);
  int round = 0;
  const double seconds = median_seconds([&] {
    const auto writer = HashStreamWriter::create(folder / fmt::format("written-{}", round++), {});
    for (const Site& site : reader.sites()) writer->site_id(site);
    for (const Layout& layout : reader.layouts()) writer->layout_id(layout);
    for (size_t i = 0; i < steps.size(); ++i) {
      writer->begin_step(static_cast<int64_t>(i));
      for (size_t k = 0; k < steps[i].size(); ++k) writer->append(steps[i].row(k), 1);
      writer->end_step();
    }
    writer->finish();
  });
  return static_cast<double>(count_records(reader)) / seconds / 1e6;
}

// Bytes a launch row in the steady state: a stream of many steps without its first, which also holds the names.
double launch_bytes(const std::vector<LaunchColumns>& steps, const HashStreamReader& names, const std::string& path) {
  const auto writer = HashStreamWriter::create(path, {});
  for (const Site& site : names.sites()) writer->site_id(site);
  uint64_t after_first = 0, rows = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    writer->begin_step(static_cast<int64_t>(i));
    append_all(steps[i], writer.get());
    writer->end_step();
    if (i == 0) after_first = writer->size_bytes();
    if (i != 0) rows += steps[i].rows.size();
  }
  writer->finish();
  return static_cast<double>(writer->size_bytes() - after_first) / static_cast<double>(rows);
}

void launch_benches(const TemporaryFolder& folder) {
  const auto made = [&](const char* name, const LaunchGeneratorOptions& options) {
    const auto writer = HashStreamWriter::create(folder / name, {});
    LaunchGenerator generator(options);
    std::vector<LaunchColumns> steps;
    for (int i = 0; i < 40; ++i) steps.push_back(generator.next_step(writer.get()));
    writer->finish();
    return steps;
  };
  const auto steps = made("launch-names", {});
  const auto names = HashStreamReader::open(folder / "launch-names");
  size_t rows = 0, buffers = 0;
  for (const LaunchColumns& step : steps) {
    rows += step.rows.size();
    buffers += step.buffers.size();
  }
  fmt::print("{} launches a step with {:.2f} buffers each\n", steps[0].rows.size(),
             static_cast<double>(buffers) / static_cast<double>(rows));
  report("launch_bytes_on_disk", launch_bytes(steps, *names, folder / "launches"), 45, false);
  report("launch_bytes_on_disk_inputs_unchanged",
         launch_bytes(made("n2", {.unchanged_inputs = true}), *names, folder / "launches-2"), 45, false);
  report("launch_bytes_on_disk_with_allocations",
         launch_bytes(made("n3", {.allocation_rows = true}), *names, folder / "launches-3"), 45, false);
  int round = 0;
  const double write_s = median_seconds([&] { launch_bytes(steps, *names, folder / fmt::format("w-{}", round++)); });
  report("write_launches_per_s_millions", static_cast<double>(rows) / write_s / 1e6, 3, true);
  const auto reader = HashStreamReader::open(folder / "launches");
  LaunchColumns columns;
  const double read_s = median_seconds([&] {
    for (size_t i = 0; i < reader->steps().size(); ++i) reader->read_launches(i, &columns);
  });
  report("read_launches_per_s_millions", static_cast<double>(rows) / read_s / 1e6, 3, true);
}

double copy_seconds(size_t size_bytes) {
  std::vector<char> from(size_bytes, 1), to(size_bytes, 2);
  return median_seconds([&] {
    std::memcpy(to.data(), from.data(), size_bytes);
    from[0] = to[size_bytes / 2];
  });
}

}  // namespace

int main() {
  const TemporaryFolder folder;
  GeneratorOptions options;
  options.steps = 200;
  generate_stream(folder / "a.fkp", 0, options);
  options.shuffle_arrival = true;
  generate_stream(folder / "b.fkp", 0, options);
  const auto ordered = HashStreamReader::open(folder / "a.fkp");
  const auto shuffled = HashStreamReader::open(folder / "b.fkp");
  const auto bytes_a_record = [](const HashStreamReader& reader) {
    return static_cast<double>(reader.size_bytes()) / static_cast<double>(count_records(reader));
  };
  fmt::print("{} records in {} steps, {} sites, {} bytes\n", count_records(*ordered), ordered->steps().size(),
             ordered->sites().size(), ordered->size_bytes());
  const double open_s = median_seconds([&] { HashStreamReader::open(folder / "a.fkp"); });
  const double layers_s = median_seconds([&] { ordered->layers(1); });
  const double verify_s = median_seconds([&] { ordered->verify(); });
  fmt::print("open {:.2f} ms, layers of a step {:.0f} us, verify {:.2f} GB/s\n", open_s * 1e3, layers_s * 1e6,
             static_cast<double>(ordered->size_bytes()) / verify_s / 1e9);
  report("record_bytes_on_disk", bytes_a_record(*ordered), 26, false);
  report("record_bytes_on_disk_other_order_each_step", bytes_a_record(*shuffled), 26, false);
  report("decode_records_per_s_millions", decode_speed(*ordered), 20, true);
  report("decode_records_per_s_millions_other_order_each_step", decode_speed(*shuffled), 20, true);
  report("write_records_per_s_millions", write_speed(folder, *ordered), 5, true);
  // A check reads each byte once and copies it once out of the page cache.
  report("verify_over_memcpy", copy_seconds(ordered->size_bytes()) / verify_s, 0.2, true);
  launch_benches(folder);
}
