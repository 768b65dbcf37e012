// Random programs on the small GPU with one planted fault: whatever the program, the verdict names the launch where the
// fault was planted, or says nothing differs where nothing came of it; and without a fault it never says diverged.
#include <fmt/format.h>

#include <random>

#include "lib/digest_mix.h"
#include "tests/support/launch_training.h"

using namespace forkpoint;

namespace {

struct Node {
  std::string name;
  std::vector<size_t> inputs;  // buffers
  size_t output = 0;
  bool accumulates = false;  // else it overwrites
  bool absorbs = false;      // its result follows from the upper half of each word only
  bool has_scratch = false;
  int stream = 0;
  bool to_host = false;  // its output is copied to the host afterwards
  bool recorded = false;
};

struct Shape {
  uint64_t seed = 1;
  bool unique_names = true;
  bool noise = false;        // scratch differs between recordings
  bool temporaries = false;  // some buffers are allocated and released in each step
  int streams = 1;
  int extra = 0;  // launches put in between in this recording only, which change nothing
  bool inputs = false;
  bool stack_garbage = false;  // a parameter that the kernel does not look at: a number, or an address of some buffer
};

enum class FaultKind { flip, parameter, other_kernel, inserted, unobserved };

struct Planted {
  int64_t step = -1;
  size_t node = 0;
  FaultKind kind = FaultKind::flip;
};

struct Outcomes {
  std::unique_ptr<LaunchProgram> program;
  std::vector<Words> host;                         // everything that left the device, in order
  std::vector<std::pair<int64_t, uint32_t>> rows;  // by step and node: the launch's index
  std::vector<Words> end;                          // of the buffers that are still there
};

constexpr int64_t kSteps = 4;
constexpr uint64_t kWords = 24;

class Program {
 public:
  explicit Program(const Shape& shape) : shape_(shape), random_(shape.seed) {
    buffers_ = 4 + random_() % 6;
    const size_t nodes = 6 + random_() % 14;
    for (size_t k = 0; k < nodes; ++k) {
      Node node;
      node.name = shape.unique_names ? fmt::format("kernel{}", k) : fmt::format("kernel{}", random_() % 3);
      const size_t inputs = 1 + random_() % 3;
      for (size_t i = 0; i < inputs; ++i) node.inputs.push_back(random_() % buffers_);
      node.output = random_() % buffers_;
      std::erase(node.inputs, node.output);
      if (node.inputs.empty()) node.inputs.push_back((node.output + 1) % buffers_);
      node.accumulates = random_() % 3 == 0;
      node.absorbs = random_() % 5 == 0;
      node.has_scratch = shape.noise && random_() % 3 == 0;
      node.stream = static_cast<int>(random_() % static_cast<unsigned>(shape.streams));
      node.to_host = random_() % 6 == 0;
      node.recorded = random_() % 6 == 0;
      nodes_.push_back(node);
    }
  }

  size_t size() const { return nodes_.size(); }

  Outcomes run(const Machine& machine, const Planted& fault, int extra = 0) {
    Outcomes out;
    out.program = std::make_unique<LaunchProgram>(machine);
    LaunchProgram& program = *out.program;
    streams_.clear();
    for (int s = 0; s < shape_.streams; ++s) streams_.push_back(program.stream(true));
    program.use(streams_[0]);
    memory_.assign(buffers_, {});
    for (size_t b = 0; b < buffers_; ++b) make(program, b);
    scratch_ = program.allocate(8);
    program.set(scratch_, 0);
    last_event_ = program.record_event();
    std::mt19937_64 extras(shape_.seed * 7 + static_cast<uint64_t>(extra));
    for (int64_t step = 0; step < kSteps; ++step) {
      program.step(step);
      for (size_t b = 0; shape_.temporaries && step > 0 && b < buffers_; b += 2) {
        program.wait_event(last_event_);
        program.release(memory_[b]);
        make(program, b);
        last_event_ = program.record_event();
      }
      for (size_t k = 0; k < nodes_.size(); ++k) {
        if (extra > 0 && extras() % 8 == 0) add_extra(program, extras());
        launch(program, machine, step, k, fault, &out);
      }
    }
    // Something that nothing else touches leaves the device, so that the runs can be compared by what leaves it.
    const DeviceBuffer constant = program.allocate(8);
    program.set(constant, 7);
    program.copy_to_host(constant);
    program.release(constant);
    program.release(scratch_);
    for (size_t b = 0; b < buffers_; ++b) out.end.push_back(program.read(memory_[b]));
    return out;
  }

 private:
  void make(LaunchProgram& program, size_t b) {
    memory_[b] = program.allocate(kWords);
    program.copy_from_host(memory_[b], words_of(b + 50, kWords));
  }

