// Digests of a checkpoint's tensors, read in pieces: memory stays at a few MiB a thread, whatever the tensors' sizes.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

#include "lib/assemble.h"
#include "lib/checkpoint_content.h"
#include "lib/checkpoint_layouts.h"
#include "lib/error.h"

namespace forkpoint {
namespace {

constexpr uint64_t kPieceBytes = 4ull << 20;
constexpr unsigned kMaxThreads = 16;

template <typename Word>
void flip_signs(std::vector<char>& bytes, bool even, bool odd) {
  constexpr auto kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  for (size_t i = 0; (i + 1) * sizeof(Word) <= bytes.size(); ++i) {
    if (!(i % 2 == 0 ? even : odd)) continue;
    Word word;
    std::memcpy(&word, bytes.data() + i * sizeof(Word), sizeof(Word));
    word ^= kSign;
    std::memcpy(bytes.data() + i * sizeof(Word), &word, sizeof(Word));
  }
}

// From whole elements to the values that they stand for: a sign is the uppermost bit, imaginary parts come second.
void resolve(std::vector<char>& bytes, DType dtype, const TensorPart& part) {
  if (!part.conjugate && !part.negative) return;
  const bool complex = dtype == DType::c64 || dtype == DType::c128;
  const bool even = part.negative, odd = part.negative != (complex && part.conjugate);
  switch (complex ? size_bytes(dtype) / 2 : size_bytes(dtype)) {
    case 2:
      return flip_signs<uint16_t>(bytes, even, odd);
    case 4:
      return flip_signs<uint32_t>(bytes, even, odd);
    case 8:
      return flip_signs<uint64_t>(bytes, even, odd);
    default:
      throw Error(fmt::format("a negated tensor of {} cannot be read", name(dtype)));
  }
}

// One part of one tensor.
struct Task {
  CheckpointTensor* tensor = nullptr;
  const TensorPart* part = nullptr;
  Digest digest;
  std::string why;
  uint64_t size_bytes = 0;
};

class PartReader {
 public:
  PartReader(const Task& task, std::vector<char>* buffer) : tensor_(*task.tensor), part_(*task.part), buffer_(*buffer) {}

  Digest digest() {
    if (std::any_of(part_.shape.begin(), part_.shape.end(), [](int64_t extent) { return extent == 0; })) return {};
    return box(part_.shape, std::vector<int64_t>(part_.shape.size(), 0));
  }

 private:
  // The box of `shape` elements at `at` within the part: what its elements span in memory is read at once if it is small; else
  // it is cut in the dimension with the largest stride, so that each half spans about half.
  Digest box(const std::vector<int64_t>& shape, const std::vector<int64_t>& at) {
    const auto element = static_cast<uint64_t>(size_bytes(tensor_.dtype));
    uint64_t first = 0, last = 0;
    size_t widest = 0;
    bool can_cut = false;
    for (size_t d = 0; d < shape.size(); ++d) {
      const auto stride = static_cast<uint64_t>(part_.strides[d]);
      first += static_cast<uint64_t>(at[d]) * stride;
      last += static_cast<uint64_t>(shape[d] - 1) * stride;
      if (shape[d] > 1 && (!can_cut || part_.strides[d] > part_.strides[widest])) widest = d;
      can_cut = can_cut || shape[d] > 1;
    }
    const uint64_t span = (last + 1) * element;
    if (span > kPieceBytes && can_cut) return cut(shape, at, widest);
    buffer_.resize(span);
    part_.storage.read(part_.offset_bytes + first * element, buffer_.data(), span);
    resolve(buffer_, tensor_.dtype, part_);
    std::vector<int64_t> place = at;
    for (size_t d = 0; d < place.size(); ++d) place[d] += part_.global_offset[d];
    return digest_view(buffer_.data(), shard_view(tensor_.dtype, shape, part_.strides, tensor_.shape, place)).digest;
  }

  Digest cut(const std::vector<int64_t>& shape, const std::vector<int64_t>& at, size_t d) {
    const uint64_t stride_bytes = std::max<uint64_t>(1, static_cast<uint64_t>(part_.strides[d])) * static_cast<uint64_t>(size_bytes(tensor_.dtype));
    const auto step = std::clamp<int64_t>(static_cast<int64_t>(kPieceBytes / stride_bytes), 1, std::max<int64_t>(1, shape[d] - 1));
    Digest sum;
    std::vector<int64_t> part_shape = shape, part_at = at;
    for (int64_t done = 0; done < shape[d]; done += step) {
      part_shape[d] = std::min(step, shape[d] - done);
      part_at[d] = at[d] + done;
      sum += box(part_shape, part_at);
    }
    return sum;
  }

