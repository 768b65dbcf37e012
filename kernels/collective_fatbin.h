// The kernels of the deterministic collectives as a fat binary inside the program, as kernels/digest_fatbin.h has the
// digests'.
#pragma once

#include <cstddef>

extern "C" {
extern __attribute__((visibility("hidden"))) const unsigned char forkpoint_collective_fatbin_data[];
extern __attribute__((visibility("hidden"))) const size_t forkpoint_collective_fatbin_size;
}
