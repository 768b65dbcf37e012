// Faults of many kinds on a small simulated GPU: the launch that is named, and the cause.
#include <fmt/format.h>

#include "tests/support/launch_training.h"

using namespace forkpoint;

using Launch = LaunchTraining::Launch;

TEST_CASE("an accumulation by atomics, run again, is told from a broken device") {
  LaunchTraining base;
  const auto run = [&](uint32_t seed, bool stable) {
    return faulty(base, at_launch("wgrad2", 1, [seed, stable](Launch& at) {
                    const KernelBody body = at.body;
                    at.options.retries = 5;
                    at.body = [=](KernelCall& call) {
                      body(call);
                      call.buffers[2][0] +=
                          stable && call.attempt > 0 ? 0 : seed * 10 + static_cast<uint32_t>(call.attempt) % 3;
                    };
                  }));
  };
  const Verdict unstable = diff_trainings(run(0, false), run(1, false));
  INFO(dump(unstable));
  CHECK(is_launch(unstable, "wgrad2", 1));
  CHECK(unstable.cause.cls == "unordered_accumulation");
  CHECK(holds(unstable.cause.evidence, "run again 5 times in run B from the same inputs, it gave 3 different outputs"));
  const Verdict stable = diff_trainings(run(0, true), run(1, true));
  INFO(dump(stable));
  CHECK(is_launch(stable, "wgrad2", 1));
  CHECK(stable.cause.cls != "unordered_accumulation");
  CHECK(may_be(stable, "hardware_or_sporadic"));
  CHECK(holds(stable.cause.evidence, "one and the same output, that of the other run"));
}

TEST_CASE("a launch more among many of its kind is at least not mistaken for chance") {
  const auto run = [](const Machine& machine, int extra) {
    auto program = std::make_unique<LaunchProgram>(machine);
    std::vector<DeviceBuffer> chain;
    for (int k = 0; k < 12; ++k) chain.push_back(program->allocate(8));
    program->copy_from_host(chain[0], words_of(3, 8));
    program->step(0);
    for (size_t k = 0; k + 1 < chain.size(); ++k) {
      program->kernel("add", {to(chain[k]), to(chain[k + 1])}, combined());
      if (static_cast<int>(k) == extra) {
        program->kernel("add", {to(chain[k]), to(chain[k + 1])}, accumulated());
      }
    }
    program->copy_to_host(chain.back());
    return program;
  };
  for (int extra = 0; extra < 11; ++extra) {
    const auto a = run({}, -1), b = run(another_machine({}), extra);
    const Verdict v = diff_programs({a.get()}, {b.get()});
    INFO(extra << dump(v));
    CHECK(is_launch(v, "add", 0));
    CHECK(may_be(v, "structure"));
    const bool named =
        v.cause.cls == "structure" || v.cause.next.find(fmt::format("--launch 0:{} ", extra + 1)) != std::string::npos;
    CHECK(named);
  }
}