  const CheckpointTensor& tensor_;
  const TensorPart& part_;
  std::vector<char>& buffer_;
};

// Do the parts make up the whole, and which digest has it?
void put_together(CheckpointTensor* tensor, const std::vector<const Task*>& tasks) {
  std::vector<Layout> layouts;
  layouts.reserve(tasks.size());
  std::vector<Piece> pieces;
  for (const Task* task : tasks) {
    if (!task->why.empty()) tensor->unread = task->why;
    layouts.push_back({tensor->dtype, task->part->shape, {}, tensor->shape, task->part->global_offset});
    Piece piece;
    piece.rank = static_cast<int>(pieces.size());
    piece.layout = &layouts.back();
    piece.digest = task->digest;
    pieces.push_back(piece);
  }
  if (!tensor->unread.empty()) return;
  const bool empty = std::find(tensor->shape.begin(), tensor->shape.end(), 0) != tensor->shape.end();
  if (pieces.empty() && empty) return;
  if (pieces.size() == 1 && pieces[0].layout->shape == tensor->shape) {
    tensor->digest = pieces[0].digest;
    return;
  }
  const Assembled assembled = assemble(pieces);
  tensor->digest = assembled.digest;
  if (!assembled.ok) tensor->unread = pieces.empty() ? "it has no parts" : "its parts do not make up the whole: " + assembled.why;
}

void run(std::vector<Task>& tasks, uint64_t total, const std::function<void(uint64_t, uint64_t)>& progress) {
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> done{0};
  std::mutex reporting;
  const auto work = [&] {
    std::vector<char> buffer;
    for (size_t i = next++; i < tasks.size(); i = next++) {
      Task& task = tasks[i];
      try {
        task.digest = PartReader(task, &buffer).digest();
      } catch (const std::exception& error) {
        task.why = error.what();
      }
      done += task.size_bytes;
      const std::unique_lock lock(reporting, std::try_to_lock);
      if (progress && lock) progress(done, total);
    }
  };
  const size_t count = std::min<size_t>({tasks.size(), kMaxThreads, std::max(1u, std::thread::hardware_concurrency())});
  std::vector<std::jthread> threads;
  for (size_t i = 1; i < count; ++i) threads.emplace_back(work);
  work();
}

}  // namespace

void digest_content(CheckpointContent* content, const std::function<void(uint64_t, uint64_t)>& progress) {
  std::vector<Task> tasks;
  uint64_t total = 0;
  for (auto& [name, tensor] : content->tensors) {
    if (!tensor.unread.empty()) continue;
    for (const TensorPart& part : tensor.parts) {
      Task task{&tensor, &part, {}, {}, static_cast<uint64_t>(size_bytes(tensor.dtype))};
      for (const int64_t extent : part.shape) task.size_bytes *= static_cast<uint64_t>(extent);
      total += task.size_bytes;
      tasks.push_back(std::move(task));
    }
  }
  run(tasks, total, progress);
  std::map<const CheckpointTensor*, std::vector<const Task*>> of_tensor;
  for (const Task& task : tasks) of_tensor[task.tensor].push_back(&task);
  for (auto& [name, tensor] : content->tensors) {
    if (tensor.unread.empty()) put_together(&tensor, of_tensor[&tensor]);
  }
  try {
    if (fingerprint(list_files(content->path)) == content->fingerprint) return;
    content->unread["(changed)"] = "its files were changed while they were read";
  } catch (const Error& error) {
    content->unread["(changed)"] = error.what();
  }
}

Digest content_digest(const CheckpointContent& content) {
  Digest sum;
  for (const auto& [name, tensor] : content.tensors) {
    Site site;
    site.layer = name.first;
    site.tensor = name.second;
    site.op = tensor.dtype_name;
    Record record;
    record.digest = tensor.digest;
    sum += tree_leaf(site_key(site), layout_key({tensor.dtype, tensor.shape, {}, {}, {}}), record);
  }
  return sum;
}

}  // namespace forkpoint
