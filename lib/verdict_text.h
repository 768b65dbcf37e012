// Wording shared by everything that writes sentences of a verdict. Pure functions.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/record.h"
#include "lib/verdict.h"

namespace forkpoint {

std::string grouped(uint64_t number);                                   // 12,800,000
std::string counted(uint64_t number, std::string_view noun);            // "1 step", "2,000 steps", "2 launches", "3 copies"
std::string number_list(const std::vector<int64_t>& sorted_numbers);    // "0, 2-4"
std::string rank_list(const std::vector<int>& sorted_ranks);            // "rank 3", "ranks 0, 2-4"

// "backward, blocks.3.mlp.fc1: grad_input", "collective, blocks.1.mlp.fc1 (all_reduce): grad", "optimizer: lr"
std::string place_text(std::string_view phase, std::string_view layer, std::string_view op, std::string_view tensor);
std::string place_text(const Site& site);
std::string when_text(const Divergence& at);                            // "step 7", "before the first step", "before step 7"
std::string place_text(const Divergence& at);                           // with step, rank and micro-step before it
std::string at_text(const Divergence& at);                              // "at step 7, rank ...", "before the first step, ..."

}  // namespace forkpoint
