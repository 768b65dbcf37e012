// The one exception type of lib and cli. Probes and kernels never throw.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace forkpoint {

// what() is a full sentence: the file or pid, what was found, what was expected. hint() says what to do; it may be empty.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, std::string hint = {})
      : std::runtime_error(message), hint_(std::move(hint)) {}
  const std::string& hint() const { return hint_; }

 private:
  std::string hint_;
};

}  // namespace forkpoint
