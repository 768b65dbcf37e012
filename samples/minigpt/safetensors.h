// The safetensors format: 8 bytes header length, a JSON header, the tensors' bytes. fp32 only.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "samples/minigpt/tensor.h"

namespace minigpt {

using NamedTensors = std::vector<std::pair<std::string, const Tensor*>>;
std::string to_safetensors(const NamedTensors& tensors);

// Fills tensors by name from a file. Throws Error with the file, what was found and what was expected.
void from_safetensors(const std::string& path, const std::vector<std::pair<std::string, Tensor*>>& tensors);

// Whole or not at all: written beside its name, synchronised, renamed. Throws Error.
void write_file(const std::string& path, const std::string& content);
std::string read_file(const std::string& path);

}  // namespace minigpt
