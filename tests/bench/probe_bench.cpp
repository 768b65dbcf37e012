// What forkpoint.h costs its caller: without a probe, with a dormant one, and for a record. Runs itself under LD_PRELOAD.
#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "lib/hash_stream.h"
#include "lib/run.h"
#include "probes/forkpoint.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds(const std::function<void()>& body) {
  const auto start = Clock::now();
  body();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(int rounds, const std::function<double()>& measure) {
  std::vector<double> values;
  for (int i = 0; i < rounds; ++i) values.push_back(measure());
  std::nth_element(values.begin(), values.begin() + rounds / 2, values.end());
  return values[static_cast<size_t>(rounds) / 2];
}

template <typename Body>
double ns_per_call(int calls, Body body) {
  return seconds([&] {
           for (int i = 0; i < calls; ++i) {
             body(i);
             asm volatile("" ::: "memory");
           }
         }) / calls * 1e9;
}

void report(const char* name, double value, double goal, const char* unit) {
  fmt::print("bench {} {:.3g}{} <={:.4g}{} {}\n", name, value, unit, goal, unit, value <= goal ? "ok" : "miss");
}

// More than an empty loop costs.
double noop_ns() {
  constexpr int kCalls = 20'000'000;
  return median(9, [] {
    const double empty = ns_per_call(kCalls, [](int) {});
    return ns_per_call(kCalls, [](int i) { forkpoint_scalar("loss", FORKPOINT_ROLE_LOSS, i); }) - empty;
  });
}

int run(const std::vector<std::string>& command, const std::vector<std::string>& more) {
  std::vector<char*> arguments, variables;
  for (const auto& text : command) arguments.push_back(const_cast<char*>(text.c_str()));
  arguments.push_back(nullptr);
  for (char** variable = environ; *variable; ++variable) {
    if (strncmp(*variable, "LD_PRELOAD=", 11) != 0 && strncmp(*variable, "FORKPOINT_", 10) != 0) variables.push_back(*variable);
  }
  for (const auto& text : more) variables.push_back(const_cast<char*>(text.c_str()));
  variables.push_back(nullptr);
  pid_t child = 0;
  int status = -1;
  if (posix_spawn(&child, arguments[0], nullptr, nullptr, arguments.data(), variables.data()) != 0) return -1;
  waitpid(child, &status, 0);
  return status;
}

double start_us(const std::vector<std::string>& more) {
  return median(101, [&] { return seconds([&] { run({"/bin/true"}, more); }) * 1e6; });
}

// In a process that records: per call, in the caller's thread, while the writer keeps up. Steps of 10,000 records.
template <typename Body>
double record_ns(Body body) {
  int step = 0;
  return median(15, [&] {
    forkpoint_step_begin(step++);
    const double ns = ns_per_call(10'000, body);
    forkpoint_step_end();
    usleep(20'000);  // the ring drains
    return ns;
  });
}

int record() {
  static float small[64] = {1, 2, 3};
  forkpoint::Layer layer(FORKPOINT_FORWARD, "blocks.11.mlp.fc1", "linear");
  report("probe_scalar_ns", record_ns([](int i) { forkpoint_scalar("loss", FORKPOINT_ROLE_LOSS, i); }), 250, "ns");
  report("probe_tensor_256B_ns",
         record_ns([](int) { forkpoint::tensor("output", FORKPOINT_ROLE_OUTPUT, small, {8, 8}); }), 400, "ns");
  report("probe_scope_ns", record_ns([](int) {
           forkpoint_scope_begin(FORKPOINT_FORWARD, "blocks.11.attn.qkv", "linear");
           forkpoint_scope_end();
         }), 150, "ns");
  return 0;
}

int flood(int records) {
  forkpoint_step_begin(0);
  for (int i = 0; i < records; ++i) forkpoint_scalar("loss", FORKPOINT_ROLE_LOSS, i);
  forkpoint_step_end();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  if (argc > 1 && strcmp(argv[1], "record") == 0) return record();
  if (argc > 2 && strcmp(argv[1], "flood") == 0) return flood(atoi(argv[2]));
  report("probe_noop_ns", noop_ns(), 1.0, "ns");

  const std::string probe = std::filesystem::path(self).parent_path().parent_path().string() + "/libforkpoint.so";
  if (access(probe.c_str(), R_OK) != 0) {
    fmt::print("skipped: {} is not built\n", probe);
    return 77;
  }
  const std::string preload = "LD_PRELOAD=" + probe;
  report("probe_dormant_start_us", start_us({preload}) - start_us({}), 1000, "us");

  char folder[] = "/tmp/forkpoint-bench-XXXXXX";
  if (!mkdtemp(folder)) return 1;
  const std::string recorded = std::string(folder) + "/record", flooded = std::string(folder) + "/flood";
  fflush(stdout);
  int status = run({self, "record"}, {preload, "FORKPOINT_LEVEL=layer", "FORKPOINT_RUN=" + recorded});
  constexpr int kFlood = 2'000'000;
  const double flood_seconds = seconds([&] {
    status |= run({self, "flood", std::to_string(kFlood)}, {preload, "FORKPOINT_RUN=" + flooded});
  });
  if (status != 0) {
    fmt::print("a recording process ended with wait status {}\n", status);
    return 1;
  }
  // Producer, writer and disk together, as the time a record takes.
  report("probe_sustained_ns_a_record", flood_seconds / kFlood * 1e9, 500, "ns");
  const auto stream = forkpoint::HashStreamReader::open(flooded + "/" + forkpoint::stream_file_name(0));
  if (!stream->gaps().empty() || stream->steps().empty() || stream->steps()[0].records != kFlood) {
    fmt::print("of {} records {} arrived\n", kFlood, stream->steps()[0].records);
    return 1;
  }
  std::filesystem::remove_all(folder);
  return 0;
}
