// A view with the dimensions merged that lie one within the other, in memory and in the logical tensor alike. Used by
// the host loops and by the planner of the device kernels.
#pragma once

#include "lib/digest.h"

namespace forkpoint {

struct ViewDim {
  int64_t extent = 1;
  int64_t stride = 1;    // in elements
  int64_t position = 1;  // in elements
};

struct ViewPlan {
  int64_t elements = 0;
  ViewDim inner;  // the run: contiguous when stride and position are both 1
  int dims = 0;   // the others, outermost first
  ViewDim dim[kMaxDims] = {};
};

ViewPlan plan_view(const TensorView& view);

}  // namespace forkpoint
