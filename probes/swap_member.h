// One member of a communicator, before it asks the others: what it is, and the memory, stream and kernels that it
// needs.
#pragma once

#include <atomic>

#include "probes/nccl_library.h"
#include "probes/swap_means.h"

namespace forkpoint {

struct SwapMode {
  bool wide = false, tree = false, messages = false;
  bool says = false;  // what the members have decided
};

class SwapMember {
 public:
  // What is known of one when it is seen made. family: the same number for all members of one communicator, in all
  // processes; 0: not known. waits: calls on it return once they are enqueued (config.blocking), else at once.
  struct Origin {
    NcclComm comm = nullptr;
    uint64_t family = 0;
    bool waits = true;
  };
  SwapMember(const NcclLibrary& library, const CudaDriver& driver, SwapMode mode, const Origin& origin);
  SwapMember(const SwapMember&) = delete;
  SwapMember& operator=(const SwapMember&) = delete;

  // Once, by whoever comes first; who comes later waits for it. It may wait for a device, on which a member's question
  // would wait for the rest: whoever lets one ask has prepared all members of this process that it knows. Any thread,
  // outside of NCCL's groups. REQUIRES: NCCL has made it.
  void prepare();
  bool is_prepared() const { return prepared_.load(); }
  // success: it is made; in progress: not yet.
  NcclResult state_of_making() const;

  std::atomic<NcclComm> handle{nullptr};
  const uint64_t family;
  const bool waits;

 protected:
  ~SwapMember() = default;

  void refuse(const char* why) {
    if (!refusal_[0]) refusal_ = why;
  }
  void fail(NcclResult result, const char* why) {
    refuse(why);
    broken_ = result;
  }

  const NcclLibrary& library_;
  const CudaDriver& driver_;
  const SwapMode mode_;
  std::atomic<bool> prepared_{false}, ended_{false};
  bool asks_ = false;  // once prepared: the others are to be asked
  NcclResult broken_ = kNcclSuccess;
  const char* refusal_ = "";
  int size_ = 0, place_ = -1;
  int device_ = -1;
  CUcontext context_ = nullptr;
  SwapMeans* means_ = nullptr;
  collective::StagingShape shape_;

 private:
  bool make();
  bool find_context();
  bool find_means();
  bool make_voice();
  void make_kernels();
  bool make_staging();

  std::atomic<bool> preparing_{false};
};

}  // namespace forkpoint