TEST_CASE("another kernel, or one on another grid, in the place of one is a choice of algorithm") {
  LaunchTraining base;
  LaunchTraining other = faulty(base, at_launch("gemm1", 2, [](Launch& at) {
                                  at.name = "gemm1_splitk";
                                  at.body = then(at.body, flip(2));
                                }));
  const Verdict v = diff_trainings(base, other);
  INFO(dump(v));
  CHECK(is_launch(v, "gemm1_splitk", 2));
  CHECK(v.cause.cls == "algorithm_choice");
  CHECK(v.cause.class_candidates == std::vector<std::string>{"algorithm_choice"});
  CHECK(holds(v.cause.evidence, "run A launches gemm1, run B gemm1_splitk"));

  // two kernels with a workspace in the place of one
  const Verdict split = diff_trainings(
      base, faulty(base, at_launch("gemm1", 2, [](Launch& at) {
                     const DeviceBuffer partial = at.program.allocate(64);
                     at.program.kernel("splitk", {at.parameters[0], at.parameters[1], to(partial)}, combined());
                     at.program.kernel("splitk_reduce", {to(partial), at.parameters[2]}, combined());
                     at.program.release(partial);
                     at.skip = true;
                   })));
  INFO(dump(split));
  CHECK(first_of(split).step == 2);
  CHECK(first_of(split).layer == "fc1");
  CHECK(split.cause.cls == "algorithm_choice");
  CHECK(holds(split.cause.evidence, "run A launches gemm1, run B splitk, splitk_reduce"));

  const Verdict grid = diff_trainings(base, faulty(base, at_launch("gemm1", 2, [](Launch& at) {
                                                     at.options.grid = 16;
                                                     at.body = then(at.body, flip(2));
                                                   })));
  INFO(dump(grid));
  CHECK(is_launch(grid, "gemm1", 2));
  CHECK(grid.cause.cls == "algorithm_choice");
  CHECK(holds(grid.cause.evidence, "grid: 8 x 1 x 1 in run A, 16 x 1 x 1 in run B"));

  // all along, with the same results: nothing differs until another one does
  const Verdict same = diff_trainings(base, faulty(base, [](Launch& at) {
                                        if (at.name == "gemm1") at.name = "gemm1_splitk";
                                        if (at.name == "gemm2") at.options.grid = 4;
                                        if (at.name == "wgrad1" && at.step == 1) at.body = then(at.body, flip(2));
                                      }));
  INFO(dump(same));
  CHECK(is_launch(same, "wgrad1", 1));
  CHECK(same.cause.cls == "nondeterministic_op");
}

TEST_CASE("a parameter that differs is an input that differs") {
  LaunchTraining base;
  const auto change = [](const std::string& kernel, const std::string& as) {
    return at_launch(kernel, 1, [=](Launch& at) {
      if (!as.empty()) at.name = as;
      at.parameters.back() = word(static_cast<uint32_t>(at.parameters.back().value) + 1);
    });
  };
  const auto renamed = [](const std::string& kernel, const std::string& as) {
    return at_launch(kernel, -1, [=](Launch& at) { at.name = as; });
  };
  const Verdict rate = diff_trainings(base, faulty(base, change("sgd", "")));
  INFO(dump(rate));
  CHECK(is_launch(rate, "sgd", 1));
  CHECK(rate.cause.cls == "hyperparameter");
  CHECK(holds(rate.cause.evidence, "parameter bytes 16..19 differ by +1"));

  const Verdict scalar = diff_trainings(base, faulty(base, change("gelu", "")));
  INFO(dump(scalar));
  CHECK(is_launch(scalar, "gelu", 1));
  CHECK(scalar.cause.cls == "unknown");
  CHECK(may_be(scalar, "hyperparameter"));
  CHECK(may_be(scalar, "rng_state"));

  LaunchTraining random = faulty(base, renamed("gelu", "distribution_elementwise_philox"));
  LaunchTraining other = faulty(base, [&](Launch& at) {
    if (at.name != "gelu") return;
    at.name = "distribution_elementwise_philox";
    if (at.step == 1) at.parameters.back() = word(4);
  });
  const Verdict seed = diff_trainings(random, other);
  INFO(dump(seed));
  CHECK(is_launch(seed, "distribution_elementwise_philox", 1));
  CHECK(seed.cause.cls == "rng_state");
}

