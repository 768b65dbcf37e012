// A small GPU on host memory: allocations, streams, events, kernels (functions over words), copies, records,
// collectives. Programs written for it run for real, so that a planted fault spreads as it would, and what a probe at
// level launch would record of them is written as hash streams with the library's own writer. So a test knows the
// truth.
//
// Work is queued as on a GPU and runs later, in an order that streams, events and waits of the host allow: of the
// launches that may run next the one with the least `issue + delay`. Only then are digests taken.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "lib/hash_stream.h"
#include "lib/run.h"

namespace forkpoint {

using Words = std::vector<uint32_t>;

struct DeviceBuffer {
  uint64_t allocation = 0;
  uint64_t words = 0;
};

// A parameter of a kernel, in the order of its parameter block. Pointers are 8 bytes, aligned.
struct Parameter {
  enum Kind { pointer, word, wide } kind = word;
  DeviceBuffer buffer;
  uint64_t value = 0;  // of a pointer: offset in bytes
};
inline Parameter to(const DeviceBuffer& buffer, uint64_t offset = 0) { return {Parameter::pointer, buffer, offset}; }
inline Parameter word(uint32_t value) { return {Parameter::word, {}, value}; }
inline Parameter wide(uint64_t value) { return {Parameter::wide, {}, value}; }

// What a kernel's body sees: the buffers of its pointers in order, its other parameters in order.
struct KernelCall {
  std::vector<std::span<uint32_t>> buffers;
  std::vector<uint64_t> numbers;
  int attempt = 0;  // 0: the launch itself; 1, 2, ...: repetitions
};
using KernelBody = std::function<void(KernelCall&)>;

struct LaunchOptions {
  uint32_t grid = 8, block = 128;
  uint8_t flags = 0;          // LaunchFlags added to the row
  uint64_t window_bytes = 0;  // the extents are not known: this much from each pointer on
  bool no_digest = false;     // of any of its buffers
  int64_t delay = 0;
  int retries = 0;
};

// How two recordings of one program differ though nothing is wrong with it.
struct Machine {
  uint64_t base_address = 0x7f0000000000;
  uint64_t first_allocation = 1;
  uint32_t first_stream = 1;
  uint64_t garbage = 1;  // what fresh memory holds follows from it
  bool inputs = false;   // digests before launches as well
};

// One rank's program.
class LaunchProgram {
 public:
  explicit LaunchProgram(const Machine& machine = {}, int rank = 0);

  LaunchProgram& step(int64_t number);  // until then: the prologue
  LaunchProgram& scope(Phase phase, const std::string& layer = "", const std::string& op = "");

  DeviceBuffer allocate(uint64_t words);
  void release(const DeviceBuffer& buffer);
  uint32_t stream(bool non_blocking = false);  // an ordinal; 0 is the default stream, which waits for the blocking ones
  void use(uint32_t stream) { stream_ = stream; }  // for what follows
  uint64_t record_event();
  void wait_event(uint64_t event);
  void synchronize();  // the host waits for everything

  // Returns the row's index in its step.
  uint32_t kernel(const std::string& name, const std::vector<Parameter>& parameters, const KernelBody& body,
                  const LaunchOptions& options = {});
  void graph(uint64_t object);  // kernels up to end_graph() are its nodes
  void end_graph() { in_graph_ = false; }
  void copy_from_host(const DeviceBuffer& target, const Words& words);
  // Waits for it. words 0: all of it. digested: as the probe does it; else no digest is taken of what leaves.
  Words copy_to_host(const DeviceBuffer& source, uint64_t words = 0, bool digested = true);
  void copy(const DeviceBuffer& target, const DeviceBuffer& source);
  // All of the source to the target from a word on; digests cover these bytes alone.
  void copy_part(const DeviceBuffer& target, uint64_t first_word, const DeviceBuffer& source, uint64_t words);
  void set(const DeviceBuffer& target, uint32_t value);
  void write_unobserved(const DeviceBuffer& target, uint64_t word, uint32_t value);  // once everything before has run
  Words read(const DeviceBuffer& buffer);                                            // by the test, unrecorded

