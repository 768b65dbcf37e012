// Two recordings of a program on a small simulated GPU, at level launch: what diff says about them. The truth is known,
// since the fault was planted.
#include "tests/support/launch_training.h"

using namespace forkpoint;

using Launch = LaunchTraining::Launch;

TEST_CASE("equal runs are identical whatever their addresses, streams and allocation numbers") {
  for (const bool records : {true, false}) {
    for (const bool temporaries : {true, false}) {
      for (const bool inputs : {false, true}) {
        LaunchTraining base;
        base.records = records, base.temporaries = temporaries, base.machine.inputs = inputs;
        const Verdict v = diff_trainings(base, base);
        INFO(dump(v));
        CHECK(v.outcome == Outcome::identical);
        CHECK(v.coverage.launches_compared == 3 + 3 * 11);
        CHECK(v.coverage.buffers_compared > 3 * 20);
        CHECK_FALSE(holds(v.notes, "scratch"));
      }
    }
  }
}

TEST_CASE("the launch whose inputs agree and whose output differs is named, not the first record that shows it") {
  for (const bool inputs : {false, true}) {
    LaunchTraining base;
    base.machine.inputs = inputs;
    // gelu is recorded nowhere: gemm2's output is the first record that differs, and much follows
    const Verdict v =
        diff_trainings(base, faulty(base, at_launch("gelu", 1, [](Launch& at) { at.body = then(at.body, flip(1)); })));
    INFO(dump(v));
    REQUIRE(v.outcome == Outcome::diverged);
    CHECK(is_launch(v, "gelu", 1));
    CHECK(first_of(v).phase == Phase::forward);
    CHECK(first_of(v).layer == "gelu");
    CHECK(first_of(v).op == "aten::gelu");
    CHECK(first_of(v).tensor == "buffer at parameter byte 8");
    REQUIRE(first_of(v).pointing.has_value());
    CHECK(first_of(v).pointing->word == 3);
    CHECK(first_of(v).pointing->bit == 5);
    CHECK(v.also_first.empty());
    CHECK(v.cause.cls == "nondeterministic_op");
    CHECK(holds(v.cause.evidence, "forward, fc2 (aten::mm): output"));
    CHECK(holds(v.cause.evidence, "kernel, grid, block and parameters are the same"));
    CHECK(holds(v.cause.evidence, inputs ? "right before the launch" : "not observed is not excluded"));
    CHECK(v.propagated > 10);
    CHECK(v.cause.next.find("--retry 20 --launch 1:") != std::string::npos);
    CHECK(headline(v) == "diverged at step 1, rank 0, forward, gelu (aten::gelu): gelu, buffer at parameter byte 8");
  }
}

TEST_CASE("without records, what the host copies is where a difference shows") {
  for (const bool temporaries : {true, false}) {
    for (const bool step_marks : {true, false}) {
      LaunchTraining base;
      base.records = false, base.temporaries = temporaries, base.step_marks = step_marks;
      const Verdict v = diff_trainings(
          base, faulty(base, at_launch("gemm1", 1, [](Launch& at) { at.body = then(at.body, flip(2)); })));
      INFO(dump(v));
      REQUIRE(v.outcome == Outcome::diverged);
      CHECK(is_launch(v, "gemm1", step_marks ? 1 : 0));
      CHECK(first_of(v).in_prologue == !step_marks);
      CHECK(first_of(v).layer == "fc1");
      CHECK(holds(v.cause.evidence, "what cuMemcpyDtoHAsync_v2 copies to the host"));
      CHECK(holds(v.cause.evidence, "through"));
      CHECK(v.propagated > 5);
      CHECK(v.ranks_diverged == std::vector<int>{0});
    }
  }
}

TEST_CASE("a fault after the last copy of its step shows in the next step, and is named where it happened") {
  LaunchTraining base;
  base.records = false, base.temporaries = false;
  const Verdict v =
      diff_trainings(base, faulty(base, at_launch("wgrad2", 0, [](Launch& at) { at.body = then(at.body, flip(2)); })));
  INFO(dump(v));
  CHECK(is_launch(v, "wgrad2", 0));
  CHECK(first_of(v).layer == "fc2");
}

