// What a misspelt word was meant to be.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace forkpoint {

// The candidate that `word` is most likely a misspelling of; empty when none is near.
std::string nearest(std::string_view word, const std::vector<std::string_view>& candidates);

}  // namespace forkpoint