TEST_CASE("padding and numbers that look like pointers are no parameters") {
  // gelu gets 8 bytes more that its body does not look at
  const auto run = [](const std::function<uint64_t(Launch&)>& padding, bool fault) {
    LaunchTraining options;
    options.before = [=](Launch& at) {
      if (at.name != "gelu") return;
      const KernelBody body = at.body;
      at.parameters.push_back(wide(padding(at)));
      at.body = [body, fault, step = at.step](KernelCall& call) {
        call.numbers.pop_back();
        body(call);
        if (fault && step == 2) call.buffers[1][7] ^= 4;
      };
    };
    return options;
  };
  const auto garbage_a = [](Launch& at) { return 0x1234567800000000ull + static_cast<uint64_t>(at.step) * 99; };
  const auto garbage_b = [](Launch& at) { return 0x7766554400000000ull + static_cast<uint64_t>(at.step) * 1234567; };
  const Verdict equal = diff_trainings(run(garbage_a, false), run(garbage_b, false));
  INFO(dump(equal));
  CHECK(equal.outcome == Outcome::identical);
  const Verdict fault = diff_trainings(run(garbage_a, false), run(garbage_b, true));
  INFO(dump(fault));
  CHECK(is_launch(fault, "gelu", 2));
  CHECK(fault.cause.cls == "nondeterministic_op");
  CHECK(holds(fault.cause.evidence, "not counted"));

  // a number that lies in a buffer of run A, and in none of run B
  const LaunchTraining somewhere = run([](Launch&) { return 0x7f0000000010ull; }, false);
  const Verdict number = diff_trainings(somewhere, run([](Launch&) { return 0x7f0000000010ull; }, false));
  INFO(dump(number));
  CHECK(number.outcome == Outcome::identical);
  const Verdict blamed = diff_trainings(somewhere, run([](Launch&) { return 0x7f0000000010ull; }, true));
  INFO(dump(blamed));
  CHECK(is_launch(blamed, "gelu", 2));
  CHECK(blamed.cause.cls == "nondeterministic_op");
  CHECK(holds(blamed.cause.evidence, "parameters are the same"));
}

namespace {

// A shadow of the weights is made on one stream and read on another, which has to wait for it; as D1 of the reports.
struct TwoStreams {
  Machine machine;
  int64_t without_wait = -1;  // step whose read does not wait, and overtakes the write
  bool waits = true;          // false: no step waits
  bool lucky = true;          // a read that does not wait comes too early only in without_wait
  bool buffer_late = false;   // by the time of its digest the buffer holds the new value all the same
};

std::unique_ptr<LaunchProgram> run_two_streams(const TwoStreams& options) {
  auto program = std::make_unique<LaunchProgram>(options.machine);
  const uint32_t side = program->stream(true), main = program->stream(true);
  program->use(main);
  const DeviceBuffer master = program->allocate(64), shadow = program->allocate(64), x = program->allocate(64),
                     y = program->allocate(64);
  program->copy_from_host(master, words_of(1, 64));
  program->copy_from_host(x, words_of(2, 64));
  program->set(shadow, 0);
  program->set(y, 0);
  uint64_t used = program->record_event();
  for (int64_t step = 0; step < 5; ++step) {
    const bool waits = options.waits && step != options.without_wait;
    program->step(step).scope(Phase::optimizer, "fc1");
    program->kernel("update", {to(x), to(master)}, accumulated());
    const uint64_t updated = program->record_event();
    program->use(side);
    program->wait_event(updated);
    program->wait_event(used);
    LaunchOptions late;
    late.delay = step == options.without_wait ? 1000 : 0;
    program->kernel(
        "gather", {to(master), to(shadow)},
        [](KernelCall& call) { std::copy(call.buffers[0].begin(), call.buffers[0].end(), call.buffers[1].begin()); },
        late);
    const uint64_t gathered = program->record_event();
    program->use(main);
    program->scope(Phase::forward, "fc1", "aten::mm");
    if (waits) program->wait_event(gathered);
    program->kernel("gemm", {to(x), to(shadow), to(y)}, combined());
    program->copy_to_host(y);
    used = program->record_event();
    program->synchronize();
  }
  program->step(5);
  return program;
}

}  // namespace

