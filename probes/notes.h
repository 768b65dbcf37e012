// Coverage limits and gaps in words that are only known while the program runs, each kept once: what a framework's bridge
// could not see or do. Any thread may add; the writer thread reads. The entries are never freed, so that no reader can be
// in the middle of one that goes.
#pragma once

#include <atomic>
#include <cstdint>

#include "probes/losses.h"

namespace forkpoint {

struct Note {
  const char* what = "";
  const char* detail = "";
  StepRange when;  // of a gap
};

class NoteList {
 public:
  static constexpr uint32_t kMost = 256;

  // The one with these words. detail: nullptr counts as empty. nullptr: too many, or no memory. Words are cut at kMaxBytes.
  Note* add(const char* what, const char* detail);
  // The n-th in order of arrival; nullptr: there are fewer.
  Note* at(uint32_t n) const { return n < kMost ? notes_[n].load(std::memory_order_acquire) : nullptr; }
  // In the child of a fork.
  void forget() {
    for (auto& note : notes_) note.store(nullptr, std::memory_order_relaxed);
  }

 private:
  static constexpr uint32_t kMaxBytes = 1000;
  std::atomic<Note*> notes_[kMost] = {};
};

struct Notes {
  NoteList limits, gaps;
  // A recording begins: what happened before is not its own.
  void forget_when() {
    for (uint32_t i = 0; Note* note = gaps.at(i); ++i) note->when.reset();
  }
};

}  // namespace forkpoint