TEST_CASE("scratch that differs in every step is named and not counted") {
  for (const bool temporaries : {true, false}) {
    LaunchTraining base;
    base.noise = true, base.temporaries = temporaries;
    const Verdict v = diff_trainings(base, base);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::identical);
    CHECK(holds(v.notes, "scratch noise"));
    CHECK(holds(v.notes, "reduce"));
  }
}

TEST_CASE("scratch that differs is no explanation for a result that differs") {
  for (const bool records : {true, false}) {
    for (const bool inputs : {false, true}) {
      LaunchTraining base;
      base.noise = true, base.records = records, base.machine.inputs = inputs;
      const Verdict v = diff_trainings(
          base, faulty(base, at_launch("reduce", 2, [](Launch& at) { at.body = then(at.body, flip(2, 0)); })));
      INFO(dump(v));
      CHECK(is_launch(v, "reduce", 2));
      CHECK(first_of(v).tensor == "buffer at parameter byte 16");
      CHECK(holds(v.cause.evidence, "scratch, since other launches that it was handed to gave equal results"));
    }
  }
}

TEST_CASE("noise that goes on while a fault happens elsewhere") {
  LaunchTraining base;
  base.noise = true, base.temporaries = false, base.records = false, base.steps = 6;
  const Verdict v =
      diff_trainings(base, faulty(base, at_launch("gemm2", 4, [](Launch& at) { at.body = then(at.body, flip(2)); })));
  INFO(dump(v));
  CHECK(is_launch(v, "gemm2", 4));
  CHECK(v.also_first.empty());
}

TEST_CASE("a difference that is still in memory where the recording ends is undecided") {
  for (const bool records : {true, false}) {
    LaunchTraining base;
    base.records = records, base.steps = 2;
    DeviceBuffer kept;
    const auto with_extra = [&](bool faulted) {
      return faulty(base, at_launch("loss_grad", 1, [&kept, faulted](Launch& at) {
                      kept = at.program.allocate(16);
                      at.program.kernel("histogram", {at.parameters[0], to(kept)},
                                        faulted ? then(combined(), flip(1)) : combined());
                    }));
    };
    const Verdict v = diff_trainings(with_extra(false), with_extra(true));
    INFO(dump(v));
    CHECK(v.outcome == Outcome::incomparable);
    CHECK(v.reason.find("undecided") != std::string::npos);
    CHECK(v.reason.find("histogram (launch") != std::string::npos);
    CHECK(v.reason.find("allocated at launch") != std::string::npos);
    CHECK_FALSE(v.first.has_value());
    const Verdict equal = diff_trainings(with_extra(false), with_extra(false));
    CHECK(equal.outcome == Outcome::identical);
  }
}

TEST_CASE("the same inside a graph, and a graph in one run against plain launches in the other") {
  const auto run = [](bool graph, uint32_t seed) {
    LaunchTraining options;
    options.machine.first_stream = graph ? 4 : 1;
    options.before = [=](Launch& at) {
      if (at.name == "loss_grad" && graph) at.program.graph(9);
      if (at.name == "sgd") at.program.end_graph();
      if (at.name == "wgrad1" && at.step == 1)
        at.body = then(at.body, [seed](KernelCall& call) { call.buffers[2][1] += seed; });
    };
    return options;
  };
  for (const bool graph_a : {true, false}) {
    const Verdict v = diff_trainings(run(graph_a, 0), run(true, 1));
    INFO(dump(v));
    CHECK(is_launch(v, "wgrad1", 1));
    const Verdict equal = diff_trainings(run(graph_a, 1), run(true, 1));
    INFO(dump(equal));
    CHECK(equal.outcome == Outcome::identical);
  }
}