TEST_CASE("a read that did not wait for the write on another stream is a race, and stale") {
  TwoStreams a, b;
  b.machine = another_machine(a.machine);
  auto in_a = run_two_streams(a), in_b = run_two_streams(b);
  const Verdict equal = diff_programs({in_a.get()}, {in_b.get()});
  INFO(dump(equal));
  CHECK(equal.outcome == Outcome::identical);

  b.without_wait = 3;
  in_b = run_two_streams(b);
  in_a = run_two_streams(a);
  const Verdict v = diff_programs({in_a.get()}, {in_b.get()});
  INFO(dump(v));
  CHECK(is_launch(v, "gemm", 3));
  CHECK(first_of(v).layer == "fc1");
  CHECK(v.cause.cls == "stream_race");
  CHECK(v.cause.class_candidates == std::vector<std::string>{"stream_race"});
  CHECK(holds(v.cause.evidence, "nothing orders gather (launch"));
  CHECK(holds(v.cause.evidence, "in run B"));
  CHECK(holds(v.cause.evidence, "in run A event"));
  CHECK(holds(v.cause.evidence, "an older version (stale)"));

  // the racy run as reference
  in_a = run_two_streams(a);
  in_b = run_two_streams(b);
  const Verdict reversed = diff_programs({in_b.get()}, {in_a.get()});
  INFO(dump(reversed));
  CHECK(is_launch(reversed, "gemm", 3));
  CHECK(reversed.cause.cls == "stream_race");

  // neither run waits, one of them is lucky
  a.waits = b.waits = false;
  in_a = run_two_streams(a);
  in_b = run_two_streams(b);
  const Verdict both = diff_programs({in_a.get()}, {in_b.get()});
  INFO(dump(both));
  CHECK(is_launch(both, "gemm", 3));
  CHECK(both.cause.cls == "stream_race");  // by the stale version
  CHECK(may_be(both, "nondeterministic_op"));
  CHECK(holds(both.cause.evidence, "in both runs"));
}

TEST_CASE("blocking streams wait for the default stream, and it for them") {
  const auto run = [](const Machine& machine, bool non_blocking, uint32_t fault) {
    auto program = std::make_unique<LaunchProgram>(machine);
    const uint32_t side = program->stream(non_blocking);
    const DeviceBuffer x = program->allocate(64), y = program->allocate(64), z = program->allocate(64);
    program->copy_from_host(x, words_of(1, 64));
    program->set(y, 0);
    program->set(z, 0);
    program->synchronize();
    program->step(0);
    program->use(side);
    program->kernel("produce", {to(x), to(y)}, combined());
    program->use(0);
    program->kernel("consume", {to(y), to(z)},
                    then(combined(), [fault](KernelCall& call) { call.buffers[1][0] += fault; }));
    program->copy_to_host(z);
    return program;
  };
  for (const bool non_blocking : {false, true}) {
    const auto a = run({}, non_blocking, 0), b = run(another_machine({}), non_blocking, 1);
    const Verdict v = diff_programs({a.get()}, {b.get()});
    INFO(dump(v));
    CHECK(is_launch(v, "consume", 0));
    CHECK(v.cause.cls == "nondeterministic_op");
    CHECK(holds(v.cause.evidence, "nothing orders") == non_blocking);
    CHECK(may_be(v, "stream_race") == true);  // inputs are assumed
  }
}

TEST_CASE("memory that nobody wrote: read only, or the output itself") {
  const auto run = [](const Machine& machine, bool reads) {
    auto program = std::make_unique<LaunchProgram>(machine);
    const DeviceBuffer x = program->allocate(64), y = program->allocate(64);
    program->copy_from_host(x, words_of(1, 64));
    program->set(y, 0);
    program->step(0).scope(Phase::backward, "unpack");
    const DeviceBuffer mask = program->allocate(64), holes = program->allocate(64);
    if (reads) {
      program->kernel("masked_add", {to(x), to(mask), to(y)}, combined());
    } else {
      program->kernel("unpack_rows", {to(x), to(holes)}, [](KernelCall& call) {
        for (size_t i = 0; i < 40; ++i) call.buffers[1][i] = call.buffers[0][i];
      });
      program->kernel("add", {to(holes), to(y)}, accumulated());
    }
    program->copy_to_host(y);
    return program;
  };
  for (const bool inputs : {false, true}) {
    Machine machine;
    machine.inputs = inputs;
    auto a = run(machine, true), b = run(another_machine(machine), true);
    const Verdict reads = diff_programs({a.get()}, {b.get()});
    INFO(inputs << dump(reads));
    CHECK(is_launch(reads, "masked_add", 0));
    CHECK(may_be(reads, "uninitialized_memory"));
    CHECK((reads.cause.cls == "uninitialized_memory") == inputs);
    a = run(machine, false), b = run(another_machine(machine), false);
    const Verdict output = diff_programs({a.get()}, {b.get()});
    INFO(dump(output));
    CHECK(is_launch(output, "unpack_rows", 0));
    CHECK(may_be(output, "uninitialized_memory"));
    CHECK(may_be(output, "nondeterministic_op"));
  }
}

