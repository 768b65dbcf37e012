// Tells the fake CUPTI of each call, as the real driver does with the real one.
#pragma once

#include <cuda.h>
#include <cupti.h>

#include <cstdint>

#include "tests/fakes/fake_cuda.h"

namespace forkpoint::fake {

class Traced {
 public:
  Traced(uint32_t cbid, const char* name, const void* params, const char* symbol = nullptr);
  CUresult end(CUresult result);

 private:
  FakeCudaCall call_ = {};
};

}  // namespace forkpoint::fake

#define FAKE extern "C" __attribute__((visibility("default"))) CUresult

// In a function of that name (with its suffix of the version): the begin of the call; `return traced.end(...)` ends it.
#define FAKE_TRACE(function, ...)                     \
  const function##_params traced_params{__VA_ARGS__}; \
  forkpoint::fake::Traced traced(CUPTI_DRIVER_TRACE_CBID_##function, #function, &traced_params)

// A call and its twin for which a null stream is the thread's own. The parts of the body know them apart by
// `per_thread`.
#define FAKE_TWINS(function, suffix, body, parameters, ...) \
  FAKE function parameters {                                \
    [[maybe_unused]] constexpr bool per_thread = false;     \
    FAKE_TRACE(function, __VA_ARGS__);                      \
    return traced.end(body);                                \
  }                                                         \
  FAKE function##suffix parameters {                        \
    [[maybe_unused]] constexpr bool per_thread = true;      \
    FAKE_TRACE(function##suffix, __VA_ARGS__);              \
    return traced.end(body);                                \
  }
