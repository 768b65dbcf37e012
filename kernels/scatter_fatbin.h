// The deterministic scatter kernels as a fat binary inside the program, as kernels/digest_fatbin.h has the digest's.
#pragma once

#include <cstddef>

extern "C" {
extern __attribute__((visibility("hidden"))) const unsigned char forkpoint_scatter_fatbin_data[];
}
