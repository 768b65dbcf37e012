#include "probes/launch_digests.h"

#include <algorithm>
#include <new>

#include "kernels/digest_flush.h"
#include "kernels/digest_pieces.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

constexpr size_t kBatch = 64;  // requests that are planned at a time

bool is_wanted(const PacketBuffer& buffer) {
  return buffer.row.bytes > 0 && (buffer.row.flags & kBufferNoDigest) == 0 && buffer.same_as < 0;
}

const void* address_of(const BufferRow& row) { return reinterpret_cast<const void*>(row.address - row.offset + row.start); }

// One batch of buffers and where their results go.
class Batch {
 public:
  Batch(const Token& token, const DigestPlace& place) : token_(token), place_(place) {}
  bool full() const { return count_ == kBatch; }

  // false: no place for a result.
  bool add(PacketBuffer& buffer) {
    DigestRequest& request = *new (&requests_[count_]) DigestRequest;
    request.data = address_of(buffer.row);
    request.size_bytes = buffer.row.bytes;
    if (!take_target(buffer, &request.target)) return false;
    buffers_[count_++] = &buffer;
    return true;
  }
  // One whose rows have gaps between them, at once and by itself.
  bool launch_rows(PacketBuffer& buffer, CUresult* result) {
    DigestTarget target;
    if (!take_target(buffer, &target)) return false;
    TensorView view;
    view.dtype = DType::raw;
    view.dims = 2;
    view.shape[0] = static_cast<int64_t>((buffer.row.bytes - buffer.row_bytes) / buffer.pitch + 1);
    view.shape[1] = view.positions[0] = static_cast<int64_t>(buffer.row_bytes);
    view.strides[0] = static_cast<int64_t>(buffer.pitch);
    view.strides[1] = view.positions[1] = 1;
    DigestLaunch plan = plan_digest(address_of(buffer.row), view, target, place_.context.multiprocessors());
    void* arguments[] = {plan.params()};
    *result = place_.driver.cuLaunchKernel_(place_.context.kernel(plan.kernel), plan.grid, 1, 1, plan.block, 1, 1,
                                            plan.shared_bytes, place_.stream, arguments, nullptr);
    if (*result != CUDA_SUCCESS) give_up(buffer);
    return true;
  }

  CUresult launch() {
    CUresult result = CUDA_SUCCESS;
    size_t done = 0;
    for (size_t covered = 0; done < count_; done += covered) {
      covered = plan_digest_pieces(requests_ + done, count_ - done, place_.context.multiprocessors(), &launch_);
      void* arguments[] = {launch_.params()};
      result = place_.driver.cuLaunchKernel_(place_.context.kernel(launch_.kernel), launch_.grid, 1, 1, launch_.block, 1, 1,
                                             launch_.shared_bytes, place_.stream, arguments, nullptr);
      if (result != CUDA_SUCCESS) break;
    }
    for (size_t i = done; i < count_; ++i) give_up(*buffers_[i]);
    count_ = 0;
    return result;
  }

  static void give_up(PacketBuffer& buffer) {
    if (buffer.slot) buffer.slot->busy.store(0, std::memory_order_release);
    buffer.slot = nullptr;
    buffer.node = 0;
    buffer.row.flags |= kBufferNoDigest;
  }

 private:
  bool take_target(PacketBuffer& buffer, DigestTarget* target) {
    if (place_.capturing) {
      const bool taken = place_.context.take_node(&buffer.node, target);
      if (place_.flushed) target->ring = nullptr;
      return taken;
    }
    buffer.slot = place_.context.take_slot();
    while (!buffer.slot && recorder.await_writer(token_)) buffer.slot = place_.context.take_slot();
    if (!buffer.slot) return false;
    buffer.slot->dtype = DType::raw;
    *target = place_.context.target(*buffer.slot);
    return true;
  }

  const Token& token_;
  const DigestPlace& place_;
  union {  // no more than is needed is written
    DigestRequest requests_[kBatch];
  };
  PacketBuffer* buffers_[kBatch];
  size_t count_ = 0;
  DigestPiecesLaunch launch_;
};

}  // namespace

Loss enqueue_launch_digests(const Token& token, const DigestPlace& place, LaunchPacket& packet, uint32_t first, int* error) {
  Loss loss = Loss::count_;
  const auto failed = [&](CUresult result) {
    if (result == CUDA_SUCCESS) return;
    loss = Loss::cuda_launch;
    *error = static_cast<int>(result);
    if (is_fatal(result)) place.context.mark_gone();
  };
  *error = 0;
  if (!place.capturing) failed(place.context.order_after_setup(place.driver, place.stream));
  Batch batch(token, place);
  for (uint32_t i = first; i < packet.row.buffers; ++i) {
    PacketBuffer& buffer = packet.buffers[i];
    if (!is_wanted(buffer)) continue;
    if (loss != Loss::count_) {
      Batch::give_up(buffer);
    } else if (buffer.row_bytes != 0) {
      CUresult result = CUDA_SUCCESS;
      if (!batch.launch_rows(buffer, &result)) loss = Loss::cuda_slots, Batch::give_up(buffer);
      failed(result);
    } else if (!batch.add(buffer)) {
      loss = Loss::cuda_slots;
      Batch::give_up(buffer);
    } else if (batch.full()) {
      failed(batch.launch());
    }
  }
  failed(batch.launch());
  return loss;
}

CUresult flush_captured_digests(const DigestPlace& place, const uint32_t* nodes, size_t count) {
  const GraphResults& results = place.context.graph_results();
  DigestFlushLaunch launch;
  for (size_t done = 0; done < count;) {
    done += plan_digest_flush(results.ring(), results.scratch(), nodes + done, count - done, &launch);
    void* arguments[] = {launch.params()};
    const CUresult result =
        place.driver.cuLaunchKernel_(place.context.kernel(launch.kernel), launch.grid, 1, 1, launch.block, 1, 1,
                                     launch.shared_bytes, place.stream, arguments, nullptr);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

}  // namespace forkpoint