TEST_CASE("a write that nobody observed is found by digests before the launch, and not blamed on the launch") {
  const auto change =
      at_launch("gemm2", 1, [](Launch& at) { at.program.write_unobserved(at.parameters[1].buffer, 5, 77); });
  for (const bool records : {true, false}) {
    LaunchTraining base;
    base.machine.inputs = true, base.records = records;
    const Verdict v = diff_trainings(base, faulty(base, change));
    INFO(dump(v));
    CHECK(is_launch(v, "gemm2", 1));
    CHECK(v.cause.cls == "unknown");
    CHECK(may_be(v, "overwritten_input"));
    CHECK(may_be(v, "stream_race"));
    CHECK(holds(v.cause.evidence,
                "in run B the buffer at parameter byte 8 holds something else right before it than sgd (launch"));
    base.machine.inputs = false;  // then the launch itself looks guilty, and the verdict says what is assumed
    const Verdict assumed = diff_trainings(base, faulty(base, change));
    INFO(dump(assumed));
    CHECK(is_launch(assumed, "gemm2", 1));
    CHECK(may_be(assumed, "stream_race"));
    CHECK(holds(assumed.cause.evidence, "not observed is not excluded"));
  }
}

TEST_CASE("another value from the host lies with the host") {
  LaunchTraining base;
  const auto other_batch =
      at_launch("gemm1", 1, [](Launch& at) { at.program.copy_from_host(at.parameters[0].buffer, words_of(4711, 64)); });
  const auto same_batch =
      at_launch("gemm1", 1, [](Launch& at) { at.program.copy_from_host(at.parameters[0].buffer, words_of(116, 64)); });
  base.records = false;
  const Verdict v = diff_trainings(faulty(base, same_batch), faulty(base, other_batch));
  INFO(dump(v));
  CHECK(is_launch(v, "cuMemcpyHtoDAsync_v2", 1));
  CHECK(v.cause.cls == "unknown");
  CHECK(may_be(v, "data_order"));
  CHECK(holds(v.cause.evidence, "the value comes from the host"));

  // recorded as a batch, the record is what is named
  const auto record_batch = [](uint64_t seed) {
    return at_launch("gemm1", 1, [seed](Launch& at) {
      at.program.scope(Phase::data).copy_from_host(at.parameters[0].buffer, words_of(seed, 64));
      at.program.record(Role::batch, "second", at.parameters[0].buffer);
      at.program.scope(Phase::forward, "fc1", "aten::mm");
    });
  };
  base.records = true;
  const Verdict recorded = diff_trainings(faulty(base, record_batch(116)), faulty(base, record_batch(4711)));
  INFO(dump(recorded));
  CHECK(is_at(first_of(recorded), 1, 0, Phase::data, "", "second"));
  CHECK(recorded.cause.cls == "data_order");
  CHECK(holds(recorded.cause.evidence, "its bytes came from the host: cuMemcpyHtoDAsync_v2"));
}

