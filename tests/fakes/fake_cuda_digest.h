// The probe's digest kernels, done on host memory.
#pragma once

#include "tests/fakes/fake_cuda_objects.h"

namespace forkpoint::fake {

// In the order of kDigestKernelNames; nullptr: no such kernel.
const KernelDefinition* digest_kernel(const char* name);

}  // namespace forkpoint::fake
