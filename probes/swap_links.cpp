// How the members reach each other's memory, and the proof that they do. The kernels only store to other devices (16
// bytes, of which halves of 8 stay whole, and flags behind fences of system scope): what PCI Express does as well as
// NVLink, so no link needs atomic operations. But that a driver maps memory does not say that stores arrive (a switch
// or an IOMMU may send them astray): so each member stores, as the kernels do, into all others' memory, and all look.
#include <strings.h>

#include <cstdlib>
#include <cstring>

#include "lib/digest_mix.h"
#include "probes/swap_record.h"

namespace forkpoint {
namespace {

// What the user lets NCCL use. Levels between NVLink and all ask how far apart two devices are on PCI Express, which
// NCCL knows and we do not: then it is NCCL that moves the data. unset: NCCL would look at that as well.
enum class Allowed { never, nvlink, unset, all };

Allowed allowed_peers() {
  const char *disable = getenv("NCCL_P2P_DISABLE"), *level = getenv("NCCL_P2P_LEVEL");
  if (disable && atoi(disable) != 0) return Allowed::never;
  if (!level || !*level) return Allowed::unset;
  if (strcasecmp(level, "LOC") == 0 || strcmp(level, "0") == 0) return Allowed::never;
  return strcasecmp(level, "SYS") == 0 || atoi(level) >= 4 ? Allowed::all : Allowed::nvlink;
}

SwapToken token_for(uint64_t token, int place) {
  return {{token, mix64(token + static_cast<uint64_t>(place) + 1)}};
}

}  // namespace

// NVLink has atomic operations, PCI Express not all of them. A device that this process does not see
// (CUDA_VISIBLE_DEVICES) may be reached all the same, since CUDA 10.1, but nothing can be asked about it.
SwapCommunicator::Link SwapCommunicator::link_to(const Record& peer) const {
  int count = 0, access = 0, atomics = 0;
  if (!driver_.cuDeviceGetUuid_ || !driver_.cuDeviceGetP2PAttribute_ ||
      driver_.cuDeviceGetCount_(&count) != CUDA_SUCCESS)
    return Link::unknown;
  for (CUdevice device = 0; device < count; ++device) {
    CUuuid uuid = {};
    if (driver_.cuDeviceGetUuid_(&uuid, device) != CUDA_SUCCESS) continue;
    if (memcmp(&uuid, &peer.uuid, sizeof(uuid)) != 0) continue;
    if (device == device_) return Link::own;
    const CUresult can =
        driver_.cuDeviceGetP2PAttribute_(&access, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, device_, device);
    if (can != CUDA_SUCCESS || !access) return Link::none;
    const CUresult knows =
        driver_.cuDeviceGetP2PAttribute_(&atomics, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, device_, device);
    return knows == CUDA_SUCCESS && atomics ? Link::nvlink : Link::other;
  }
  return Link::unknown;
}

bool SwapCommunicator::map_peer(const Record& peer, int place) {
  const Allowed allowed = allowed_peers();
  const Link link = link_to(peer);
  const bool may = link == Link::own || link == Link::nvlink ? allowed != Allowed::never
                   : link == Link::unknown                   ? allowed >= Allowed::unset
                                                             : link == Link::other && allowed == Allowed::all;
  if (!may) return false;
  const bool is_ours = peer.process == host_records()[1 + place_].process;
  if (!is_ours) {
    CUdeviceptr opened = 0;
    if (driver_.cuIpcOpenMemHandle_(&opened, peer.shared, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) != CUDA_SUCCESS)
      return false;
    means_->opened[place] = opened;
    reached_[place] = reinterpret_cast<void*>(opened);
    return true;
  }
  reached_[place] = reinterpret_cast<void*>(peer.address);
  if (peer.device == device_) return peer.context == reinterpret_cast<uint64_t>(context_);
  int can = 0;
  if (driver_.cuDeviceCanAccessPeer_(&can, device_, peer.device) != CUDA_SUCCESS || !can) return false;
  const CUresult result = driver_.cuCtxEnablePeerAccess_(reinterpret_cast<CUcontext>(peer.context), 0);
  return result == CUDA_SUCCESS || result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

bool SwapCommunicator::map_peers(const Record* records) {
  reached_[place_] = reinterpret_cast<void*>(means_->staging);
  for (int i = 0; i < size_; ++i) {
    if (records[i].host != records[place_].host) return false;
  }
  for (int i = 0; i < size_; ++i) {
    if (i != place_ && !map_peer(records[i], i)) return false;
  }
  return true;
}

// By the multiprocessors, as the kernels do it: a copy might go another way. The staging memory's first bytes, a place
// for each member, are not in use yet.
bool SwapCommunicator::write_tokens() {
  for (int i = 0; i < size_; ++i) {
    if (i == place_) continue;
    const SwapToken token = token_for(token_, i);
    const uint64_t at = kTokensAt + static_cast<uint64_t>(i) * sizeof(token);
    memcpy(means_->host + at, &token, sizeof(token));
    const void* from = reinterpret_cast<const void*>(means_->host_on_device + at);
    collective::CollectiveSpec spec;
    spec.dtype = DType::i8;
    spec.count = sizeof(token);
    collective::CollectiveLaunch launch;
    char* to = static_cast<char*>(reached_[i]) + static_cast<uint64_t>(place_) * sizeof(token);
    if (!collective::plan_local_sum(spec, &from, 1, to, 1, &launch)) return false;
    if (!means_->kernels->run(driver_, launch, means_->exchange)) return false;
  }
  return true;
}

bool SwapCommunicator::has_all_tokens(const Record* records) const {
  for (int i = 0; i < size_; ++i) {
    SwapToken arrived;
    memcpy(&arrived, means_->host + kArrivedAt + static_cast<uint64_t>(i) * sizeof(arrived), sizeof(arrived));
    if (i != place_ && !(arrived == token_for(records[i].token, place_))) return false;
  }
  return true;
}

// The kernels' counters begin at zero. Before this member has said that all is well nobody else writes there.
void SwapCommunicator::clear_tokens() {
  const uint64_t bytes = static_cast<uint64_t>(size_) * sizeof(SwapToken);
  proven_ = driver_.cuMemsetD8Async_(means_->staging, 0, bytes, means_->exchange) == CUDA_SUCCESS && proven_;
}

}  // namespace forkpoint
