// A libcupti.so.13 for the fake libcuda: one subscriber, callbacks of the driver API.
#include <cupti.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "tests/fakes/fake_cuda.h"
#include "tests/fakes/fake_cupti.h"

#define FAKE __attribute__((visibility("default")))

struct CUpti_Subscriber_st {
  CUpti_CallbackFunc callback;
  void* user;
};

namespace {

constexpr uint32_t kMostCalls = CUPTI_DRIVER_TRACE_CBID_SIZE;

std::atomic<bool> taken{false};
std::atomic<CUpti_SubscriberHandle> subscriber{nullptr};
std::atomic<bool> enabled[kMostCalls] = {};
std::atomic<uint64_t> callbacks{0};

// As the real one: each side by itself, so that a call during which it is switched has only an end, or only a begin.
void trace(FakeCudaCall* call, int at_end) {
  const CUpti_SubscriberHandle to = subscriber.load();
  if (!to || call->cbid >= kMostCalls || !enabled[call->cbid]) return;
  CUpti_CallbackData data = {};
  data.callbackSite = at_end ? CUPTI_API_EXIT : CUPTI_API_ENTER;
  data.functionName = call->name;
  data.functionParams = call->params;
  data.functionReturnValue = call->result;
  data.symbolName = call->symbol;
  data.context = static_cast<CUcontext>(call->context);
  data.contextUid = call->context_uid;
  data.correlationData = &call->correlation_data;
  data.correlationId = call->correlation_id;
  ++callbacks;
  to->callback(to->user, CUPTI_CB_DOMAIN_DRIVER_API, call->cbid, &data);
}

bool join_driver() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!driver) return false;
  auto* set = reinterpret_cast<decltype(&fake_cuda_set_tracer)>(dlsym(driver, "fake_cuda_set_tracer"));
  if (set) set(trace);
  return set != nullptr;
}

bool is_taken() {
  const char* variable = getenv("FAKE_CUPTI_TAKEN");
  return taken || (variable && *variable == '1');
}

CUptiResult subscribe(CUpti_SubscriberHandle* handle, CUpti_CallbackFunc callback, void* user) {
  if (!handle) return CUPTI_ERROR_INVALID_PARAMETER;
  if (is_taken()) return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
  if (!join_driver()) return CUPTI_ERROR_NOT_INITIALIZED;
  auto* made = new CUpti_Subscriber_st{callback, user};  // never freed: another thread may be calling it
  CUpti_SubscriberHandle none = nullptr;
  if (!subscriber.compare_exchange_strong(none, made)) return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
  *handle = made;
  return CUPTI_SUCCESS;
}

}  // namespace

extern "C" {

FAKE void fake_cupti_set_taken(int now) { taken = now != 0; }
FAKE int fake_cupti_subscribed() { return subscriber.load() != nullptr; }
FAKE uint64_t fake_cupti_callbacks() { return callbacks; }

FAKE CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* handle, CUpti_CallbackFunc callback, void* user) {
  return subscribe(handle, callback, user);
}
FAKE CUptiResult cuptiSubscribe_v2(CUpti_SubscriberHandle* handle, CUpti_CallbackFunc callback, void* user,
                                   CUpti_SubscriberParams* params) {
  if (params && params->structSize == 0) return CUPTI_ERROR_INVALID_PARAMETER;
  const CUptiResult result = subscribe(handle, callback, user);
  if (result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED && params && params->oldSubscriberName &&
      params->oldSubscriberSize > 0) {
    params->oldSubscriberName[0] = 0;
    strncat(params->oldSubscriberName, "CUPTI for another tool", params->oldSubscriberSize - 1);
  }
  return result;
}
FAKE CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle handle) {
  if (!handle || !subscriber.compare_exchange_strong(handle, nullptr)) return CUPTI_ERROR_INVALID_PARAMETER;
  for (auto& one : enabled) one = false;
  return CUPTI_SUCCESS;
}
FAKE CUptiResult cuptiEnableCallback(uint32_t enable, CUpti_SubscriberHandle handle, CUpti_CallbackDomain domain,
                                     CUpti_CallbackId id) {
  if (!handle || handle != subscriber.load()) return CUPTI_ERROR_INVALID_PARAMETER;
  if (domain != CUPTI_CB_DOMAIN_DRIVER_API) return CUPTI_SUCCESS;
  if (id >= kMostCalls) return CUPTI_ERROR_INVALID_PARAMETER;
  enabled[id] = enable != 0;
  return CUPTI_SUCCESS;
}
FAKE CUptiResult cuptiEnableDomain(uint32_t enable, CUpti_SubscriberHandle handle, CUpti_CallbackDomain domain) {
  if (!handle || handle != subscriber.load()) return CUPTI_ERROR_INVALID_PARAMETER;
  if (domain != CUPTI_CB_DOMAIN_DRIVER_API) return CUPTI_SUCCESS;
  for (auto& one : enabled) one = enable != 0;
  return CUPTI_SUCCESS;
}
FAKE CUptiResult cuptiGetResultString(CUptiResult result, const char** text) {
  *text = result == CUPTI_SUCCESS                                    ? "CUPTI_SUCCESS"
          : result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED ? "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"
                                                                     : "CUPTI_ERROR_UNKNOWN";
  return CUPTI_SUCCESS;
}
FAKE CUptiResult cuptiGetVersion(uint32_t* version) { return *version = CUPTI_API_VERSION, CUPTI_SUCCESS; }

}  // extern "C"
