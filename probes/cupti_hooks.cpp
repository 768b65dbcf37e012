#include "probes/cupti_hooks.h"

#include <atomic>

#include "probes/cuda_driver.h"
#include "probes/cupti.h"
#include "probes/cupti_calls.h"
#include "probes/os.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

constexpr uint32_t kMostCalls = 4096;

struct Entry {
  CallHandler handler = nullptr;
  bool per_thread = false;
};
constinit Entry entries[kMostCalls] = {};
constinit std::atomic<bool> watching{false};
constinit std::atomic<bool> starting{false};
constinit const Cupti* cupti = nullptr;
constinit CUpti_SubscriberHandle subscriber = nullptr;
thread_local bool in_callback __attribute__((tls_model("initial-exec"))) = false;

// CUPTI calls us on the thread of the call, before and after it.
void CUPTIAPI on_call(void*, CUpti_CallbackDomain domain, CUpti_CallbackId number, const void* data) {
  if (domain != CUPTI_CB_DOMAIN_DRIVER_API || number >= kMostCalls || !entries[number].handler) return;
  if (Guard::inside()) return;  // a call of our own
  const Guard guard;
  in_callback = true;
  const auto& info = *static_cast<const CUpti_CallbackData*>(data);
  DriverCall call;
  call.params = info.functionParams;
  call.context = info.context;
  call.per_thread = entries[number].per_thread;
  call.entry = info.callbackSite == CUPTI_API_ENTER;
  if (!call.entry && info.functionReturnValue) call.result = *static_cast<const CUresult*>(info.functionReturnValue);
  call.name = info.functionName ? info.functionName : "";
  try {
    // Whatever we ask the driver must not break a capture, of this thread or of another.
    const CudaDriver* driver = find_cuda_driver(guard.token());
    if (driver) {
      const RelaxedCapture relaxed(*driver);
      entries[number].handler(guard.token(), call);
    }
  } catch (const std::exception& error) {
    recorder.refuse_broken(error.what());
  }
  in_callback = false;
}

void fill_table() {
  for (const CallTable& table : {kernel_calls(), memory_calls(), transfer_calls(), order_calls(), graph_calls()}) {
    for (size_t i = 0; i < table.count; ++i) {
      entries[table.entries[i].number] = {table.entries[i].handler, table.entries[i].per_thread};
    }
  }
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
  CUptiResult result = cupti->subscribe(&subscriber, reinterpret_cast<CUpti_CallbackFunc>(on_call), nullptr);
  if (result != CUPTI_SUCCESS) return say_refusal(result);
  fill_table();
  for (uint32_t number = 0; number < kMostCalls; ++number) {
    if (!entries[number].handler) continue;
    // A number that an older CUPTI does not know is of a call that its driver does not have.
    result = cupti->enable_callback(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, number);
    if (result == CUPTI_SUCCESS || result == CUPTI_ERROR_INVALID_PARAMETER) continue;
    cupti->unsubscribe(subscriber);
    return say_refusal(result);
  }
  watching.store(true, std::memory_order_release);
  return Watching::on;
}

}  // namespace

Watching start_watching(const Token& token, const Settings& settings) {
  if (is_watching() || starting.exchange(true)) return Watching::on;
  const CudaDriver* driver = find_cuda_driver(token);
  int version = 0;
  if (driver) driver->cuDriverGetVersion_(&version);
  const char* problem = nullptr;
  cupti = find_cupti(token, settings.cupti, version, &problem);
  Watching outcome = Watching::absent;
  if (cupti) outcome = subscribe();
  else say("kernel launches are not recorded, the job goes on: %s", problem);
  // Not tried again: it would fail and speak at each step.
  if (outcome == Watching::on) starting.store(false);
  return outcome;
}

void stop_watching(const Token&) {
  if (in_callback || !watching.exchange(false)) return;
  cupti->unsubscribe(subscriber);
}

bool is_watching() { return watching.load(std::memory_order_acquire); }

void forget_watching_in_child() {
  watching.store(false);
  starting.store(true);  // CUDA cannot be used in the child of a process that uses it
  in_callback = false;
}

}  // namespace forkpoint
