#include "probes/cupti_hooks.h"

#include <atomic>
#include <optional>

#include "probes/cuda_context.h"
#include "probes/cuda_driver.h"
#include "probes/cupti.h"
#include "probes/cupti_calls.h"
#include "probes/os.h"
#include "probes/launch_recorder.h"
#include "probes/step_marks.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

constexpr uint32_t kMostCalls = 4096;

struct Entry {
  CallHandler handler = nullptr;
  bool per_thread = false;
  bool works = false;  // it has the device do something
  bool exit_only = false;  // at the entry there is nothing to do but for --inputs, --retry and --step-on
};
constinit Entry entries[kMostCalls] = {};
constinit std::atomic<bool> watching{false};
constinit std::atomic<bool> stop_marked{false};
enum class Start : uint8_t { possible, under_way, failed, unusable };
constinit std::atomic<Start> start_state{Start::possible};
constinit std::atomic<Watching> failure{Watching::absent};  // when it failed
constinit std::atomic<bool> cuda_initialised_here{false};
constinit const Cupti* cupti = nullptr;
constinit CUpti_SubscriberHandle subscriber = nullptr;
thread_local bool in_callback __attribute__((tls_model("initial-exec"))) = false;
thread_local bool launched __attribute__((tls_model("initial-exec"))) = false;

// CUPTI calls us on the thread of the call, before and after it.
void CUPTIAPI on_call(void*, CUpti_CallbackDomain domain, CUpti_CallbackId number, const void* data) {
  if (domain != CUPTI_CB_DOMAIN_DRIVER_API || number >= kMostCalls || !entries[number].handler) return;
  if (Guard::inside()) return;  // a call of our own
  const bool at_entry = static_cast<const CUpti_CallbackData*>(data)->callbackSite == CUPTI_API_ENTER;
  const bool only_marks = at_entry && entries[number].exit_only && !launch_recorder.needs_before();
  if (only_marks && !has_step_mark()) return;
  const Guard guard;
  in_callback = true;
  launched = launched || entries[number].works;
  const auto& info = *static_cast<const CUpti_CallbackData*>(data);
  DriverCall call;
  call.params = info.functionParams;
  call.context = info.context;
  call.per_thread = entries[number].per_thread;
  call.entry = info.callbackSite == CUPTI_API_ENTER;
  if (!call.entry && info.functionReturnValue) call.result = *static_cast<const CUresult*>(info.functionReturnValue);
  call.name = info.functionName ? info.functionName : "";
  call.correlation = info.correlationId;
  try {
    // Whatever we ask the driver must not break a capture, of this thread or of another.
    const CudaDriver* driver = find_cuda_driver(guard.token());
    if (driver) {
      if (!call.entry && is_fatal(call.result)) CudaContext::failed(call.context);
      std::optional<RelaxedCapture> relaxed;
      if (!only_marks) relaxed.emplace(*driver);  // else nothing is asked but of a kernel that is new
      entries[number].handler(guard.token(), call);
    }
  } catch (const std::exception& error) {
    recorder.refuse_broken(error.what());
  }
  in_callback = false;
}

void fill_table(const CallTable& table, bool works) {
  for (size_t i = 0; i < table.count; ++i) {
    entries[table.entries[i].number] = {table.entries[i].handler, table.entries[i].per_thread, works};
  }
}
void fill_tables() {
  fill_table(kernel_calls(), true);
  fill_table(transfer_calls(), true);
  for (const CallTable& table : {memory_calls(), order_calls(), graph_calls()}) fill_table(table, false);
  for (const uint32_t launch : {FORKPOINT_CBID(cuLaunchKernel), FORKPOINT_CBID(cuLaunchKernel_ptsz),
                                FORKPOINT_CBID(cuLaunchKernelEx), FORKPOINT_CBID(cuLaunchKernelEx_ptsz)}) {
    entries[launch].exit_only = true;
  }
  for (const uint32_t graph : {FORKPOINT_CBID(cuGraphLaunch), FORKPOINT_CBID(cuGraphLaunch_ptsz)}) entries[graph].works = true;
}

