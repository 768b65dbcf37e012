// How long diff takes: two runs of 64 ranks x 100 steps x 2,000 records, equal and with a divergence in the middle; a
// full scan; the peak of memory. Prints `bench NAME VALUE GOAL ok|miss`. Needs about 1.3 GB of temporary space.
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "lib/diff.h"
#include "lib/verdict_text.h"
#include "tests/support/run_generator.h"

using namespace forkpoint;

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void report(const char* name, double value, double goal, bool at_least) {
  const bool ok = at_least ? value >= goal : value <= goal;
  fmt::print("bench {} {:.3f} {}{} {}\n", name, value, at_least ? ">=" : "<=", goal, ok ? "ok" : "miss");
}

struct Measured {
  double seconds = 0;    // median of opening both runs and comparing them
  double peak_mb = 0;
  int outcome = -1;
  uint64_t records = 0;
};

// In a process of its own, so that its peak of memory is that of diff alone.
Measured measure(const std::string& a, const std::string& b, const DiffOptions& options, int times) {
  int ends[2];
  if (pipe(ends) != 0) std::exit(1);
  const pid_t child = fork();
  if (child == 0) {
    std::vector<double> seconds;
    Verdict verdict;
    for (int i = 0; i < times; ++i) {
      const double start = now();
      const Run run_a = Run::open(a), run_b = Run::open(b);
      verdict = diff(run_a, run_b, options);
      seconds.push_back(now() - start);
    }
    std::sort(seconds.begin(), seconds.end());
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const Measured result{seconds[seconds.size() / 2], static_cast<double>(usage.ru_maxrss) / 1024,
                          static_cast<int>(verdict.outcome), verdict.coverage.records_compared};
    fmt::print(stderr, "   {}\n", headline(verdict));
    const bool written = write(ends[1], &result, sizeof(result)) == static_cast<ssize_t>(sizeof(result));
    _exit(written ? 0 : 1);
  }
  close(ends[1]);
  Measured result;
  const bool complete = read(ends[0], &result, sizeof(result)) == static_cast<ssize_t>(sizeof(result));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!complete || status != 0) {
    fmt::print(stderr, "diff_bench: the measuring process failed (status {})\n", status);
    std::exit(1);
  }
  return result;
}

}  // namespace

int main() {
  const TemporaryFolder folder;
  GeneratorOptions options;
  options.ranks = 64, options.steps = 100, options.records_per_step = 2000;
  generate_run(folder / "a", options);
  generate_run(folder / "b", options);
  GeneratorOptions changed = options;
  changed.fault = GeneratedFault{
      50, 17, find_generated(options, Phase::backward, generated_layer_name(90), "weight.grad"), true, true};
  generate_run(folder / "c", changed);

  DiffOptions on_two;
  on_two.threads = 2;
  const Measured equal = measure(folder / "a", folder / "b", on_two, 5);
  const Measured middle = measure(folder / "a", folder / "c", on_two, 3);
  DiffOptions full;
  full.threads = 1, full.full_scan = true, full.verify_checksums = false;
  const Measured scan = measure(folder / "a", folder / "b", full, 3);

  report("diff_equal_seconds", equal.seconds, 1.0, false);
  report("diff_middle_seconds", middle.seconds, 2.0, false);
  report("diff_peak_mb", std::max({equal.peak_mb, middle.peak_mb, scan.peak_mb}), 500, false);
  report("diff_full_scan_mrecords_per_second_core", static_cast<double>(scan.records) / scan.seconds / 1e6, 10, true);
  const bool right = equal.outcome == static_cast<int>(Outcome::identical) &&
                     middle.outcome == static_cast<int>(Outcome::diverged) &&
                     scan.outcome == static_cast<int>(Outcome::identical);
  if (!right) fmt::print(stderr, "diff_bench: a verdict is wrong\n");
  return right ? 0 : 1;
}
