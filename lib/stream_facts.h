// Facts in a stream's header that mean something to its readers (others are compared as they are, or name a rank's
// place).
#pragma once

namespace forkpoint {

// The first step that the process began, where it was not recorded: what the stream holds from before its first step is
// from before that one. The step's number; absent: the first step of the stream.
inline constexpr char kFirstBegunFact[] = "first_step_begun";

}  // namespace forkpoint
