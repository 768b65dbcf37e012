// The probe's kernels, done on host memory.
#pragma once

#include "tests/fakes/fake_cuda_objects.h"

namespace forkpoint::fake {

// In the order of kDigestKernelNames; nullptr: no such kernel.
const KernelDefinition* digest_kernel(const char* name);
const KernelDefinition* collective_kernel(const char* name);  // fake_cuda_collective.cpp

}  // namespace forkpoint::fake
