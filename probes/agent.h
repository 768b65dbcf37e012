// The control agent: a thread that answers `forkpoint ps`, `attach` and `detach` on a Unix socket (lib/control.h) while the
// process sleeps or records. It begins when the process turns out to train: with its first step or rank of forkpoint.h, or
// when it imports torch; so a shell, a compiler or a Python without torch that inherits the probe has no thread and no
// socket. Only the process's own user and root are answered. It makes no CUDA call, blocks all signals, sleeps without a
// timer while nothing is asked, and is gone while the process forks.
#pragma once

#include <cstdint>

#include "lib/control.h"
#include "probes/settings.h"

namespace forkpoint {

// Calls of the host. Does nothing where it runs already; in the child of a fork it begins anew. base: of the process, for ever.
void start_agent(const Settings& base);
// When the process ends: the socket's name goes. Async-signal-safe.
void leave_agent();
// In the child of a fork: the parent's sockets are closed, and not removed.
void agent_in_child();

// ---- What the agent answers (agent_requests.cpp); its thread only.

struct AgentClient {
  int64_t pid = 0;
  bool is_owner = false;  // the recording is this client's: it ends when the client goes
};
// owned: some client is the owner.
control::Message answer_request(const control::Message& request, AgentClient* client, bool owned);
// The owner has gone, whatever it had asked for.
void owner_has_gone();
void answer_for(const Settings& base, const control::SocketName& process);

}  // namespace forkpoint