TEST_CASE("a launch more that changes nothing is a note") {
  LaunchTraining base;
  const auto insert = [](const std::string& kernel, bool own_memory) {
    return at_launch("gemm2", 1, [=](Launch& at) {
      if (!own_memory) {  // reads what is there and puts it back
        at.program.kernel(kernel, {at.parameters[0]}, [](KernelCall&) {});
        return;
      }
      const DeviceBuffer copy = at.program.allocate(64);
      at.program.kernel(kernel, {at.parameters[0], to(copy)}, combined());
      at.program.release(copy);
    });
  };
  for (const std::string kernel : {"clone", "gemm2", "gelu"}) {
    for (const bool own_memory : {true, false}) {
      const Verdict v = diff_trainings(base, faulty(base, insert(kernel, own_memory)));
      INFO(kernel << own_memory << dump(v));
      CHECK(v.outcome == Outcome::identical);
      CHECK(holds(v.notes, "run B has 1 launch that the other run has not, first rank 0: " + kernel));
      const Verdict missing = diff_trainings(faulty(base, insert(kernel, own_memory)), base);
      INFO(dump(missing));
      CHECK(missing.outcome == Outcome::identical);
    }
  }
}

TEST_CASE("a launch more that changes a value") {
  for (const std::string kernel : {"mul", "gelu", "gemm2"}) {
    LaunchTraining base;
    base.records = kernel != "gelu";
    const auto insert = at_launch("gemm2", 1, [&](Launch& at) {
      at.program.scope(Phase::forward, "gelu", "aten::mul")
          .kernel(kernel, {at.parameters[0], word(9)}, [](KernelCall& call) {
            for (uint32_t& at : call.buffers[0]) at *= 3;
          });
      at.program.scope(Phase::forward, "fc2", "aten::mm");
    });
    const Verdict v = diff_trainings(base, faulty(base, insert));
    INFO(kernel << dump(v));
    CHECK(is_launch(v, kernel, 1));
    CHECK(first_of(v).op == "aten::mul");
    CHECK(v.cause.cls == "structure");
    CHECK(holds(v.cause.evidence, "only run B launches " + kernel));
    const Verdict missing = diff_trainings(faulty(base, insert), base);
    INFO(dump(missing));
    CHECK(is_launch(missing, kernel, 1));
    CHECK(holds(missing.cause.evidence, "only run A launches " + kernel));
  }
}

