// Switches of the fake libcuda, found with dlsym.
#pragma once

extern "C" {
void fake_cuda_set_capture(int state);  // 0: no, 1: the stream is captured, 2: another one that forbids the default stream
void fake_cuda_set_launch_error(int error);
void fake_cuda_set_stuck(int stuck);    // nothing finishes any more
void fake_cuda_reset();                 // the context is destroyed, and made again under the same address
}