  // A tensor of all of the buffer, f32, in the scope.
  void record(Role role, const std::string& tensor, const DeviceBuffer& buffer, uint8_t flags = 0);
  void record_scalar(const std::string& name, double value, Role role = Role::scalar);
  void limit(const std::string& what) { limits_.push_back({what, ""}); }
  void die() { finish_ = false; }  // the stream ends without its index

  uint64_t address(const DeviceBuffer& buffer) const;

 private:
  friend void all_reduce(const std::vector<LaunchProgram*>& ranks, const std::vector<DeviceBuffer>& buffers,
                         const std::string& kernel, const std::function<void(int rank, Words*)>& alter);
  friend class LaunchRun;
  struct Memory {
    uint64_t address = 0;
    Words words;
    bool used = false;
  };
  struct Entry {  // of the stream: a record, or a launch with its buffers
    int64_t step = 0;
    bool is_record = false;
    Site site;
    Record record;
    Layout layout;
    LaunchRow row;
    std::vector<BufferRow> buffers;
  };
  struct Task {
    std::vector<size_t> after;
    std::function<void()> run;
    int64_t priority = 0;
    bool done = false;
  };

  void take_pointers(std::vector<uint8_t>* block, const LaunchOptions& options, Entry* entry);
  void take_all(size_t entry, bool before);
  void run_kernel(size_t entry, const KernelBody& body, const std::vector<uint64_t>& handed,
                  const std::vector<uint64_t>& numbers, const std::vector<size_t>& repetitions);
  void queue(std::function<void()> run, int64_t delay = 0);
  void run_until(size_t task);
  void run_all();
  size_t add_row(LaunchKind kind, const std::string& call, uint64_t object = 0);
  size_t add_record(Kind kind, Role role, const std::string& tensor, const Layout& layout,
                    const std::string& communicator);
  BufferRow row_of(const DeviceBuffer& buffer, uint32_t place, uint8_t flags, uint64_t bytes = 0);
  void take(size_t entry, size_t buffer);  // its digest, now
  void record_memory(Kind kind, Role role, const std::string& tensor, const DeviceBuffer& buffer, uint8_t flags,
                     const std::string& communicator = "");
  void write(const std::string& path, const StreamHeader& header) const;

  Machine machine_;
  int rank_;
  std::unordered_map<uint64_t, Memory> memory_;
  uint64_t next_allocation_, next_address_;
  uint32_t next_stream_, stream_ = 0;
  uint64_t next_event_ = 1;
  std::unordered_map<uint32_t, bool> non_blocking_;
  std::unordered_map<uint32_t, size_t> last_on_stream_;
  std::unordered_map<uint64_t, std::vector<size_t>> events_;
  std::vector<size_t> barrier_;  // what everything that follows on blocking streams comes after
  std::unordered_map<uint32_t, std::vector<size_t>> waits_;  // by stream: of the next task on it
  std::vector<Task> tasks_;
  size_t first_open_ = 0;

  int64_t step_ = kPrologueStep;
  std::vector<int64_t> steps_;
  uint32_t rows_in_step_ = 0, records_in_step_ = 0;
  Phase phase_ = Phase::forward;
  std::string layer_, op_;
  bool in_graph_ = false, finish_ = true;
  std::vector<Entry> entries_;
  std::vector<CoverageLimit> limits_;
};

// A sum over all ranks, in place, recorded as the interposed call records it; alter: a fault in what one rank is left
// with.
void all_reduce(const std::vector<LaunchProgram*>& ranks, const std::vector<DeviceBuffer>& buffers,
                const std::string& kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                const std::function<void(int rank, Words*)>& alter = {});

// A run of one or more ranks. Creates the folder and returns it.
class LaunchRun {
 public:
  explicit LaunchRun(std::vector<LaunchProgram*> ranks) : ranks_(std::move(ranks)) {}
  Manifest& manifest() { return manifest_; }
  LaunchRun& level(Level level) {
    level_ = level;
    return *this;
  }
  std::string write(const std::string& directory);

 private:
  std::vector<LaunchProgram*> ranks_;
  Manifest manifest_;
  Level level_ = Level::launch;
};

// Words that follow from a seed.
Words words_of(uint64_t seed, uint64_t count);

}  // namespace forkpoint
