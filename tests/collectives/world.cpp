#include "tests/collectives/world.h"

namespace forkpoint::collective {
namespace {

template <bool kTree, bool kWide>
RunWorker worker_with(DType dtype) {
  switch (dtype) {
#define FORKPOINT_WORKER(type) \
  case DType::type:            \
    return &run_worker<Arithmetic<DType::type, kWide>, kTree>;
    FORKPOINT_WORKER(i8)
    FORKPOINT_WORKER(f32)
    FORKPOINT_WORKER(bf16)
#ifndef FORKPOINT_FEW_TYPES
    FORKPOINT_WORKER(u8)
    FORKPOINT_WORKER(i32)
    FORKPOINT_WORKER(u32)
    FORKPOINT_WORKER(i64)
    FORKPOINT_WORKER(u64)
    FORKPOINT_WORKER(f64)
    FORKPOINT_WORKER(f16)
    FORKPOINT_WORKER(f8e4m3)
    FORKPOINT_WORKER(f8e5m2)
#endif
#undef FORKPOINT_WORKER
    default:
      return nullptr;
  }
}

}  // namespace

RunWorker worker_of(const CollectiveSpec& spec) {
  if (spec.tree) return spec.wide ? worker_with<true, true>(spec.dtype) : worker_with<true, false>(spec.dtype);
  return spec.wide ? worker_with<false, true>(spec.dtype) : worker_with<false, false>(spec.dtype);
}

RunWorker worker_of_kernel(const std::string& name) {
  for (int type = 0; type < kDTypeCount; ++type) {
    for (const bool wide : {false, true}) {
      for (const bool tree : {false, true}) {
        CollectiveSpec spec;
        spec.dtype = static_cast<DType>(type), spec.wide = wide, spec.tree = tree;
        void* none = nullptr;
        CollectiveLaunch launch;
        CollectivePlace alone;
        alone.shape.ranks = 1, alone.staging = &none;
        if (plan_collective(spec, alone, &launch) && name == kCollectiveKernelNames[launch.kernel])
          return worker_of(spec);
      }
    }
  }
  return nullptr;
}

World::World(StagingShape shape, uint32_t workers, bool pauses) : shape_(shape), workers_(workers), pauses_(pauses) {
  for (uint32_t rank = 0; rank < shape.ranks; ++rank) memory_.emplace_back(shape.total_bytes() + 128, '\0');
  for (auto& memory : memory_) {
    staging_.push_back(memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128) % 128);
  }
}

void World::run(const Calls& calls, const Tunings& tunings, int absent) {
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    if (static_cast<int>(rank) != absent) ranks.emplace_back([&, rank] { run_rank(calls, tunings, rank); });
  }
  if (absent >= 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::atomic_ref(abort_).store(1);
  }
  for (std::thread& rank : ranks) rank.join();
}

void World::run_rank(const Calls& calls, const Tunings& tunings, uint32_t rank) {
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto& [spec, buffers] = calls[i];
    CollectivePlace place{shape_, rank, staging_.data(), &abort_, buffers[rank].in, buffers[rank].out};
    CollectiveLaunch launch;
    if (!plan_collective(spec, place, &launch, tunings[i % tunings.size()])) std::abort();
    if (launch.grid == 0) continue;
    ++(launch.params.protocol == Protocol::low_latency ? low_latency_calls_ : pipelined_calls_);
    run_on_threads(launch.params, worker_of(spec), workers_, pauses_);
  }
}

void run_on_threads(const CollectiveParams& params, RunWorker run, uint32_t workers, bool pauses) {
  static std::atomic<uint64_t> seed{1};
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  std::vector<std::thread> threads;
  for (uint32_t block = 0; block < params.blocks; ++block) {
    barriers.push_back(std::make_unique<std::barrier<>>(workers));
  }
  for (uint32_t block = 0; block < params.blocks; ++block) {
    for (uint32_t worker = 0; worker < workers; ++worker) {
      threads.emplace_back([&, block, worker] {
        const Share share{worker, workers};
        HostMachine machine(params.abort, *barriers[block], share, ++seed, pauses);
        run(machine, params, block, share);
      });
    }
    if (pauses && seed % 7 == 0) std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace forkpoint::collective
