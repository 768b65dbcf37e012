#include "probes/torch_many.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <new>

#include "probes/enter.h"
#include "probes/launch_level.h"
#include "probes/record_batch.h"
#include "probes/recorder.h"
#include "probes/torch_tensor.h"

namespace forkpoint {
namespace {

constexpr ptrdiff_t kMost = RecordBatch::kMost;

struct Room {
  TorchTensor tensor[kMost];
  TensorRequest request[kMost];
  RecordBatch batch;
};
constinit Room* shared_room = nullptr;  // made by who first takes it, and kept
constinit std::atomic<bool> room_is_taken{false};

// The room, unless somebody has it: another thread, to which a description gave the GIL, or code of the host's that a
// description ran on this one; or nobody any more, in the child of a fork.
class TakenRoom {
 public:
  TakenRoom() : taken_(!room_is_taken.exchange(true, std::memory_order_acquire)) {
    if (taken_ && !shared_room) shared_room = new (std::nothrow) Room;
  }
  ~TakenRoom() {
    if (taken_) room_is_taken.store(false, std::memory_order_release);
  }
  TakenRoom(const TakenRoom&) = delete;
  TakenRoom& operator=(const TakenRoom&) = delete;
  Room* get() const { return taken_ ? shared_room : nullptr; }

 private:
  const bool taken_;
};

class Many {
 public:
  Many(const Python& python, const TorchTensors& many)
      : python_(python), many_(many), names_(python), tensors_(python), frames_(python), roles_(python), boxes_(python), unread_(python) {}

  PythonObject* run() {
    const bool all = take_tuple(many_.tensors, &tensors_) && take_tuple(many_.names, &names_) &&
                     (!many_.frames || take_tuple(many_.frames, &frames_)) &&
                     (!many_.roles || take_tuple(many_.roles, &roles_)) &&
                     (!many_.boxes || take_tuple(many_.boxes, &boxes_));
    return all ? record_all() : nullptr;
  }

 private:
  // false: an error is set.
  bool take_tuple(PythonObject* sequence, PythonRef* tuple) {
    tuple->reset(python_.PySequence_Tuple(sequence));
    if (!*tuple) return false;
    if (python_.PyTuple_Size(tuple->get()) == python_.PyTuple_Size(tensors_.get())) return true;
    python_.PyErr_SetString(*python_.value_error, "tensors(): as many names (frames, roles, boxes) as tensors are wanted");
    return false;
  }

  PythonObject* record_all() {
    const TakenRoom taken;
    const ptrdiff_t size = python_.PyTuple_Size(tensors_.get());
    bool good = true;
    for (ptrdiff_t i = 0; good && i < size;) good = taken.get() ? take(*taken.get(), size, &i) : take_one(i++);
    if (!good) return nullptr;
    return unread_ ? unread_.release() : python_.new_reference(python_.none);
  }

  // From *i on, as many as there is room for. What was described is recorded also where a later one is no good.
  bool take(Room& room, ptrdiff_t size, ptrdiff_t* i) {
    size_t count = 0;
    bool good = true;
    while (good && *i < size && count < kMost) {
      bool readable = false;
      good = describe(*i, &room.tensor[count], &readable);
      if (good && readable) {
        room.request[count] = {nullptr, &room.tensor[count].desc, many_.flags};
        frame_[count++] = frame_at(*i);
      }
      ++*i;
    }
    enter([&](const Token& token) {
      for (size_t k = 0; k < count; ++k) room.request[k].frame = &recorder.frame_or_scope(token, frame_[k]);
      recorder.tensors_in(token, room.request, count, room.batch);
    });
    return good && !python_.PyErr_Occurred();
  }

  bool take_one(ptrdiff_t i) {
    TorchTensor tensor;
    bool readable = false;
    if (!describe(i, &tensor, &readable)) return false;
    const uint32_t frame = readable ? frame_at(i) : 0;
    if (python_.PyErr_Occurred()) return false;
    if (!readable) return true;
    enter([&](const Token& token) {
      recorder.tensor_in(token, recorder.frame_or_scope(token, frame), &tensor.desc, many_.flags);
    });
    return true;
  }

  // false: an error is set. *readable: it has bytes of its own; else its place is noted.
  bool describe(ptrdiff_t i, TorchTensor* tensor, bool* readable) {
    const char* name = python_.PyUnicode_AsUTF8AndSize(python_.PyTuple_GetItem(names_.get(), i), nullptr);
    if (!name) return false;
    const int32_t role = static_cast<int32_t>(number_at(roles_, i, many_.role));
    if (python_.PyErr_Occurred()) return false;
    *readable = describe_torch_tensor(python_, python_.PyTuple_GetItem(tensors_.get(), i), tensor);
    tensor->desc.name = name;
    tensor->desc.role = role;
    if (*readable) return !boxes_ || place(item(boxes_, i), tensor);
    return note_unread(i);
  }

  // As the part that `box` says, if it is not None. false: an error is set.
  bool place(PythonObject* box, TorchTensor* tensor) {
    if (box == python_.none) return true;
    const PythonRef ends(python_, python_.PySequence_Tuple(box));
    if (!ends) return false;
    if (python_.PyTuple_Size(ends.get()) >= 2 &&
        describe_shard(python_, item(ends, 0), item(ends, 1), tensor))
      return true;
    python_.PyErr_SetString(*python_.value_error, "tensors(): a box is a shape and an offset, one number a dimension each");
    return false;
  }
  PythonObject* item(const PythonRef& tuple, ptrdiff_t i) { return python_.PyTuple_GetItem(tuple.get(), i); }

  bool note_unread(ptrdiff_t i) {
    if (!unread_) unread_.reset(python_.PyList_New(0));
    const PythonRef place(python_, python_.PyLong_FromLongLong(i));
    return unread_ && place && python_.PyList_Append(unread_.get(), place.get()) == 0;
  }

  uint32_t frame_at(ptrdiff_t i) {
    const int64_t frame = number_at(frames_, i, many_.frame);
    return frame >= 0 && frame <= UINT32_MAX ? static_cast<uint32_t>(frame) : 0;
  }
  int64_t number_at(const PythonRef& tuple, ptrdiff_t i, int64_t otherwise) {
    return tuple ? python_.PyLong_AsLongLong(python_.PyTuple_GetItem(tuple.get(), i)) : otherwise;
  }

  const Python& python_;
  const TorchTensors& many_;
  PythonRef names_, tensors_, frames_, roles_, boxes_;  // tuples
  PythonRef unread_;
  uint32_t frame_[kMost];
};

}  // namespace

PythonObject* record_torch_tensors(const Python& python, const TorchTensors& many) { return Many(python, many).run(); }

}  // namespace forkpoint