TEST_CASE("ranks: the one whose own launch differs is named, though all differ after the collective") {
  for (const bool records : {true, false}) {
    const auto job = [&](Machine machine, const std::function<void(Launch&)>& before,
                         const std::function<void(int, Words*)>& alter, const std::string& nccl) {
      std::vector<std::unique_ptr<LaunchProgram>> ranks;
      for (int rank = 0; rank < 3; ++rank) ranks.push_back(std::make_unique<LaunchProgram>(machine, rank));
      std::vector<LaunchProgram*> list;
      for (auto& rank : ranks) list.push_back(rank.get());
      std::vector<DeviceBuffer> x, g, w;
      for (auto& rank : ranks) {
        x.push_back(rank->allocate(64)), g.push_back(rank->allocate(64)), w.push_back(rank->allocate(64));
        rank->copy_from_host(w.back(), words_of(5, 64));
      }
      for (int64_t step = 0; step < 3; ++step) {
        for (int r = 0; r < 3; ++r) {
          LaunchProgram& rank = *ranks[static_cast<size_t>(r)];
          rank.step(step).scope(Phase::data).copy_from_host(x[r], words_of(static_cast<uint64_t>(step * 10 + r), 64));
          Launch at{rank, r, step, "wgrad", {to(x[r]), to(w[r]), to(g[r])}, combined(), {}};
          rank.scope(Phase::backward, "fc1");
          if (before) before(at);
          rank.kernel(at.name, at.parameters, at.body, at.options);
          if (records) rank.record(Role::gradient, "weight.grad", g[r]);
        }
        all_reduce(list, g, step == 1 && !nccl.empty() ? nccl : "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                   [&](int rank, Words* words) {
                     if (alter && step == 1) alter(rank, words);
                   });
        for (size_t r = 0; r < 3; ++r) {
          ranks[r]->scope(Phase::optimizer, "fc1").kernel("sgd", {to(g[r]), to(w[r])}, accumulated());
          if (records) ranks[r]->record(Role::parameter, "weight", w[r]);
          ranks[r]->copy_to_host(w[r]);
        }
      }
      return ranks;
    };
    const auto compare = [&](const auto& a, const auto& b) {
      const std::vector<LaunchProgram*> in_a = {a[0].get(), a[1].get(), a[2].get()},
                                        in_b = {b[0].get(), b[1].get(), b[2].get()};
      return diff_programs(in_a, in_b);
    };
    const Machine other = another_machine({});
    const Verdict equal = compare(job({}, {}, {}, ""), job(other, {}, {}, ""));
    INFO(dump(equal));
    CHECK(equal.outcome == Outcome::identical);

    const auto on_rank_1 = [](Launch& at) {
      if (at.rank == 1 && at.step == 1) at.body = then(at.body, flip(2));
    };
    const Verdict v = compare(job({}, {}, {}, ""), job(other, on_rank_1, {}, ""));
    INFO(dump(v));
    CHECK(is_launch(v, "wgrad", 1, 1));
    CHECK(first_of(v).phase == Phase::backward);
    CHECK(v.also_first.empty());
    CHECK(v.ranks_diverged == std::vector<int>{0, 1, 2});
    CHECK(holds(v.cause.evidence, "ranks 0, 2 were reached through all_reduce of fc1"));

    const Verdict everywhere = compare(job({}, {}, {}, ""), job(
                                                                other,
                                                                [](Launch& at) {
                                                                  if (at.step == 1) at.body = then(at.body, flip(2));
                                                                },
                                                                {}, ""));
    INFO(dump(everywhere));
    CHECK(is_launch(everywhere, "wgrad", 1, -1));
    CHECK_FALSE(may_be(everywhere, "hardware_or_sporadic"));

    const Verdict altered = compare(job({}, {}, {}, ""), job(
                                                             other, {},
                                                             [](int rank, Words* words) {
                                                               if (rank == 2) (*words)[9] ^= 1u << 20;
                                                             },
                                                             ""));
    INFO(dump(altered));
    CHECK(first_of(altered).kind == Kind::collective);
    CHECK(first_of(altered).step == 1);
    CHECK(holds(altered.cause.evidence, "input"));
    CHECK(altered.ranks_diverged == std::vector<int>{0, 1, 2});

    const Verdict algorithm = compare(job({}, {}, {}, ""), job(
                                                               other, {}, [](int, Words* words) { (*words)[9] ^= 1; },
                                                               "ncclDevKernel_AllReduce_Sum_f32_TREE_LL"));
    INFO(dump(algorithm));
    CHECK(first_of(algorithm).kind == Kind::collective);
    CHECK(first_of(algorithm).rank == -1);
    CHECK(may_be(algorithm, "reduction_order"));
    CHECK(holds(algorithm.cause.evidence, "RING_LL in run A and ncclDevKernel_AllReduce_Sum_f32_TREE_LL in run B"));
  }
}

TEST_CASE("runs cut short, other levels, and launches in one run only") {
  LaunchTraining base, longer = base;
  longer.steps = 5;
  const Verdict shorter = diff_trainings(longer, base);
  INFO(dump(shorter));
  CHECK(shorter.outcome == Outcome::incomparable);

  const auto a = train(base), b = train(base), c = train(base), d = train(base);
  d->die();
  const TemporaryFolder folder;
  LaunchRun in_a({a.get()}), in_b({b.get()}), in_d({d.get()});
  in_b.level(Level::layer);
  const std::string path_a = in_a.write(folder / "a"), path_b = in_b.write(folder / "b");
  const Verdict coarser = diff_folders(path_a, path_b);
  INFO(dump(coarser));
  CHECK(coarser.outcome == Outcome::identical);
  CHECK(coarser.coverage.level == "layer");
  CHECK(coarser.coverage.launches_compared == 0);
  CHECK(holds(coarser.coverage.limits, "launches were not compared"));

  const Verdict died = diff_folders(path_a, in_d.write(folder / "d"));
  INFO(dump(died));
  CHECK(died.outcome == Outcome::incomparable);

  // at level launch, with no launches: the probe has seen nothing
  LaunchProgram records_only;
  for (int64_t step = 0; step < 3; ++step) records_only.step(step).record_scalar("lr", 1);
  LaunchProgram launches_too;
  for (int64_t step = 0; step < 3; ++step) {
    launches_too.step(step).record_scalar("lr", 1);
    launches_too.set(launches_too.allocate(4), 1);
  }
  const Verdict missing = diff_programs({&launches_too}, {&records_only});
  INFO(dump(missing));
  CHECK(missing.outcome == Outcome::incomparable);
  CHECK(missing.reason.find("run B recorded no launches of rank 0") != std::string::npos);
}