TEST_CASE("a copy of another size is structure, with the sizes, and not an input that somebody overwrote") {
  const auto run = [](const Machine& machine, uint64_t words) {
    auto program = std::make_unique<LaunchProgram>(machine);
    const DeviceBuffer x = program->allocate(16);
    program->set(x, 1);
    for (int64_t step = 0; step < 3; ++step) {
      program->step(step).kernel("work", {to(x)}, [](KernelCall& call) { ++call.buffers[0][0]; });
      program->copy_to_host(x, step == 1 ? words : 8);
    }
    return program;
  };
  for (const bool inputs : {false, true}) {
    Machine machine;
    machine.inputs = inputs;
    const auto a = run(machine, 8), b = run(another_machine(machine), 4);
    const Verdict v = diff_programs({a.get()}, {b.get()});
    INFO(dump(v));
    CHECK(is_launch(v, "cuMemcpyDtoHAsync_v2", 1));
    CHECK(v.cause.cls == "structure");
    CHECK_FALSE(may_be(v, "overwritten_input"));
    CHECK(v.reason.find("it moves 32 bytes in run A and 16 bytes in run B") != std::string::npos);
    CHECK(holds(v.cause.evidence, "size: 32 bytes in run A, 16 bytes in run B"));
    CHECK(v.cause.next.find("--retry") == std::string::npos);  // a copy cannot be run again
  }
}

TEST_CASE("a copy of another size, because of a value that differed before it, is a consequence") {
  const auto run = [](const Machine& machine, bool faulty) {
    auto program = std::make_unique<LaunchProgram>(machine);
    const DeviceBuffer x = program->allocate(16);
    program->set(x, 1);
    for (int64_t step = 0; step < 3; ++step) {
      program->step(step).kernel("work", {to(x)}, [=](KernelCall& call) { call.buffers[0][0] += faulty && step == 1 ? 2 : 1; });
      program->copy_to_host(x, faulty && step == 1 ? 4 : 8);
    }
    return program;
  };
  const auto a = run({}, false), b = run(another_machine({}), true);
  const Verdict v = diff_programs({a.get()}, {b.get()});
  INFO(dump(v));
  CHECK(is_launch(v, "work", 1));
}

TEST_CASE("a scalar of the host that differs stays first") {
  LaunchTraining base;
  const auto rate = [](uint32_t value) {
    return at_launch("sgd", 1, [value](Launch& at) {
      at.program.record_scalar("lr", value);
      at.parameters.back() = word(value);
    });
  };
  const Verdict v = diff_trainings(faulty(base, rate(1)), faulty(base, rate(2)));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 0, Phase::optimizer, "fc2", "lr"));
  CHECK(v.cause.cls == "hyperparameter");
}

TEST_CASE("buffers of unknown extent, without digests, or whose launch could not be read are said to be blind spots") {
  for (const bool records : {true, false}) {
    LaunchTraining base;
    base.records = records, base.temporaries = false;
    const auto run = [&](const std::string& kernel, const std::function<void(Launch&)>& change, bool fault) {
      return faulty(base, [=](Launch& at) {
        if (at.name == kernel) change(at);
        if (fault && at.name == "gelu" && at.step == 1) at.body = then(at.body, flip(1));
      });
    };
    const auto window = [](Launch& at) { at.options.window_bytes = 64; };
    const auto no_digest = [](Launch& at) { at.options.no_digest = true; };
    const auto unread = [](Launch& at) { at.options.flags |= kLaunchParamsUnread, at.options.no_digest = true; };
    const Verdict in_window = diff_trainings(run("gelu", window, false), run("gelu", window, true));
    INFO(dump(in_window));
    CHECK(is_launch(in_window, "gelu", 1));
    CHECK(holds(in_window.cause.evidence, "its extent is not"));
    const Verdict unseen = diff_trainings(run("gelu", no_digest, false), run("gelu", no_digest, true));
    INFO(dump(unseen));
    CHECK(is_launch(unseen, "gemm2", 1));  // the next one whose result is known
    CHECK(holds(unseen.cause.evidence,
                "handed before to gelu, of whose result no digest was taken: it may have begun there"));
    const Verdict blind = diff_trainings(run("gelu", unread, false), run("gelu", unread, true));
    INFO(dump(blind));
    CHECK(is_launch(blind, "gemm2", 1));
    CHECK(holds(blind.cause.evidence, "the buffers of 1 launch could not be told: it may have begun there"));
    for (const auto& change : {std::function<void(Launch&)>(window), std::function<void(Launch&)>(no_digest),
                               std::function<void(Launch&)>(unread)}) {
      const Verdict equal = diff_trainings(run("gelu", change, false), run("gelu", change, false));
      INFO(dump(equal));
      CHECK(equal.outcome == Outcome::identical);
    }
  }
}

