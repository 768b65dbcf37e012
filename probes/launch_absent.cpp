// The launch level of a probe that was built without CUDA: there is none, and a coverage limit says so.
#include "probes/launch_level.h"
#include "probes/session.h"
#include "probes/session_launches.h"

namespace forkpoint {

void offer_injection(const Settings&, const char*) {}
void cuda_initialised(const Token&, const Settings&) {}
void launch_level_at_step(const Token&, const Settings&, int64_t) {}
LaunchPacket* launch_row_of_record(const Token&, void*, const void*, int64_t, int64_t) { return nullptr; }
void declare_launch_limits(LimitSet& limits) { limits.add(Limit::launch_level); }
void launch_level_outside_callbacks(const Token&) {}
void launch_level_in_child() {}
void return_launch_packet(LaunchPacket*) {}
void drain_graph_digests() {}
void Session::handle_launch(LaunchPacket&) {}

}  // namespace forkpoint
