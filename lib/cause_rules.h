// The rules behind decide_cause, one a kind of record. Each sets class and candidates and adds its evidence. Internal.
#pragma once

#include "lib/cause.h"

namespace forkpoint {

// candidates empty: the class alone.
void decide(Cause* cause, std::string cls, std::vector<std::string> candidates = {});
// Sum, maximum and non-finite count of the words are equal, the digest is not.
bool same_words(const CauseFacts& facts);

void decide_source(const CauseFacts& facts, Cause* cause);          // batch, sampler, generator, scalar
void decide_initial_state(const CauseFacts& facts, Cause* cause);   // loaded before the first step
void decide_layout(const CauseFacts& facts, Cause* cause);          // another dtype or shape
void decide_collective(const CauseFacts& facts, Cause* cause);      // a collective's output
// A parameter's gradient as an optimizer, or what prepares its step, finds it: behind the backward pass.
bool is_gradient_of_step(const Site& site);
void decide_state_or_input(const CauseFacts& facts, Cause* cause);  // an op's input; a parameter after the update
void decide_op(const CauseFacts& facts, Cause* cause);              // an op's output

}  // namespace forkpoint
