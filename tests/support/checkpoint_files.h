// Small checkpoint files, written by hand: what the tests of lib/checkpoints*.h find and read.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
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

// As torch.save writes it, of text, whole numbers, true and false, null, lists and objects. An object with a "@class"
// ("argparse.Namespace") is pickled as one of that class.
std::string made_torch_file(const nlohmann::json& value);

// Of the smallest zip file there is: an end record.
std::string empty_zip();

}  // namespace forkpoint
