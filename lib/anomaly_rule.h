// What a record is to whoever looks for values that are not finite: the rule that anomalies (a run that has ended) and
// the watch (one that goes on) share. Internal to both.
#pragma once

#include "lib/record.h"

namespace forkpoint {

// Of one site.
struct ValueRole {
  bool looked_at = false;  // its values can be non-finite
  bool magnitude = false;  // judged by magnitude
  bool loss = false, number = false;
  bool sink = false;           // non-finite here means that the training is reached
  bool gradient_side = false;  // what a gradient scaler expects to overflow
  bool bursts = false;         // heavy-tailed: gradients and moments of them
  bool collective_input = false, collective_output = false;
  bool skipped = false;  // not zero: the optimizer did not step, as gradients were not finite
  bool mask = false;     // by its name: -infinity is what it is for
  uint64_t op = 0;       // op_key
};
ValueRole value_role(const Site& site);

// Can a value of this type be non-finite?
bool is_float(DType dtype);

// In a step that a gradient scaler skipped: gradients, and a half precision loss, which is multiplied by the scale
// before the backward pass begins and may overflow by that alone.
bool scaler_explains(const ValueRole& role, DType dtype);

}  // namespace forkpoint
