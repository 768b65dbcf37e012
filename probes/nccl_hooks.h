// NCCL's calls, interposed by symbol (nccl_exports.cpp has the symbols): each becomes records of a collective, on every
// level, unless the program reports the collective itself. Any thread; nothing here throws or holds a lock across the
// real call.
#pragma once

namespace forkpoint {

// The calling thread is in NCCL's code on behalf of the host.
bool inside_nccl();

// As inside_nccl(), or the thread is one that NCCL started: what is launched and copied now is NCCL's.
bool nccl_is_at_work();

// A call has come through our symbols. False while NCCL works: the program reaches it another way (dlsym), so that its
// collectives are not recorded as such.
bool nccl_seen_by_symbol();

// In the child of a fork: the parent's communicators and open groups are not there.
void forget_nccl_in_child();

}  // namespace forkpoint
