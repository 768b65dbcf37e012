// NVTX ranges of the host as scopes: nested ranges are a layer path ("forward.blocks.0.attn"), below the layer that
// forkpoint.h gives. Ranges that start and end anywhere (nvtxRangeStart) and marks only count as step marks
// (step_marks.h).
//
// NVTX (version 3, header-only, in each library that uses it) loads the library that NVTX_INJECTION64_PATH names and
// calls its InitializeInjectionNvtx2, at the first use in each library.
#pragma once

namespace forkpoint {

// When the probe is loaded and not dormant: has NVTX find us, unless it was told to load another tool (then a coverage
// limit). own_path: of this library.
void offer_nvtx_injection(const char* own_path);

}  // namespace forkpoint
