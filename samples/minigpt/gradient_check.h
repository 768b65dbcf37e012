#pragma once

#include "samples/minigpt/backend.h"

namespace minigpt {

// Compares the backward pass of every module, and of the whole model, with finite differences of its forward pass,
// prints a table and returns whether all agree.
bool check_gradients(Backend& backend);

}  // namespace minigpt
