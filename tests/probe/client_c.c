/* forkpoint.h is a C header first. */
#include <stdio.h>

#include "probes/forkpoint.h"

int main(void) {
  const float values[6] = {1, 2, 3, 4, 5, 6};
  const int64_t shape[2] = {2, 3};
  forkpoint_tensor_desc desc = {0};
  desc.struct_size = sizeof(desc);
  desc.name = "weight";
  desc.data = values;
  desc.dtype = FORKPOINT_F32;
  desc.role = FORKPOINT_ROLE_PARAMETER;
  desc.ndim = 2;
  desc.shape = shape;
  forkpoint_rank(0, 1);
  forkpoint_step_begin(0);
  forkpoint_scope_begin(FORKPOINT_FORWARD, "fc", NULL);
  forkpoint_tensor(&desc);
  forkpoint_scope_end();
  forkpoint_scalar("loss", FORKPOINT_ROLE_LOSS, 0.5);
  forkpoint_step_end();
  printf("active %d\n", forkpoint_active());
  return 4;
}
