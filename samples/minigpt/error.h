#pragma once

#include <stdexcept>

namespace minigpt {

// Trouble while running, as one sentence. The program ends with status 1. Visible, so that it can be thrown by the CUDA
// module and caught by the program.
class __attribute__((visibility("default"))) Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The command line asks for what cannot be. The program ends with status 2.
class UsageError : public Error {
 public:
  using Error::Error;
};

}  // namespace minigpt