// Another thread allocates or waits in a short step of one run, and a moment later in the other.
TEST_CASE("a step in which only one run allocates or waits lacks no launches, and one in which only it works does") {
  enum { nothing, notes, work };
  const auto program = [](int in_step_1) {
    auto made = std::make_unique<LaunchProgram>();
    const DeviceBuffer buffer = made->allocate(4);
    for (int64_t step = 0; step < 3; ++step) {
      made->step(step);
      if (step == 1 && in_step_1 == notes) made->allocate(8), made->synchronize();
      if (step == 1 && in_step_1 == work) made->set(buffer, 5);
      if (step != 1) made->set(buffer, 7), made->copy_to_host(buffer);
    }
    return made;
  };
  const auto quiet = program(nothing), noted = program(notes), busy = program(work);
  for (const bool swapped : {false, true}) {
    const Verdict equal = diff_programs({swapped ? noted.get() : quiet.get()}, {swapped ? quiet.get() : noted.get()});
    INFO(dump(equal));
    CHECK(equal.outcome == Outcome::identical);
    const Verdict lacking = diff_programs({swapped ? busy.get() : quiet.get()}, {swapped ? quiet.get() : busy.get()});
    INFO(dump(lacking));
    CHECK(lacking.outcome == Outcome::incomparable);
    CHECK(lacking.reason.find(swapped ? "run B recorded no launches of rank 0 in step 1" : "run A recorded no launches of rank 0 in step 1") !=
          std::string::npos);
  }
}

// What a second thread does around the mark stands behind it in one run, and before it in the other.
TEST_CASE("work that falls into another step by chance is no difference, and what differs in it is still found") {
  const auto program = [](bool late, uint32_t value) {
    auto made = std::make_unique<LaunchProgram>();
    const DeviceBuffer own = made->allocate(64), other = made->allocate(16);
    const uint32_t first = made->stream(true), second = made->stream(true);
    const auto work_of_other = [&](int64_t step) {
      made->use(second);
      made->set(other, static_cast<uint32_t>(step) + (step == 2 ? value : 0));
      made->kernel("other_double", {to(other)}, [](KernelCall& call) {
        for (uint32_t& word : call.buffers[0]) word *= 2;
      });
      made->use(first);
    };
    made->use(first);
    made->set(own, 1);
    for (int64_t step = 0; step < 4; ++step) {
      if (!late) work_of_other(step);
      made->step(step);
      if (late) work_of_other(step);
      made->kernel("triple", {to(own)}, [](KernelCall& call) {
        for (uint32_t& word : call.buffers[0]) word *= 3;
      });
      made->copy_to_host(own);
      made->use(second);
      made->copy_to_host(other);
      made->use(first);
    }
    return made;
  };
  const auto early = program(false, 0), late = program(true, 0), altered = program(true, 5);
  const Verdict equal = diff_programs({early.get()}, {late.get()});
  INFO(dump(equal));
  CHECK(equal.outcome == Outcome::identical);
  CHECK(holds(equal.notes, "that the other run has not"));
  const Verdict differing = diff_programs({early.get()}, {altered.get()});
  INFO(dump(differing));
  CHECK(differing.outcome == Outcome::diverged);
  REQUIRE(differing.first);
  CHECK(differing.first->step >= 1);
  CHECK(differing.first->step <= 2);
}

