// Small checkpoint files, written by hand: what the tests of lib/checkpoints*.h find and read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace forkpoint {

// Makes folders on the way.
void put_file(const std::string& path, const std::string& content);
std::string get_file(const std::string& path);

struct MadeTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};
std::string made_safetensors(const std::vector<MadeTensor>& tensors);

// Of the smallest zip file there is: an end record.
std::string empty_zip();

}  // namespace forkpoint
