// Saves the operands of one suspect op (FORKPOINT_SAVE) as files in RUN/operands (lib/operand_file.h): every record of the
// step, phase, layer and op that were asked for, and what a launch was handed, before it and after it.
//
// This is the one place where the probe copies values out and waits for the device: it is meant for the last step of a
// bisection, on a job that is replayed for it. The host's values and results stay what they are. Any thread; never throws.
#pragma once

#include "probes/descriptor.h"
#include "probes/guard.h"
#include "probes/settings.h"

struct CUstream_st;

namespace forkpoint {

struct LaunchPacket;

// Of a record that is made now. Does nothing unless it is one that was asked for.
void save_operand(const Token& token, const SiteKey& site, const CheckedTensor& tensor);

// Is the launch that the host makes now the one that was asked for? Then its operands are saved around it: of `packet`, which
// becomes its row, those from `first` on; before: what it was handed, else what it left.
bool is_launch_to_save();
void save_launch_operands(const Token& token, const LaunchPacket& packet, uint32_t first, const Name* kernel, CUstream_st* stream,
                          bool before);

// Copies device memory to the host behind everything on the stream, and waits. error: CUresult, where it is false.
bool copy_from_device(const Token& token, const void* source, size_t size_bytes, CUstream_st* stream, void* target, int* error);

// In the child of a fork: it saves under the parent's name no more.
void save_nothing_in_child();

}  // namespace forkpoint