  // Reads something and leaves it as it is, or writes memory of its own.
  void add_extra(LaunchProgram& program, uint64_t random) {
    const DeviceBuffer& source = memory_[random % buffers_];
    const std::string name = random % 3 == 0 ? "clone" : nodes_[random % nodes_.size()].name;
    program.wait_event(last_event_);
    const DeviceBuffer own = program.allocate(kWords);
    program.kernel(name, {to(source), to(own)}, combined());
    program.release(own);
    last_event_ = program.record_event();
  }

  void launch(LaunchProgram& program, const Machine& machine, int64_t step, size_t k, const Planted& fault,
              Outcomes* out) {
    const Node& node = nodes_[k];
    program.use(streams_[static_cast<size_t>(node.stream)]);
    program.wait_event(last_event_);
    program.scope(Phase::forward, node.recorded ? fmt::format("layer{}", k) : "");
    std::vector<Parameter> parameters;
    for (const size_t input : node.inputs) parameters.push_back(to(memory_[input]));
    if (node.has_scratch) parameters.push_back(to(scratch_));
    parameters.push_back(to(memory_[node.output]));
    const size_t node_words = parameters.size();
    parameters.push_back(word(static_cast<uint32_t>(k)));
    if (shape_.stack_garbage) {  // last, so that the others keep their places
      const uint64_t left_over = mix64(machine.garbage * 7919 + static_cast<uint64_t>(step) * 101 + k * 13);
      const DeviceBuffer& some = memory_[left_over % buffers_];
      parameters.push_back(wide(left_over % 3 == 0 ? program.address(some) + left_over % 5 * 4 : left_over));
    }
    const bool here = fault.step == step && fault.node == k;
    const bool faulty = here && (fault.kind == FaultKind::flip || fault.kind == FaultKind::other_kernel);
    if (here && fault.kind == FaultKind::parameter) parameters[node_words] = word(static_cast<uint32_t>(k) + 1000);
    if (here && fault.kind == FaultKind::inserted) {
      program.kernel("inserted", {to(memory_[node.inputs[0]])},
                     [](KernelCall& call) { call.buffers[0][5] ^= 1u << 20; });
    }
    if (here && fault.kind == FaultKind::unobserved) program.write_unobserved(memory_[node.inputs[0]], 5, 77);
    const std::string name = here && fault.kind == FaultKind::other_kernel ? "other" : node.name;
    const uint64_t left = machine.garbage * 1000 + static_cast<uint64_t>(step) * 31 + k;
    out->rows.push_back({step, program.kernel(name, parameters, [node, faulty, left](KernelCall& call) {
                           auto& result = call.buffers.back();
                           for (size_t i = 0; i < result.size(); ++i) {
                             uint64_t hash = call.numbers[0];
                             for (size_t b = 0; b < node.inputs.size(); ++b) {
                               const uint32_t value = call.buffers[b][i];
                               hash = mix64(hash ^ (node.absorbs ? value >> 16 : value));
                             }
                             result[i] = static_cast<uint32_t>(hash) + (node.accumulates ? result[i] : 0);
                           }
                           if (node.has_scratch) {
                             auto& scratch = call.buffers[call.buffers.size() - 2];
                             for (size_t i = 0; i < scratch.size(); ++i)
                               scratch[i] = static_cast<uint32_t>(mix64(left + i));
                           }
                           if (faulty) result[5] ^= 1u << 3;
                         })});
    if (node.recorded) program.record(Role::output, "output", memory_[node.output]);
    if (node.recorded) out->host.push_back(program.read(memory_[node.output]));
    if (node.to_host) out->host.push_back(program.copy_to_host(memory_[node.output]));
    last_event_ = program.record_event();
  }

