// torch.distributed.checkpoint: .metadata is a pickle of Metadata(state_dict_metadata, planner_data, storage_data, ...)
// (torch/distributed/checkpoint/metadata.py). state_dict_metadata: name to TensorStorageMetadata(properties, size, chunks) or
// BytesStorageMetadata; storage_data: MetadataIndex(fqn, offset, index) to _StorageInfo(relative_path, offset, length). Each
// chunk is a zip file of torch.save of its own within a .distcp file (filesystem.py, _write_item).
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "lib/checkpoint_readers.h"
#include "lib/error.h"
#include "lib/pickle.h"
#include "lib/zip_file.h"

namespace forkpoint {
namespace {

using Type = PickleValue::Type;

struct StoredAt {
  std::string file;
  uint64_t offset = 0, size_bytes = 0;
};

class DistributedReader {
 public:
  DistributedReader(const std::string& folder, LeafAdder* leaves) : folder_(folder), leaves_(leaves) {
    const FileSlice file = open_slice(folder + "/.metadata");
    pickle_ = Pickle::parse(file.text(0, file.size_bytes(), ".metadata"), file.path());
  }

  std::map<std::string, uint64_t> files() {
    const PickleValue* storage = pickle_.find(pickle_[pickle_.root()], "storage_data");
    if (!storage) fail("it is no Metadata of torch.distributed.checkpoint");
    index_storage(*storage);
    std::map<std::string, uint64_t> ends;
    for (const auto& [key, at] : stored_) {
      if (at.offset > UINT64_MAX - at.size_bytes) fail("a place in a file is no number");
      uint64_t& end = ends[at.file];
      end = std::max(end, at.offset + at.size_bytes);
    }
    return ends;
  }