TEST_CASE("a buffer that is filled piece by piece, and once not wholly") {
  enum How { kernels, exact_copies };
  for (const How how : {kernels, exact_copies}) {
    for (const auto& [inputs, unused] : {std::pair(true, false), std::pair(false, false), std::pair(true, true)}) {
      const auto run = [how, inputs = inputs, unused = unused](Machine machine) {
        machine.inputs = inputs;
        auto program = std::make_unique<LaunchProgram>(machine);
        const DeviceBuffer source = program->allocate(64), weight = program->allocate(64), out = program->allocate(64);
        program->copy_from_host(source, words_of(1, 64));
        program->copy_from_host(weight, words_of(2, 64));
        program->set(out, 0);
        // As a library hands over its workspace, needed or not: nobody writes it.
        const DeviceBuffer workspace = program->allocate(64);
        for (int64_t step = 0; step < 6; ++step) {
          program->step(step).scope(Phase::forward, "pack");
          const DeviceBuffer packed = program->allocate(64);
          const std::vector<uint32_t> lengths =
              step == 3 ? std::vector<uint32_t>{12, 20, 17} : std::vector<uint32_t>{20, 20, 24};
          uint32_t begin = 0;
          for (size_t k = 0; k < 3; ++k) {
            const uint32_t length = lengths[k];
            if (how == kernels) {
              program->kernel("copy_rows", {to(source), to(packed, begin * 4), word(length)},
                              [begin](KernelCall& call) {
                                for (size_t i = 0; i < call.numbers[0]; ++i)
                                  call.buffers[1][begin + i] = call.buffers[0][i];
                              });
            } else {
              program->copy_part(packed, begin, source, length);
            }
            begin += step == 3 ? length + 5 : length;  // three holes
          }
          program->kernel("gemm", {to(packed), to(weight), unused ? to(workspace) : wide(0), to(out)},
                          [](KernelCall& call) {
                            if (call.buffers.size() == 4) call.buffers.erase(call.buffers.begin() + 2);
                            combined()(call);
                          });
          program->copy_to_host(out);
          program->release(packed);
        }
        return program;
      };
      const auto a = run({}), b = run(another_machine({}));
      const Verdict v = diff_programs({a.get()}, {b.get()});
      INFO(how << inputs << dump(v));
      REQUIRE(v.outcome == Outcome::diverged);
      CHECK(first_of(v).step == 3);
      CHECK(first_of(v).kernel == (how == kernels ? "copy_rows" : "gemm"));
      CHECK(may_be(v, "uninitialized_memory"));
      CHECK(v.cause.cls == (how == exact_copies && inputs ? "uninitialized_memory" : "nondeterministic_op"));
    }
  }
}

TEST_CASE("a library that tries several kernels for one operation chooses an algorithm") {
  LaunchTraining base;
  const auto tries = at_launch("gemm1", 0, [](Launch& at) {
    at.program.kernel("gemm1", at.parameters, at.body);
    at.program.kernel("gemm1_wide", at.parameters, then(at.body, flip(2)));
    at.name = "gemm1_splitk";
    at.body = then(at.body, flip(2, 7));
  });
  const Verdict v = diff_trainings(base, faulty(base, tries));
  INFO(dump(v));
  CHECK(is_launch(v, "gemm1_splitk", 0));
  CHECK(v.cause.cls == "algorithm_choice");
}

