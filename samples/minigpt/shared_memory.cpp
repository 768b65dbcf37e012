#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>

#include "samples/minigpt/communicator.h"
#include "samples/minigpt/error.h"
#include "samples/minigpt/rendezvous.h"

namespace minigpt {
namespace {

constexpr int kMaxRanks = 256;
constexpr int64_t kSlotFloats = 64 * 1024;
constexpr uint64_t kMagic = 0x31545047494e494d;

static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

struct alignas(64) Seat {
  std::atomic<uint64_t> arrived;  // number of the last meeting that this rank came to
  int64_t count[2];               // floats in its slot
};
struct Header {
  uint64_t magic;
  int32_t size;
  std::atomic<uint32_t> bell;  // rung when all have arrived
  Seat seats[kMaxRanks];
};

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int timeout_ms) {
  const timespec timeout = {timeout_ms / 1000, timeout_ms % 1000 * 1'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}
void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

size_t segment_bytes(int ranks) { return sizeof(Header) + sizeof(float) * 2 * ranks * kSlotFloats; }

std::string first_content(int ranks) {
  std::string bytes(offsetof(Header, bell), '\0');
  std::memcpy(bytes.data() + offsetof(Header, magic), &kMagic, sizeof(kMagic));
  std::memcpy(bytes.data() + offsetof(Header, size), &ranks, sizeof(int32_t));
  return bytes;
}

RendezvousFile open_segment(const Options& options, const World& world) {
  if (world.size > kMaxRanks)
    throw UsageError(fmt::format("{} ranks: the CPU backend can do {}", world.size, kMaxRanks));
  const std::string path = rendezvous_path(options.rendezvous_dir, world);
  if (world.rank == 0) return RendezvousFile::create(path, first_content(world.size), segment_bytes(world.size));
  return RendezvousFile::join(path, world.rank, options.timeout_s);
}

class SharedMemoryCommunicator : public Communicator {
 public:
  SharedMemoryCommunicator(const Options& options, const World& world)
      : rank_(world.rank), size_(world.size), timeout_s_(options.timeout_s), file_(open_segment(options, world)) {
    const std::string expected = first_content(size_);
    if (file_.content(expected.size()) != expected)
      throw Error(fmt::format("rank 0 belongs to a job of another size or version than {} ranks", size_));
    void* memory = mmap(nullptr, segment_bytes(size_), PROT_READ | PROT_WRITE, MAP_SHARED, file_.file(), 0);
    if (memory == MAP_FAILED) throw Error(fmt::format("shared memory cannot be mapped: {}", std::strerror(errno)));
    header_ = static_cast<Header*>(memory);
    slots_ = reinterpret_cast<float*>(static_cast<char*>(memory) + sizeof(Header));
    barrier();
    if (rank_ == 0) file_.remove_name();
  }
  ~SharedMemoryCommunicator() override { munmap(header_, segment_bytes(size_)); }

  void all_reduce_mean(float* data, int64_t count, SumOrder order) override {
    for (int64_t done = 0; done < count; done += kSlotFloats)
      reduce_chunk(data + done, std::min(kSlotFloats, count - done), order);
  }

  void barrier() override {
    const uint64_t meeting = ++meetings_;
    header_->seats[rank_].arrived.store(meeting);
    if (!first_absent(meeting)) {
      header_->bell.fetch_add(1);
      futex_wake_all(header_->bell);
      return;
    }
    for (;;) {
      const uint32_t seen = header_->bell.load();
      if (!first_absent(meeting)) return;
      futex_wait(header_->bell, seen, 100);
      check_absent(meeting);
    }
  }

 private:
  float* slot(int rank) { return slots_ + (turn_ * size_ + rank) * kSlotFloats; }

  // Two sets of slots take turns: a rank that fills one has left the meeting of the other, which all had come to after
  // they had read what was in this one before. So one meeting a chunk is enough.
  void reduce_chunk(float* data, int64_t count, SumOrder order) {
    std::memcpy(slot(rank_), data, count * sizeof(float));
    header_->seats[rank_].count[turn_] = count;
    barrier();
    for (int other = 0; other < size_; ++other)
      if (header_->seats[other].count[turn_] != count)
        throw Error(fmt::format("averages {} floats, rank {} averages {}: they are not at the same place", count, other,
                                header_->seats[other].count[turn_]));
    for (int i = 0; i < size_; ++i) {
      const float* addend = slot(order == SumOrder::forward ? i : size_ - 1 - i);
      if (i == 0)
        std::memcpy(data, addend, count * sizeof(float));
      else
        for (int64_t k = 0; k < count; ++k) data[k] += addend[k];
    }
    for (int64_t k = 0; k < count; ++k) data[k] /= static_cast<float>(size_);
    turn_ ^= 1;
  }

  // A pointer, as a rank may be 0.
  const Seat* first_absent(uint64_t meeting) const {
    for (int rank = 0; rank < size_; ++rank)
      if (header_->seats[rank].arrived.load() < meeting) return &header_->seats[rank];
    return nullptr;
  }

  // Throws when a rank that the others wait for is gone, or did not come in time to the first meeting.
  void check_absent(uint64_t meeting) const {
    const bool late = std::chrono::steady_clock::now() - started_ > std::chrono::seconds(timeout_s_);
    for (int rank = 0; rank < size_; ++rank) {
      const std::atomic<uint64_t>& arrived = header_->seats[rank].arrived;
      if (arrived.load() >= meeting) continue;
      if (arrived.load() == 0 && late) throw Error(fmt::format("rank {} did not come within {} s", rank, timeout_s_));
      if ((arrived.load() > 0 || rank == 0) && !file_.is_alive(rank) && arrived.load() < meeting)
        throw Error(fmt::format("rank {} has ended, and this rank cannot go on without it", rank));
    }
  }

  int rank_, size_, timeout_s_;
  RendezvousFile file_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  Header* header_ = nullptr;
  float* slots_ = nullptr;
  uint64_t meetings_ = 0;
  int turn_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_shared_memory_communicator(const Options& options, const World& world) {
  return std::make_unique<SharedMemoryCommunicator>(options, world);
}

}  // namespace minigpt
