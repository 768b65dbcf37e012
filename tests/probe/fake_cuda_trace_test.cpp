// The fake CUPTI, and the injection that the fake libcuda does for it.
#include <cupti.h>
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <cstdlib>
#include <string>

#include "tests/fakes/fake_cupti.h"
#include "tests/probe/fake_gpu_program.h"
#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::fake_gpu;
using forkpoint::probe_test::client_path;

namespace {

struct Seen {
  bool at_end;
  CUpti_CallbackId id;
  std::string name;
  std::string symbol;
  CUresult result;
  uint64_t stored;  // what the begin left for the end
  CUstream stream;
};

struct Cupti {
  void* library = dlopen(client_path("libcupti.so.13").c_str(), RTLD_NOW);
  template <typename Function>
  Function* find(const char* name) {
    void* found = dlsym(library, name);
    REQUIRE(found != nullptr);
    return reinterpret_cast<Function*>(found);
  }
  CUptiResult subscribe(std::vector<Seen>* seen) {
    return find<decltype(cuptiSubscribe)>("cuptiSubscribe")(&subscriber, tell, seen);
  }
  void enable(CUpti_CallbackId id, bool on) {
    CHECK(find<decltype(cuptiEnableCallback)>("cuptiEnableCallback")(on, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, id) ==
          CUPTI_SUCCESS);
  }
  CUptiResult unsubscribe() { return find<decltype(cuptiUnsubscribe)>("cuptiUnsubscribe")(subscriber); }

  static void CUPTIAPI tell(void* user, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* given) {
    CHECK(domain == CUPTI_CB_DOMAIN_DRIVER_API);
    const auto& data = *static_cast<const CUpti_CallbackData*>(given);
    const bool at_end = data.callbackSite == CUPTI_API_EXIT;
    if (!at_end) *data.correlationData = data.correlationId + 1000;
    const bool is_launch = id == CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel;
    static_cast<std::vector<Seen>*>(user)->push_back(
        {at_end, id, data.functionName, data.symbolName ? data.symbolName : "",
         at_end ? *static_cast<CUresult*>(data.functionReturnValue) : CUDA_SUCCESS, *data.correlationData,
         is_launch ? static_cast<const cuLaunchKernel_params*>(data.functionParams)->hStream : nullptr});
  }
  CUpti_SubscriberHandle subscriber = nullptr;
};

}  // namespace

TEST_CASE(
    "CUPTI calls back at the begin and the end of the calls that are enabled, with their parameters and results") {
  Gpu gpu(client_path("libcuda.so.1"));
  const auto kernel = gpu.kernel(
      "store_one", +[](int* to) { *to = 1; });
  int* memory = gpu.make<int>({0});
  Cupti cupti;
  std::vector<Seen> seen;
  REQUIRE(cupti.subscribe(&seen) == CUPTI_SUCCESS);
  const CUstream stream = gpu.stream();
  CHECK(seen.empty());
  cupti.enable(CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel, true);
  cupti.enable(CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2, true);
  gpu.launch(kernel, stream, memory);
  REQUIRE(seen.size() == 2);
  CHECK_FALSE(seen[0].at_end);
  CHECK(seen[1].at_end);
  for (const Seen& one : seen) {
    CHECK(one.id == CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel);
    CHECK(one.name == "cuLaunchKernel");
    CHECK(one.symbol == "store_one");
    CHECK(one.stream == stream);
    CHECK(one.result == CUDA_SUCCESS);
    CHECK(one.stored > 1000);
  }
  CHECK(seen[0].stored == seen[1].stored);
  CHECK(gpu.driver().cuMemFree_(12345) == CUDA_ERROR_INVALID_VALUE);
  REQUIRE(seen.size() == 4);
  CHECK(seen[3].result == CUDA_ERROR_INVALID_VALUE);
  CHECK(cupti.subscribe(&seen) == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED);
  CHECK(cupti.unsubscribe() == CUPTI_SUCCESS);
  gpu.launch(kernel, stream, memory);
  CHECK(seen.size() == 4);
}

TEST_CASE("CUPTI may be taken by another tool") {
  Gpu gpu(client_path("libcuda.so.1"));
  Cupti cupti;
  std::vector<Seen> seen;
  cupti.find<decltype(fake_cupti_set_taken)>("fake_cupti_set_taken")(1);
  CHECK(cupti.subscribe(&seen) == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED);
  cupti.find<decltype(fake_cupti_set_taken)>("fake_cupti_set_taken")(0);
  REQUIRE(cupti.subscribe(&seen) == CUPTI_SUCCESS);
  CHECK(cupti.unsubscribe() == CUPTI_SUCCESS);
}

TEST_CASE("the first cuInit calls the library that CUDA_INJECTION64_PATH names, once") {
  const std::string library = client_path("libfake_injection.so");
  const auto outcome =
      probe_test::run_program({client_path("fake_injection_client"), client_path("libcuda.so.1"), library},
                              {{"CUDA_INJECTION64_PATH", library}});
  CHECK(outcome.status == 0);
  CHECK(outcome.out == "1\n");
}