TEST_CASE("many parameters that differ are what the stack held as often as they are numbers") {
  const auto run = [](uint64_t garbage, bool fault) {
    LaunchTraining options;
    options.before = [=](Launch& at) {
      if (at.name != "gelu" || at.step < 1) return;
      at.name = "scatter_add";  // in no step before the fault
      const KernelBody body = at.body;
      for (uint64_t k = 0; k < 4; ++k)
        at.parameters.push_back(wide((garbage + k) * 0x9E3779B97F4A7C15ull | 1ull << 63));
      at.body = [=](KernelCall& call) {
        call.numbers.resize(1);
        body(call);
        if (fault) call.buffers[1][7] ^= 4;
      };
    };
    return options;
  };
  const Verdict v = diff_trainings(run(1, false), run(2, true));
  INFO(dump(v));
  CHECK(is_launch(v, "scatter_add", 1));
  CHECK(v.cause.cls == "nondeterministic_op");
  CHECK(may_be(v, "unordered_accumulation"));
  CHECK(may_be(v, "hyperparameter"));
  CHECK(holds(v.cause.evidence, "what the stack held in unused fields"));
  CHECK(diff_trainings(run(1, false), run(2, false)).outcome == Outcome::identical);
}

TEST_CASE("parameters from which each run's launch gives its own output again and again are no chance") {
  const auto run = [](uint64_t seed, int retries, bool unstable) {
    LaunchTraining options;
    options.before = [=](Launch& at) {
      if (at.name != "gelu") return;
      const KernelBody body = at.body;
      at.parameters.push_back(wide(at.step == 1 ? seed : 0));
      if (at.step == 1) at.options.retries = retries;
      at.body = [=](KernelCall& call) {
        const uint64_t number = call.numbers.back();
        call.numbers.pop_back();
        body(call);
        call.buffers[1][3] += static_cast<uint32_t>(number) + (unstable ? static_cast<uint32_t>(call.attempt) % 2 : 0);
      };
    };
    return options;
  };
  const Verdict once = diff_trainings(run(5, 0, false), run(6, 0, false));
  INFO(dump(once));
  CHECK(is_launch(once, "gelu", 1));
  CHECK(may_be(once, "unordered_accumulation"));
  CHECK(may_be(once, "hyperparameter"));
  const Verdict again = diff_trainings(run(5, 8, false), run(6, 8, false));
  INFO(dump(again));
  CHECK(is_launch(again, "gelu", 1));
  CHECK_FALSE(may_be(again, "unordered_accumulation"));
  CHECK(may_be(again, "hyperparameter"));
  CHECK(may_be(again, "rng_state"));
  CHECK(again.reason.find("its buffers agree, its parameters and its output differ") != std::string::npos);
  const Verdict unstable = diff_trainings(run(5, 8, true), run(6, 8, true));
  INFO(dump(unstable));
  CHECK(unstable.cause.cls == "unordered_accumulation");
}

TEST_CASE("a number that looks like a pointer to some other buffer in each run explains nothing") {
  const auto run = [](bool second, bool fault) {
    auto kept = std::make_shared<std::vector<DeviceBuffer>>();
    LaunchTraining options;
    options.before = [=](Launch& at) {
      if (at.name == "gemm1" && at.step == 0) {
        for (uint64_t k = 0; k < 3; ++k) {
          kept->push_back(at.program.allocate(64));
          at.program.copy_from_host(kept->back(), words_of(70 + k, 64));
        }
        for (const DeviceBuffer& buffer : *kept) at.program.kernel("touch", {to(buffer)}, [](KernelCall&) {});
      }
      if (at.name != "gelu") return;
      // at step 1 only, and then it leads to another buffer in each run
      at.parameters.push_back(wide(at.step == 1 ? at.program.address((*kept)[second ? 2 : 0]) : 0));
      const KernelBody body = at.body;
      at.body = [=, step = at.step](KernelCall& call) {
        call.numbers.pop_back();
        body(call);
        if (fault && step == 1) call.buffers[1][7] ^= 4;
      };
    };
    return options;
  };
  const Verdict equal = diff_trainings(run(false, false), run(true, false));
  INFO(dump(equal));
  CHECK(equal.outcome == Outcome::identical);
  const Verdict v = diff_trainings(run(false, false), run(true, true));
  INFO(dump(v));
  CHECK(is_launch(v, "gelu", 1));
  CHECK(v.cause.cls == "nondeterministic_op");
}
