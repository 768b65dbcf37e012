// The header of a safetensors file: 8 bytes of length, a JSON object, then the tensors' bytes without gaps.
// Pure functions of the file.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lib/dtype.h"
#include "lib/input_file.h"

namespace forkpoint {

struct SafetensorsEntry {
  std::string name;
  std::string dtype_name;  // as the file calls it: "BF16"
  DType dtype = DType::raw;
  bool known_dtype = true;  // else dtype is raw: one element a byte is all that can be said
  std::vector<int64_t> shape;
  uint64_t offset = 0, size_bytes = 0;  // in the file
};

struct SafetensorsFile {
  std::vector<SafetensorsEntry> tensors;          // in the order of their bytes
  std::map<std::string, std::string> metadata;    // of __metadata__
};

// Throws Error when the header is damaged, the tensors' sizes do not agree with their shapes, or the file is shorter or longer
// than its header says.
SafetensorsFile read_safetensors(const FileSlice& file);

}  // namespace forkpoint