// As a workspace of 32 MiB that a number among a kernel's parameters happens to point to.
TEST_CASE("a buffer that differed at the first sight of it is undecided, and the verdict says how it may have come about") {
  constexpr uint64_t kWorkspaceWords = (32u << 20) / 4;
  enum { untouched, fed_on };
  const auto program = [](uint64_t garbage, bool inputs, int how) {
    Machine machine;
    machine.garbage = garbage, machine.inputs = inputs;
    auto made = std::make_unique<LaunchProgram>(machine);
    const DeviceBuffer out = made->allocate(16), workspace = made->allocate(kWorkspaceWords);
    for (int64_t step = 0; step < 3; ++step) {
      made->step(step);
      made->kernel("elementwise", {to(out), to(workspace), word(static_cast<uint32_t>(step))}, [=](KernelCall& call) {
        for (uint32_t& word : call.buffers[0]) word = static_cast<uint32_t>(call.numbers[0]) + 1;
        if (how == fed_on) call.buffers[1][0] += 1;
      });
      made->copy_to_host(out);
    }
    return made;
  };
  for (const bool inputs : {false, true}) {
    for (const int how : {untouched, fed_on}) {
      const auto a = program(1, inputs, how), b = program(2, inputs, how);
      const Verdict v = diff_programs({a.get()}, {b.get()});
      INFO(dump(v));
      CHECK(v.outcome == Outcome::incomparable);
      CHECK(v.reason.find("undecided") != std::string::npos);
      CHECK((v.reason.find("differed already when a launch was first handed it, elementwise (launch") != std::string::npos) ==
            (how == untouched));
      CHECK((v.reason.find("last written by elementwise") != std::string::npos) == (how == fed_on));
      CHECK(holds(v.notes, "CUBLAS_WORKSPACE_CONFIG=:0:0") == (how == untouched));
    }
  }
}

TEST_CASE("two independent faults of one step are both named") {
  for (const bool records : {true, false}) {
    LaunchTraining base;
    base.records = records;
    const auto both = [](Launch& at) {
      const DeviceBuffer& last =
          at.parameters.back().kind == Parameter::pointer ? at.parameters.back().buffer : at.parameters[0].buffer;
      if (at.step == 1 && at.name == "reduce") at.body = then(at.body, flip(2, 0));
      if (at.step == 1 && at.name == "loss_grad") {
        at.body = then(at.body, flip(1));
        (void)last;
      }
      if (at.step == 1 && at.name == "wgrad2") at.program.copy_to_host(at.parameters[1].buffer);
    };
    const auto copies = [](Launch& at) {
      if (at.step == 1 && at.name == "wgrad2") at.program.copy_to_host(at.parameters[1].buffer);
    };
    const Verdict v = diff_trainings(faulty(base, copies), faulty(base, both));
    INFO(dump(v));
    CHECK(is_launch(v, "reduce", 1));
    REQUIRE(v.also_first.size() == 1);
    CHECK(v.also_first[0].kernel == "loss_grad");
  }
}

TEST_CASE("a difference absorbed for a while belongs to the launch that made it") {
  // histogram differs in step 1 and is kept; what is made of it rounds that away until step 3
  LaunchTraining base;
  base.records = false, base.steps = 5;
  const auto run = [&](bool fault) {
    auto kept = std::make_shared<DeviceBuffer>(), rounded = std::make_shared<DeviceBuffer>();
    return faulty(base, [=](Launch& at) {
      if (at.name != "loss_grad") return;
      if (at.step == 0) {
        *kept = at.program.allocate(64), *rounded = at.program.allocate(64);
        at.program.set(*kept, 0);
      }
      const int64_t step = at.step;
      at.program.kernel("accumulate", {at.parameters[0], to(*kept)}, then(accumulated(), [=](KernelCall& call) {
                          if (fault && step == 1) call.buffers[1][3] ^= 1;
                        }));
      at.program.kernel("cast", {to(*kept), to(*rounded)}, [=](KernelCall& call) {
        for (size_t i = 0; i < 64; ++i) call.buffers[1][i] = step < 3 ? 7 : call.buffers[0][i];
      });
      at.program.copy_to_host(*rounded);
    });
  };
  const Verdict v = diff_trainings(run(false), run(true));
  INFO(dump(v));
  CHECK(is_launch(v, "accumulate", 1));
}

