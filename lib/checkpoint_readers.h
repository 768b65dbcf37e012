// The readers behind lib/checkpoint_content.h, one for each format. They add the leaves of one file to a content.
#pragma once

#include <string>
#include <string_view>

#include "lib/checkpoint_content.h"
#include "lib/pickle.h"

namespace forkpoint {

inline constexpr size_t kMaxLeaves = 20'000'000;
inline constexpr int kMaxLeafDepth = 200;

// Where a reader is: the name, and the keys of lib/checkpoint_content.h (empty: the format has names alone).
struct LeafPath {
  std::string name, keys;
  LeafPath(std::string path_name, std::string path_keys = {})
      : name(std::move(path_name)), keys(std::move(path_keys)) {}
  LeafPath key(std::string_view text) const;  // of a dict, a text
  LeafPath item(std::string_view container, size_t index) const;
  // Anything else: its name, and the keys' text, brackets included.
  LeafPath other(std::string_view shown, std::string_view exact) const;
};

// Adds leaves under one group. Of leaves that have one name, but differ in their keys, each is named by its keys, in
// whatever order they come; else the later ones get "#2". Throws Error over kMaxLeaves.
class LeafAdder {
 public:
  LeafAdder(CheckpointContent* content, std::string group) : content_(content), group_(std::move(group)) {}
  void tensor(const LeafPath& path, CheckpointTensor tensor);
  void value(const LeafPath& path, std::string text);
  void unread(const std::string& name, const std::string& why);  // a leaf, or a whole object of them
  void opaque(std::string_view name) { content_->opaque.emplace(name); }

 private:
  LeafName fresh(const LeafPath& path);
  LeafName free_name(const std::string& name) const;
  bool separate(const LeafPath& path);
  CheckpointContent* content_;
  std::string group_;
  std::set<std::string> shared_;  // names that stand for leaves of different keys
};

// "a.b" from "a" and "b"; the root is "".
std::string joined(std::string_view path, std::string_view name);
// Text and bytes for people: as they are when short, else size and digest.
std::string bytes_text(std::string_view type, std::string_view bytes);
// A text in quotes that no other text has: escaped; of a long one the size and the digest.
std::string exact_quoted(std::string_view text);

// A zip file of torch.save. `prefix` goes before all names. Throws Error.
void read_torch_file(const FileSlice& file, const std::string& prefix, LeafAdder* leaves);
// All that such a file holds but the bytes of its tensors. Throws Error.
Pickle torch_pickle(const FileSlice& file);
// The one tensor that such a file holds (a chunk of DCP). Throws Error when it holds something else or one that cannot
// be read.
CheckpointTensor read_torch_tensor(const FileSlice& file);
void read_safetensors_file(const FileSlice& file, LeafAdder* leaves);
// The folder of a .metadata file. A tensor whose chunks cannot be found has `unread`. Throws Error.
void read_distributed(const std::string& folder, LeafAdder* leaves);
// How long .metadata says that each data file beside it is, at least. Throws Error.
std::map<std::string, uint64_t> distributed_files(const std::string& folder);
void read_json_file(const FileSlice& file, LeafAdder* leaves);

// "torch.bfloat16" to its type; false: none of ours.
bool torch_dtype(std::string_view name, DType* dtype);

// Row-major strides of a shape, in elements.
std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape);
// The bytes of `storage` that elements of that view touch must exist. Throws Error.
void check_part(const TensorPart& part, DType dtype, const std::string& what);

}  // namespace forkpoint
