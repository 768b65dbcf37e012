// The digest kernels as a fat binary inside the program, for cuModuleLoadData: machine code for the architectures of the
// build (CMAKE_CUDA_ARCHITECTURES) and PTX for later ones.
#pragma once

#include <cstddef>

extern "C" {
extern __attribute__((visibility("hidden"))) const unsigned char forkpoint_digest_fatbin_data[];
extern __attribute__((visibility("hidden"))) const size_t forkpoint_digest_fatbin_size;
}
