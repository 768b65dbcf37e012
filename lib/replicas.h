// One run against itself: what must be equal across its ranks is compared rank to rank in every step, and what
// activation checkpointing recomputes with its first pass.
//
// Compared: parameters, optimizer state, buffers, the gradients that the optimizer consumes, and what all-reduce,
// all-gather and broadcast leave on their members. Not compared: a rank's own batch, activations, generators,
// evaluation. Which ranks are replicas: lib/replica_groups.h; where nothing shows it, the verdict is incomparable.
#pragma once

#include "lib/diff.h"

namespace forkpoint {

// Throws never for damaged input that Run::open accepted. want_map, full_scan and launches have no meaning here.
Verdict diff_replicas(const Run& run, const DiffOptions& options = {});

}  // namespace forkpoint