  void read() {
    const PickleValue& root = pickle_[pickle_.root()];
    const PickleValue* tensors = pickle_.find(root, "state_dict_metadata");
    const PickleValue* storage = pickle_.find(root, "storage_data");
    if (!tensors || !storage) fail("it is no Metadata of torch.distributed.checkpoint");
    index_storage(*storage);
    for (size_t i = 0; i + 1 < tensors->entries.size(); i += 2) {
      const std::string& name = pickle_[tensors->entries[i]].text;
      const PickleValue& what = pickle_[tensors->entries[i + 1]];
      const std::string_view type = class_name(what);
      if (type.ends_with(".TensorStorageMetadata")) {
        leaves_->tensor(name, tensor(name, what));
      } else if (type.ends_with(".BytesStorageMetadata")) {
        add_object(name);
      } else {
        fail(fmt::format("`{}` is a {}, which is not known", name, type));
      }
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw Error(fmt::format("{}/.metadata: {}.", folder_, what)); }
  std::string_view class_name(const PickleValue& value) const { return pickle_.callable_name(value); }

  const PickleValue& member(const PickleValue& value, std::string_view name) const {
    const PickleValue* found = pickle_.find(value, name);
    if (!found) fail(fmt::format("a {} has no {}", class_name(value), name));
    return *found;
  }

  std::vector<int64_t> size_of(const PickleValue& value) const {
    const PickleValue* from = &value;
    if (class_name(value) == "torch.Size") {
      const auto& arguments = pickle_[value.arguments].items;
      if (arguments.size() != 1) fail("a torch.Size has no size");
      from = &pickle_[arguments[0]];
    }
    std::vector<int64_t> result;
    for (const PickleId id : from->items) {
      if (pickle_[id].type != Type::integer) fail("a torch.Size holds something that is no number");
      result.push_back(pickle_[id].integer);
    }
    return result;
  }

  uint64_t natural(const PickleValue& value) const {
    if (value.type != Type::integer || value.integer < 0) fail("a place in a file is no number");
    return static_cast<uint64_t>(value.integer);
  }

  void index_storage(const PickleValue& storage) {
    for (size_t i = 0; i + 1 < storage.entries.size(); i += 2) {
      const PickleValue &key = pickle_[storage.entries[i]], &info = pickle_[storage.entries[i + 1]];
      const PickleValue* offset = pickle_.find(key, "offset");
      const std::vector<int64_t> at = offset && offset->type != Type::none ? size_of(*offset) : std::vector<int64_t>{};
      stored_[{member(key, "fqn").text, at}] = {member(info, "relative_path").text, natural(member(info, "offset")),
                                                natural(member(info, "length"))};
      if (const PickleValue* transforms = pickle_.find(info, "transform_descriptors"); transforms && !transforms->items.empty()) {
        transformed_.insert(member(key, "fqn").text);
      }
    }
  }

  FileSlice slice_of(const std::string& name, const std::vector<int64_t>& offset) {
    const auto found = stored_.find({name, offset});
    if (found == stored_.end()) throw Error(fmt::format("{}/.metadata names no place for its chunk at [{}].", folder_, fmt::join(offset, ", ")));
    if (transformed_.contains(name)) throw Error(fmt::format("{}/.metadata: it was compressed or otherwise transformed.", folder_));
    const StoredAt& at = found->second;
    auto file = files_.find(at.file);
    if (file == files_.end()) file = files_.emplace(at.file, open_slice(folder_ + "/" + at.file)).first;
    return file->second.part(at.offset, at.size_bytes, fmt::format("`{}`", name));
  }

  CheckpointTensor tensor(const std::string& name, const PickleValue& what);
  void add_part(const std::string& name, const PickleValue& chunk, CheckpointTensor* tensor);

  void add_object(const std::string& name) {
    try {
      const FileSlice slice = slice_of(name, {});
      if (ZipFile::begins(slice)) {
        read_torch_file(slice, name, leaves_);
      } else {
        leaves_->value(name, bytes_text("bytes", slice.text(0, slice.size_bytes(), "an object")));
      }
    } catch (const Error& error) {
      leaves_->unread(name, error.what());
    }
  }

  std::string folder_;
  LeafAdder* leaves_;
  Pickle pickle_;
  std::map<std::pair<std::string, std::vector<int64_t>>, StoredAt> stored_;
  std::set<std::string> transformed_;
  std::map<std::string, FileSlice> files_;
};

// TensorProperties pickles itself as a tuple whose first item is the dtype, a name in the module torch.
CheckpointTensor DistributedReader::tensor(const std::string& name, const PickleValue& what) {
  CheckpointTensor result;
  const PickleValue& properties = member(what, "properties");
  const PickleValue& state = pickle_[properties.state];
  const PickleValue* dtype = !state.items.empty() ? &pickle_[state.items[0]] : pickle_.find(properties, "dtype");
  if (!dtype || dtype->type != Type::global) fail(fmt::format("`{}` has no dtype", name));
  result.shape = size_of(member(what, "size"));
  result.dtype_name = dtype->text;
  if (!torch_dtype(dtype->text, &result.dtype)) {
    result.unread = fmt::format("its type {} is not known", dtype->text);
    return result;
  }
  result.dtype_name = forkpoint::name(result.dtype);
  try {
    for (const PickleId chunk : member(what, "chunks").items) add_part(name, pickle_[chunk], &result);
  } catch (const Error& error) {
    result.unread = error.what();
    result.parts.clear();
  }
  return result;
}

void DistributedReader::add_part(const std::string& name, const PickleValue& chunk, CheckpointTensor* tensor) {
  const std::vector<int64_t> offset = size_of(member(chunk, "offsets")), shape = size_of(member(chunk, "sizes"));
  const FileSlice slice = slice_of(name, offset);
  CheckpointTensor stored = read_torch_tensor(slice);
  if (stored.dtype != tensor->dtype || stored.shape != shape || offset.size() != tensor->shape.size()) {
    throw Error(fmt::format("{}: the chunk of `{}` at [{}] is {}[{}], .metadata says {}[{}].", slice.path(), name,
                            fmt::join(offset, ", "), forkpoint::name(stored.dtype), fmt::join(stored.shape, ", "),
                            forkpoint::name(tensor->dtype), fmt::join(shape, ", ")));
  }
  TensorPart part = std::move(stored.parts.at(0));
  part.global_offset = offset;
  tensor->parts.push_back(std::move(part));
}

}  // namespace

std::map<std::string, uint64_t> distributed_files(const std::string& folder) { return DistributedReader(folder, nullptr).files(); }

void read_distributed(const std::string& folder, LeafAdder* leaves) { DistributedReader(folder, leaves).read(); }

}  // namespace forkpoint