TEST_CASE("what another kernel left in memory that nobody looks at is undecided, unless it is the same") {
  const auto run = [](const std::string& kernel, bool fault) {
    LaunchTraining options;
    options.before = at_launch("loss_grad", 1, [=](Launch& at) {
      const DeviceBuffer kept = at.program.allocate(16);
      at.program.kernel(kernel, {at.parameters[0], to(kept)}, fault ? then(combined(), flip(1)) : combined());
    });
    return options;
  };
  const Verdict differs = diff_trainings(run("histogram", false), run("histogram_wide", true));
  INFO(dump(differs));
  CHECK(differs.outcome == Outcome::incomparable);
  CHECK(differs.reason.find("undecided") != std::string::npos);
  const Verdict same = diff_trainings(run("histogram", false), run("histogram_wide", false));
  INFO(dump(same));
  CHECK(same.outcome == Outcome::identical);
}

TEST_CASE("a difference in memory is not forgotten over steps that were not recorded") {
  const auto run = [](const Machine& machine, uint32_t fault) {
    auto program = std::make_unique<LaunchProgram>(machine);
    const DeviceBuffer kept = program->allocate(16), x = program->allocate(16);
    program->set(kept, 0), program->set(x, 1);
    for (int64_t step = 0; step < 9; step += 4) {
      program->step(step).kernel("work", {to(x)}, [](KernelCall& call) { ++call.buffers[0][0]; });
      if (step == 0)
        program->kernel("keep", {to(x), to(kept)},
                        then(combined(), [fault](KernelCall& call) { call.buffers[1][2] += fault; }));
      program->copy_to_host(x);
    }
    return program;
  };
  const auto a = run({}, 0), b = run(another_machine({}), 1);
  const Verdict v = diff_programs({a.get()}, {b.get()});
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(v.reason.find("keep (launch") != std::string::npos);
}

TEST_CASE("a run that died within a step is not said to have launched less") {
  LaunchTraining base;
  const auto a = train(base), b = train(base);
  b->die();
  const Verdict v = diff_programs({a.get()}, {b.get()});
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK_FALSE(holds(v.notes, "that the other run has not"));
}

TEST_CASE("what left the device without a digest is not called identical") {
  const auto run = [](const Machine& machine, bool digested) {
    auto program = std::make_unique<LaunchProgram>(machine);
    const DeviceBuffer x = program->allocate(16);
    program->set(x, 1);
    for (int64_t step = 0; step < 3; ++step) {
      program->step(step).kernel("work", {to(x)}, [](KernelCall& call) { ++call.buffers[0][0]; });
      program->copy_to_host(x, 0, digested || step != 1);
    }
    return program;
  };
  for (const bool digested : {true, false}) {
    const auto a = run({}, digested), b = run(another_machine({}), digested);
    const Verdict v = diff_programs({a.get()}, {b.get()});
    INFO(dump(v));
    CHECK(v.outcome == (digested ? Outcome::identical : Outcome::incomparable));
    CHECK((v.reason.find("of 1 of 3 copies to the host in run A no digest was taken") != std::string::npos) == !digested);
  }
}

TEST_CASE("what only one run copies to the host is not called identical, nor are other programs that copy nothing") {
  const auto run = [](const Machine& machine, int64_t without, bool copies, bool extra) {
    auto program = std::make_unique<LaunchProgram>(machine);
    const DeviceBuffer x = program->allocate(16), y = program->allocate(16);
    program->set(x, 1), program->set(y, 2);
    for (int64_t step = 0; step < 3; ++step) {
      program->step(step).kernel("work", {to(x)}, [](KernelCall& call) { ++call.buffers[0][0]; });
      if (copies && step != without) program->copy_to_host(x);
      if (extra && step == 1) program->kernel("more", {to(y)}, [](KernelCall& call) { call.buffers[0][1] *= 5; });
    }
    program->release(x), program->release(y);
    return program;
  };
  const auto verdict = [&](int64_t without, bool copies, bool extra) {
    const auto a = run({}, -1, copies, false), b = run(another_machine({}), without, copies, extra);
    return diff_programs({a.get()}, {b.get()});
  };
  CHECK(verdict(-1, true, false).outcome == Outcome::identical);
  CHECK(verdict(-1, false, false).outcome == Outcome::identical);
  for (const int64_t without : {0, 1, 2}) {
    const Verdict v = verdict(without, true, false);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::incomparable);
    CHECK(v.reason.find("makes 1 copy to the host in step") != std::string::npos);
  }
  CHECK(verdict(-1, false, true).outcome == Outcome::incomparable);
}
