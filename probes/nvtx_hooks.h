// NVTX ranges of the host as scopes: nested ranges are a layer path ("forward.blocks.0.attn"), below the layer that
// forkpoint.h gives. Ranges that start and end anywhere (nvtxRangeStart) and marks only count as step marks
// (step_marks.h).
//
// A number that counts on and on makes no layers without end. When more different numbers than a model has layers were seen
// at the end of one name, further ones are the layer of that name with "#" for the number: "iter 65" is "iter #" then, for
// all of the run. A number is digits, or several with "/" between ("12/100"), behind which only ")", "]" or "}" may stand.
// More than 64 different ones where the number stands apart ("iter 7", "step=7", "batch #7", "i:7", "step (7)"), and more
// than 1,024 where it is part of a word or of a path, as layers' are ("layer7", "blocks.7", "layers[7]"). Numbers that are
// not at the end ("blocks.7.attn") stay. Step marks see the name as it was given.
//
// NVTX (version 3, header-only, in each library that uses it) loads the library that NVTX_INJECTION64_PATH names and
// calls its InitializeInjectionNvtx2, at the first use in each library.
#pragma once

namespace forkpoint {

// When the probe is loaded and not dormant: has NVTX find us, unless it was told to load another tool (then a coverage
// limit). own_path: of this library.
void offer_nvtx_injection(const char* own_path);

}  // namespace forkpoint