Watching say_refusal(CUptiResult result) {
  const char* text = nullptr;
  cupti->result_string(result, &text);
  const bool taken = result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
  say("kernel launches are not recorded, the job goes on: %s (%s)",
      taken ? "another profiler or tool of this process holds CUPTI; run without it" : "CUPTI refused",
      text ? text : "no text");
  return taken ? Watching::taken : Watching::refused;
}

Watching subscribe() {
  if (subscriber) cupti->unsubscribe(subscriber);  // the parent's, in the child of a fork
  subscriber = nullptr;
  CUptiResult result = cupti->subscribe(&subscriber, reinterpret_cast<CUpti_CallbackFunc>(on_call), nullptr);
  if (result != CUPTI_SUCCESS) return say_refusal(result);
  fill_tables();
  for (uint32_t number = 0; number < kMostCalls; ++number) {
    if (!entries[number].handler) continue;
    // A number that an older CUPTI does not know is of a call that its driver does not have.
    result = cupti->enable_callback(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, number);
    if (result == CUPTI_SUCCESS || result == CUPTI_ERROR_INVALID_PARAMETER) continue;
    cupti->unsubscribe(subscriber);
    subscriber = nullptr;
    return say_refusal(result);
  }
  watching.store(true, std::memory_order_release);
  return Watching::on;
}

// To a start that finds another one made or under way.
Watching answer_to(Start known) {
  if (known == Start::failed) return failure.load();
  return known == Start::under_way ? Watching::under_way : Watching::unusable;
}

}  // namespace

Watching start_watching(const Token& token, const Settings& settings) {
  stop_marked.store(false);  // a step that is wanted again, before it could be given back
  if (is_watching()) return Watching::on;
  Start known = Start::possible;
  if (!start_state.compare_exchange_strong(known, Start::under_way)) return answer_to(known);
  if (is_watching()) return start_state.store(Start::possible), Watching::on;  // since we looked
  const CudaDriver* driver = find_cuda_driver(token);
  int version = 0;
  if (driver) driver->cuDriverGetVersion_(&version);
  const char* problem = nullptr;
  cupti = find_cupti(token, settings.cupti, version, &problem);
  Watching outcome = Watching::absent;
  if (cupti) outcome = subscribe();
  else say("kernel launches are not recorded, the job goes on: %s", problem);
  // Not tried again: it would fail and speak at each step.
  if (outcome != Watching::on) failure.store(outcome);
  start_state.store(outcome == Watching::on ? Start::possible : Start::failed);
  return outcome;
}

void stop_watching(const Token&) {
  if (in_callback) return stop_marked.store(watching.load());
  stop_marked.store(false);
  if (!watching.exchange(false)) return;
  cupti->unsubscribe(subscriber);
  subscriber = nullptr;
}

void end_marked_watching(const Token& token) {
  if (stop_marked.load(std::memory_order_relaxed)) stop_watching(token);
}

bool is_watching() { return watching.load(std::memory_order_acquire) && !stop_marked.load(std::memory_order_relaxed); }

bool thread_has_launched() { return launched; }

void note_cuda_initialised() {
  cuda_initialised_here.store(true);
  Start unusable = Start::unusable;
  start_state.compare_exchange_strong(unusable, Start::possible);
}

void forget_watching_in_child() {
  // CUDA cannot be used in the child of a process that uses it. In one whose parent only forks its ranks it can, and what
  // failed in the parent may do there.
  const bool used = watching.load() || start_state.load() == Start::under_way || start_state.load() == Start::unusable ||
                    cuda_initialised_here.load();
  start_state.store(used ? Start::unusable : Start::possible);
  watching.store(false);
  stop_marked.store(false);
  in_callback = false;
  launched = false;
}

}  // namespace forkpoint
