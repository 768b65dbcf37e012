// The functions of CUPTI that the probe uses, found at run time and never linked: cupti.h gives types only.
#pragma once

#include <cupti.h>

#include "probes/guard.h"

namespace forkpoint {

struct Cupti {
  decltype(&::cuptiSubscribe) subscribe = nullptr;
  decltype(&::cuptiUnsubscribe) unsubscribe = nullptr;
  decltype(&::cuptiEnableCallback) enable_callback = nullptr;
  decltype(&::cuptiGetResultString) result_string = nullptr;
  decltype(&::cuptiGetVersion) version = nullptr;
};

// Looks at path (nullptr: none given), at what the process has loaded, on the loader's path, beside the CUDA runtime that is
// loaded, and in the toolkit's folders; loads it. driver_version: as cuDriverGetVersion; a CUPTI of a later major version
// cannot work with it and is passed over. nullptr: not found; *problem (static text) says what to do. Not on a hot path.
const Cupti* find_cupti(const Token& token, const char* path, int driver_version, const char** problem);

}  // namespace forkpoint
