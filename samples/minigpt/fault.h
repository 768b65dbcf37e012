// Faults that can be switched on. Each is deterministic and leaves the program otherwise as it is.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace minigpt {

enum class FaultKind {
  bitflip_weight,      // before the forward use of a weight, bit 20 of one element; it stays flipped
  bitflip_activation,  // bit 20 of one element of a module's output
  bitflip_grad,        // bit 20 of one element of a weight's gradient, before the gradients are averaged
  reorder_forward,     // a linear layer's sum over its inputs runs backwards on one rank
  reorder_reduce,      // a gradient's sum over the ranks runs backwards on all ranks
  data,                // a rank takes the batch that is due one step later
  dropout_seed,        // a rank's dropout seed changes, from this step on
  lr,                  // the learning rate is 1.0001 times what it should be
  skip_all_reduce,     // a rank takes part in the collective, but keeps its own gradient
  lost_momentum,       // exp_avg of one module is zero after a resume
  nan,                 // one element of a module's output becomes NaN
  lost_sampler,        // the sampler begins anew after a resume
};

struct Fault {
  FaultKind kind = FaultKind::nan;
  int64_t step = -1;  // -1: not bound to a step (lost_momentum, lost_sampler)
  int rank = 0;       // -1: every rank
  int layer = 0;
  std::string module;  // within the block: "mlp.fc1"
  std::string text;    // as it was written
  std::string layer_path() const { return "blocks." + std::to_string(layer) + "." + module; }
};

// KIND@step=S,rank=R,layer=L[,target=T][,module=M]. Throws UsageError.
Fault parse_fault(const std::string& text);
// That layer and rank exist, and that the fault can show at all. Throws UsageError.
void validate(const Fault& fault, int layers, int ranks, bool resume);

// Modules of a block, in forward order.
const std::vector<std::string>& block_modules();

// The faults as one rank sees them.
class FaultPlan {
 public:
  FaultPlan() = default;
  FaultPlan(std::vector<Fault> faults, int rank) : faults_(std::move(faults)), rank_(rank) {}

  void begin_step(int64_t step) { step_ = step; }
  // Whether a fault of this kind is due now, on this rank, in this module ("" for kinds that belong to no module). Says
  // so on stderr when it is.
  bool strikes(FaultKind kind, std::string_view layer_path = {}) const;

 private:
  std::vector<Fault> faults_;
  int rank_ = 0;
  int64_t step_ = -1;
};

}  // namespace minigpt
