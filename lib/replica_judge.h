// Decides which disagreements between ranks are a loss of sync, and why it came about. Internal to diff_replicas.
#pragma once

#include "lib/replica_scan.h"
#include "lib/verdict.h"

namespace forkpoint {

enum class Judged : uint8_t {
  desync,     // they are replicas, and are not alike
  unknown,    // nothing shows that they are replicas
  not_meant,  // they are known, or look, not to be replicas: a coverage limit
};
struct Judgement {
  Judged judged = Judged::unknown;
  std::string why;  // how it is known that they are replicas; or what is not known, a sentence
};
Judgement judge(const Disagreement& found, const ReplicaScan& scan, const ReplicaGroups& groups,
                const ReplicaSites& sites);

// Reads the steps that it needs again; what cannot be read is left out.
Cause replica_cause(const Run& run, const Disagreement& found, const Judgement& judgement, const ReplicaScan& scan,
                    const ReplicaSites& sites);
Divergence replica_divergence(const Run& run, const Disagreement& found, const ReplicaScan& scan,
                              const ReplicaSites& sites);

}  // namespace forkpoint
