// What the writer thread needs of the launch level; empty in a probe that was built without CUDA.
#pragma once

namespace forkpoint {

struct LaunchPacket;

void return_launch_packet(LaunchPacket* packet);
// Takes over what digests inside CUDA graphs have given so far.
void drain_graph_digests();

}  // namespace forkpoint
