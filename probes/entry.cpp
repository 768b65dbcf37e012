#include "probes/entry.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <exception>

#include "lib/probe_contract.h"
#include "probes/guard.h"
#include "probes/launch_level.h"
#include "probes/nccl_swap.h"
#include "probes/os.h"
#include "probes/recorder.h"
#include "probes/step_marks.h"
#include "probes/torch_bridge.h"

#define FORKPOINT_PROBE_ITSELF 1
#include "probes/forkpoint.h"

namespace forkpoint {
namespace {

constinit Settings settings;
constinit std::atomic<uint32_t> environment_read{0};  // 1: being read, 2: read
constinit std::atomic<bool> problem_said{false};

void say_problem() {
  // Here, and not when the library is loaded: a shell under the same preload must stay silent.
  if (!problem_said.exchange(true)) say("%s %d", settings.problem, getpid());
  recorder.deactivate();
}

// Every call of the host comes through here.
template <typename Body>
void enter(Body body) {
  if (settings.state == Settings::State::malformed) return say_problem();
  const Guard guard;
  if (!guard.entered()) return recorder.refuse_reentrant();
  try {
    launch_level_outside_callbacks(guard.token());
    body(guard.token());
  } catch (const std::exception& error) {
    recorder.refuse_broken(error.what());
  }
}

void api_rank(int32_t rank, int32_t world_size) {
  enter([=](const Token& token) { recorder.set_rank(token, rank, world_size); });
}
void api_step_begin(int64_t step) {
  enter([=](const Token& token) {
    if (may_begin_own_step()) recorder.begin_step(token, step);
  });
}
void api_step_end() {
  enter([](const Token& token) { recorder.end_step(token); });
}
void api_micro_step(int32_t index) {
  enter([=](const Token& token) { recorder.set_micro_step(token, index); });
}
void api_scope_begin(int32_t phase, const char* layer, const char* op) {
  enter([=](const Token& token) { recorder.begin_scope(token, phase, layer, op); });
}
void api_collective_begin(const char* op, const char* communicator, const int32_t* members, int32_t member_count,
                          const char* layer) {
  enter([=](const Token& token) { recorder.begin_collective(token, op, communicator, members, member_count, layer); });
}
void api_scope_end() {
  enter([](const Token& token) { recorder.end_scope(token); });
}
void api_tensor(const forkpoint_tensor_desc* desc) {
  enter([=](const Token& token) { recorder.tensor(token, desc); });
}
void api_scalar(const char* name, int32_t role, double value) {
  enter([=](const Token& token) { recorder.scalar(token, name, role, value); });
}
void api_state(const char* name, int32_t role, const void* data, size_t size_bytes) {
  enter([=](const Token& token) { recorder.state(token, name, role, data, size_bytes); });
}
void api_fact(const char* name, const char* value) {
  enter([=](const Token& token) { recorder.fact(token, name, value); });
}

constinit forkpoint_api table = {FORKPOINT_API_VERSION, 0,          0,           api_rank,        api_step_begin,
                                 api_step_end,          api_micro_step, api_scope_begin, api_collective_begin,
                                 api_scope_end,         api_tensor, api_scalar,  api_state,       api_fact};

}  // namespace

void ensure_environment_read() {
  uint32_t unread = 0;
  if (!environment_read.compare_exchange_strong(unread, 1)) {
    while (environment_read.load(std::memory_order_acquire) != 2) futex_wait(environment_read, 1, 1'000'000);
    return;
  }
  read_settings([](const char* name) -> const char* { return getenv(name); }, &settings);
  if (settings.state != Settings::State::malformed) {
    const long bytes = syscall(SYS_sched_getaffinity, 0, sizeof(settings.cpus), settings.cpus);
    settings.cpus_bytes = bytes > 0 ? static_cast<size_t>(bytes) : 0;
  }
  recorder.set_up(&settings, &table);
  set_nccl_swap(settings);
  const bool unwanted_rank = settings.rank >= 0 && !settings.wants_rank(settings.rank);
  const bool active = settings.state == Settings::State::malformed ||
                      (settings.state == Settings::State::ready && !unwanted_rank);
  table.level = static_cast<int32_t>(settings.level);
  __atomic_store_n(&table.active, active ? 1 : 0, __ATOMIC_RELEASE);
  environment_read.store(2, std::memory_order_release);
}

void offer_to_libraries(const char* own_path) {
  if (settings.state == Settings::State::ready) offer_injection(settings, own_path);
  if (settings.state != Settings::State::malformed) install_torch_bridge(settings);
}

void enter_cuda_injection() {
  enter([](const Token& token) { cuda_initialised(token, settings); });
}

}  // namespace forkpoint

// libcuda calls this at the end of cuInit, when CUDA_INJECTION64_PATH names this library.
extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
  forkpoint::ensure_environment_read();
  forkpoint::enter_cuda_injection();
  return 1;
}

// Which version of lib/probe_contract.h this library keeps to, for `forkpoint doctor`.
extern "C" __attribute__((visibility("default"))) int forkpoint_probe_abi() { return forkpoint::contract::kProbeAbi; }

extern "C" __attribute__((visibility("default"))) const forkpoint_api* forkpoint_get_api(uint32_t version) {
  if (version == 0) return nullptr;
  forkpoint::ensure_environment_read();
  return &forkpoint::table;
}
