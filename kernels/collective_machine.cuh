// The Machine of collective_protocol.h on a GPU: a worker is a warp.
#pragma once

#include "kernels/collective_lines.h"
#include "kernels/collective_protocol.h"

namespace forkpoint::collective {

class DeviceMachine {
 public:
  static constexpr uint64_t kLinePeriod = 1ull << 30;

  __device__ DeviceMachine(const uint32_t* abort) : abort_(abort) {}

  __device__ static Share share() { return {threadIdx.x, kBlockThreads}; }
  __device__ static Share team() { return {threadIdx.x % 32, 32}; }
  __device__ static bool is_signaller() { return threadIdx.x < 32; }

  // Past L1, which sees nothing of what other devices write; and nothing here is read twice.
  __device__ static Vector load_staging(const char* from) {
    return as_vector(__ldcg(reinterpret_cast<const uint4*>(from)));
  }
  __device__ static Vector load_program(const char* from) { return load_staging(from); }
  __device__ static void store_staging(char* to, const Vector& vector) {
    *reinterpret_cast<uint4*>(to) = make_uint4(vector.word[0], vector.word[1], vector.word[2], vector.word[3]);
  }
  __device__ static void store_program(char* to, const Vector& vector) { store_staging(to, vector); }

  __device__ static void meet() { __syncthreads(); }

  // One fence for all lanes' stores: the warp waits until the block's writes have arrived wherever they went.
  __device__ void signal(char* address, uint64_t value) {
    __syncwarp();
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    if (address) asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  }
  __device__ bool await_signals(const char* base, uint32_t count, uint32_t except, uint64_t value) {
    for (uint32_t first = 0; first < count; first += 32) {
      const uint32_t index = first + threadIdx.x % 32;
      const bool wanted = index < count && index != except;
      for (;;) {
        uint64_t there = value;
        if (wanted)
          asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(there) : "l"(base + 8 * index) : "memory");
        if (__all_sync(~0u, there >= value)) break;
        if (!keep_waiting()) return false;
      }
    }
    __syncwarp();
    return true;
  }

  __device__ static void store_line(char* to, uint32_t low, uint32_t high, uint32_t mark) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %3, %2, %3};" ::"l"(to), "r"(low), "r"(high), "r"(mark)
                 : "memory");
  }
  __device__ static bool load_line(const char* from, uint32_t mark, uint32_t* low, uint32_t* high) {
    uint32_t first = 0, second = 0;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(*low), "=r"(first), "=r"(*high), "=r"(second)
                 : "l"(from)
                 : "memory");
    return first == mark && second == mark;
  }
  __device__ bool still_waiting() { return (++spins_ & 0xfff) != 0 || !is_aborted(); }
  __device__ static void settle() { __threadfence_system(); }

 private:
  __device__ static Vector as_vector(uint4 v) { return {{v.x, v.y, v.z, v.w}}; }
  __device__ bool is_aborted() const {
    uint32_t aborted = 0;
    if (abort_) asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(aborted) : "l"(abort_) : "memory");
    return aborted != 0;
  }
  // All lanes together: they wait in step. The flag lies in the host's memory, a microsecond away.
  __device__ bool keep_waiting() {
    if ((++spins_ & 0x3ff) != 0) return true;
    return !__any_sync(~0u, threadIdx.x % 32 == 0 && is_aborted());
  }

  const uint32_t* abort_;
  uint32_t spins_ = 0;
};

}  // namespace forkpoint::collective
