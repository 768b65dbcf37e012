// The open NVTX ranges of each thread, as scopes of the recorder. A thread's ranges nest within a domain; those of
// several domains may cross, then a range that was left stays part of the path until those opened after it are left.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "probes/guard.h"

namespace forkpoint {

struct RangeName {
  uint64_t hash;
  bool begins_step;
  uint32_t length;
  char text[1];  // length bytes and a zero

  bool equals(std::string_view other) const { return other == std::string_view(text, length); }
  static RangeName* make(uint64_t hash, std::string_view key);
  static void discard(RangeName* name);
};

// A name without the number at its end, and how many numbers it was seen with.
struct RangeStem {
  uint64_t hash;
  std::atomic<uint32_t> numbers;
  const RangeName* name;  // "#" for the number; nullptr: no memory
  uint32_t length;
  char text[1];

  bool equals(std::string_view other) const { return other == std::string_view(text, length); }
  static RangeStem* make(uint64_t hash, std::string_view key);
  static void discard(RangeStem* stem);
};

struct NvtxDomain {
  bool is_nccls;  // NCCL marks its own calls
};

// Without what changes from call to call (nvtx_hooks.h has the rule for numbers). nullptr: too many distinct ones (a coverage limit says so), or no memory.
const RangeName* range_name(const Token& token, std::string_view text);

// name may be nullptr. domain: nullptr is the default one.
void push_range(const Token& token, const NvtxDomain* domain, const RangeName* name);
void pop_range(const Token& token, const NvtxDomain* domain);
// Is a range open on this thread with which a step began? What is in it belongs to that step.
bool inside_marked_range();
// A mark, or a range that is not bound to a thread.
void mark_range(const Token& token, const RangeName* name);

}  // namespace forkpoint
