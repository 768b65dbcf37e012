// What a checkpoint holds: its tensors, wherever their bytes lie, and the values beside them. Reads safetensors, torch zip files
// (.pt, .pth, .bin, .ckpt), DCP and Megatron's distributed checkpoints (.metadata and .distcp), JSON, and folders of them.
// Nothing in a file is executed. Files are read only. Safe from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lib/digest.h"
#include "lib/input_file.h"

namespace forkpoint {

// A box of a tensor, where its bytes are. strides in elements; offset is that of its element (0, 0, ...) in the file
// slice. conjugate, negative: the values are those of the bytes, conjugated and then negated (torch's conj and neg
// bits). Digests are of the values. Of real and complex floating point types alone.
struct TensorPart {
  FileSlice storage;
  uint64_t offset_bytes = 0;
  std::vector<int64_t> shape, strides, global_offset;
  bool conjugate = false, negative = false;
};

struct CheckpointTensor {
  DType dtype = DType::raw;
  std::string dtype_name;  // as the file calls it, where we know it only as bytes; else as name(dtype)
  std::vector<int64_t> shape;
  std::vector<TensorPart> parts;
  std::string unread;      // why its bytes cannot be found; empty: they are in `parts`
  std::string keys;        // see below
  std::optional<bool> requires_grad;  // none: the file does not say
  Digest digest = {};      // of the whole tensor, set by digest_content
};

struct CheckpointValue {
  std::string text;  // type and value; of long ones the size and the digest
  std::string keys = {};  // see below
};

// Names are for people and for comparing across formats: those of {1: x}, {"1": x} and [None, x] are one, as are those
// of
// {"a.b": x} and {"a": {"b": x}}. `keys` tells them apart: root["a"]["b"], root["d"][1], root["l"][list 1]; within an
// object of a distributed checkpoint object["b"]. Empty where a format has only names (safetensors, the tensors of a
// distributed checkpoint). Whether both are of one kind and differ; what cannot be told apart is equal.
bool keys_differ(const std::string& a, const std::string& b);

// Where a leaf stands: the file without shard number and ending ("model", "mp_rank_00/model_optim_rng"; empty in a checkpoint that
// is one file or one distributed whole), and the path within it ("module.layers.0.weight", "optimizer.param_groups.0.lr").
using LeafName = std::pair<std::string, std::string>;
std::string to_string(const LeafName& name);

struct CheckpointContent {
  std::string path;
  std::map<LeafName, CheckpointTensor> tensors;
  std::map<LeafName, CheckpointValue> values;
  std::map<std::string, std::string> unread;  // file, and why its tensors and values are not among these
  std::set<std::string> opaque;               // classes and functions that stand as names only
  uint64_t tensor_bytes = 0;
  Digest fingerprint = {};                    // of its files' names, sizes and times when it was read
};

// `path`: a checkpoint's folder or file. Reads directories and headers, not the tensors. Throws Error when the path cannot be
// read at all; a file in it that cannot be is in `unread`.
CheckpointContent read_content(const std::string& path);

// Reads all tensors and sets their digests, on several threads. One that cannot be read gets `unread`; where a file was changed
// since read_content, the content does too. `progress` (may be empty)
// is called with bytes done and bytes in all, by one thread at a time.
void digest_content(CheckpointContent* content, const std::function<void(uint64_t, uint64_t)>& progress = {});

// Of all tensors: names, types, shapes and digests. The same for a resharded checkpoint.
Digest content_digest(const CheckpointContent& content);

}  // namespace forkpoint
