// Do two launches of a kernel have the same parameters? Only a digest of the parameter block is recorded, with pointers
// taken out; where few words differ, which ones follows from the digests alone. Pure functions and plain values.
// Internal to diff.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "lib/digest.h"
#include "lib/launch.h"

namespace forkpoint {

struct ParameterCheck {
  bool unread = false;            // they could not be read in one of the runs: nothing is known
  bool size_differs = false;      // of the parameter block
  bool values_differ = false;     // of what is no pointer
  std::vector<WordChange> words;  // which 32-bit words of the block, where one or two are all
  std::vector<std::string>
      one_sided;  // of the words that differ: what looks like a pointer in one run only, as sentences
  std::vector<std::string> pointers;  // what differs in where pointers lead, as sentences
  bool agree() const { return !unread && !size_differs && !values_differ && pointers.empty(); }
};

// thorough: also looks for any two words that explain the difference (milliseconds), else only for neighbours.
// is_pointer: of the places at which both runs have a buffer, those where it is one; without it, all.
ParameterCheck compare_parameters(const LaunchRow& a, std::span<const BufferRow> buffers_a, const LaunchRow& b,
                                  std::span<const BufferRow> buffers_b, bool thorough,
                                  const std::function<bool(uint32_t place)>& is_pointer = {});

// One or two words whose change explains the difference of two digests; empty: there are none, or more than one way.
std::vector<WordChange> find_changed_words(const Digest& a, const Digest& b, uint64_t n_words, bool any_two);

// "parameter bytes 24..27 differ by +1"
std::string to_sentence(const std::vector<WordChange>& words);

// Words of a kernel's parameters that were seen to differ between launches whose outputs all agreed: padding that the
// host left as it was. A difference there alone says nothing.
class FreeWords {
 public:
  void learn(const std::string& kernel, const ParameterCheck& check);
  void add(const FreeWords& other);
  bool explain(const std::string& kernel, const ParameterCheck& check) const;
  uint64_t seen(const std::string& kernel) const;  // launches whose parameters differed and whose outputs agreed

 private:
  struct Words {
    std::set<uint64_t> words;
    uint64_t launches = 0;
  };
  std::map<std::string, Words> kernels_;
};

}  // namespace forkpoint