  const Shape shape_;
  std::mt19937_64 random_;
  size_t buffers_ = 0;
  std::vector<Node> nodes_;
  std::vector<uint32_t> streams_;
  std::vector<DeviceBuffer> memory_;
  DeviceBuffer scratch_;
  uint64_t last_event_ = 0;
};

// "--launch 2:17"
std::pair<int64_t, int64_t> launch_of(const Verdict& v) {
  const size_t at = v.cause.next.find("--launch ");
  if (at == std::string::npos) return {-9, -9};
  long step = -9, row = -9;
  std::sscanf(v.cause.next.c_str() + at, "--launch %ld:%ld", &step, &row);
  return {step, row};
}

struct Tally {
  int diverged = 0, identical = 0, undecided = 0;
};

// What a verdict must say about a fault of this kind, besides the place.
void check_cause(FaultKind kind, const Verdict& v) {
  const auto may_be = [&](const char* cls) {
    return std::count(v.cause.class_candidates.begin(), v.cause.class_candidates.end(), cls) != 0;
  };
  switch (kind) {
    case FaultKind::flip:
      CHECK((v.cause.cls == "nondeterministic_op" || may_be("unordered_accumulation")));
      break;
    case FaultKind::parameter:
      CHECK(may_be("hyperparameter"));
      CHECK(holds(v.cause.evidence, "differ by +1000"));
      break;
    case FaultKind::other_kernel:
      CHECK(v.cause.cls == "algorithm_choice");
      CHECK(first_of(v).kernel == "other");
      break;
    case FaultKind::inserted:
      CHECK(v.cause.cls == "structure");
      CHECK(first_of(v).kernel == "inserted");
      break;
    case FaultKind::unobserved:
      CHECK(may_be("overwritten_input"));
      CHECK(holds(v.cause.evidence, "was not observed"));
      break;
  }
}

void check(const Shape& shape, Tally* tally, FaultKind kind = FaultKind::flip) {
  Program program(shape);
  Machine machine;
  machine.inputs = shape.inputs;
  std::mt19937_64 random(shape.seed + 99);
  const Planted fault{static_cast<int64_t>(random() % kSteps), random() % program.size(), kind};
  Outcomes a = program.run(machine, {}), clean = program.run(another_machine(machine), {}, shape.extra);
  const Verdict same = diff_programs({a.program.get()}, {clean.program.get()});
  INFO("seed " << shape.seed << " names " << shape.unique_names << " noise " << shape.noise << " temporaries "
               << shape.temporaries << " streams " << shape.streams << " extra " << shape.extra << " fault "
               << fault.step << " " << fault.node);
  {
    INFO(dump(same));
    CHECK(same.outcome == Outcome::identical);
  }
  a = program.run(machine, {});
  Outcomes b = program.run(another_machine(machine), fault, shape.extra);
  const bool left = a.host != b.host, live = a.end != b.end;
  const Verdict v = diff_programs({a.program.get()}, {b.program.get()});
  INFO(dump(v));
  if (!left) {
    CHECK(v.outcome == (live ? Outcome::incomparable : Outcome::identical));
    ++(live ? tally->undecided : tally->identical);
    return;
  }
  ++tally->diverged;
  REQUIRE(v.outcome == Outcome::diverged);
  CHECK(first_of(v).kind == Kind::launch);
  CHECK((first_of(v).step == fault.step || kind == FaultKind::unobserved));  // where it is first looked at
  CHECK(v.also_first.empty());
  check_cause(kind, v);
  if (kind != FaultKind::flip && kind != FaultKind::parameter) return;
  const auto row = b.rows[static_cast<size_t>(fault.step) * program.size() + fault.node];
  const auto named = launch_of(v);
  CHECK(named.first == row.first);
  CHECK(named.second == static_cast<int64_t>(row.second));
}

}  // namespace

TEST_CASE("random programs: the planted launch is named") {
  for (const bool unique_names : {true, false}) {
    for (const bool temporaries : {false, true}) {
      Tally tally;
      for (uint64_t seed = 1; seed <= 60; ++seed) {
        Shape shape;
        shape.seed = seed, shape.unique_names = unique_names, shape.temporaries = temporaries;
        shape.streams = 1 + static_cast<int>(seed % 3), shape.inputs = seed % 4 == 0;
        check(shape, &tally);
      }
      CHECK(tally.diverged > 20);
      CHECK(tally.identical + tally.undecided > 0);
    }
  }
}

TEST_CASE("random programs with scratch that differs in every recording") {
  Tally tally;
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    Shape shape;
    shape.seed = seed, shape.noise = true, shape.unique_names = seed % 2 == 0, shape.temporaries = seed % 3 == 0;
    check(shape, &tally);
  }
  CHECK(tally.diverged > 20);
}

TEST_CASE("random programs with launches in one run only that change nothing") {
  Tally tally;
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    Shape shape;
    shape.seed = seed, shape.extra = 1, shape.unique_names = seed % 2 == 0,
    shape.streams = 1 + static_cast<int>(seed % 2);
    check(shape, &tally);
  }
  CHECK(tally.diverged > 20);
}

TEST_CASE("random programs with a parameter, a kernel, or a write of another kind") {
  for (const FaultKind kind :
       {FaultKind::parameter, FaultKind::other_kernel, FaultKind::inserted, FaultKind::unobserved}) {
    Tally tally;
    for (uint64_t seed = 1; seed <= 60; ++seed) {
      Shape shape;
      shape.seed = seed, shape.unique_names = seed % 2 == 0, shape.temporaries = seed % 3 == 0;
      shape.streams = 1 + static_cast<int>(seed % 3), shape.inputs = kind == FaultKind::unobserved || seed % 4 == 0;
      check(shape, &tally, kind);
    }
    CHECK(tally.diverged > 10);
  }
}

TEST_CASE("random programs that hand over what lies on the stack") {
  Tally tally;
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    Shape shape;
    shape.seed = seed, shape.stack_garbage = true, shape.noise = seed % 2 == 0, shape.inputs = seed % 5 == 0;
    shape.unique_names = seed % 4 < 2, shape.temporaries = seed % 3 == 0;
    check(shape, &tally);
  }
  CHECK(tally.diverged > 20);
}
