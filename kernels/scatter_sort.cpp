#include "kernels/scatter_sort.h"

#include <bit>

namespace forkpoint {

using namespace scatter;

namespace {

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
int64_t chunk_of(int64_t count) { return divide_up(divide_up(count, kSortTile), kMostChunks) * kSortTile; }
int64_t counts_words(int64_t count) { return divide_up(count, chunk_of(count)) << kMostDigitBits; }

// Two buffers take turns so that the last digit writes what is asked for.
void choose_buffers(const SortWork& work, int digit, int digit_count, SortWork* one) {
  uint32_t* const between = work.scratch + counts_words(work.index.count());
  const auto keys = [&](int d) { return (digit_count - 1 - d) % 2 == 0 ? work.keys : between; };
  const auto places = [&](int d) {
    return (digit_count - 1 - d) % 2 == 0 ? static_cast<uint32_t*>(work.places) : between + work.index.count();
  };
  one->from_index = digit == 0;
  one->widens = work.wide_places && digit == digit_count - 1;
  one->keys_in = digit == 0 ? nullptr : keys(digit - 1);
  one->places_in = digit == 0 ? nullptr : places(digit - 1);
  one->keys_out = keys(digit);
  one->places_out = places(digit);
}

}  // namespace

size_t sort_scratch_bytes(int64_t count) {
  if (count == 0) return 0;
  return static_cast<size_t>(counts_words(count) + 2 * count) * 4;
}

SortPlan plan_sort(const SortWork& work) {
  SortPlan plan;
  const int64_t count = work.index.count();
  if (count == 0) return plan;
  const bool leaves_out = !(work.index.flags & kIndexCheck) || work.index.padding >= 0;
  const int bits = std::bit_width(static_cast<uint64_t>(work.index.limit() - (leaves_out ? 0 : 1)));
  plan.digit_count = bits == 0 ? 1 : (bits + kMostDigitBits - 1) / kMostDigitBits;
  const int64_t chunk = chunk_of(count);
  plan.blocks = static_cast<uint32_t>(divide_up(count, chunk));
  for (int digit = 0, shift = 0; digit < plan.digit_count; ++digit) {
    SortWork& one = plan.digits[digit] = work;
    choose_buffers(work, digit, plan.digit_count, &one);
    one.shift = shift;
    one.bits = (bits - shift + plan.digit_count - 1 - digit) / (plan.digit_count - digit);
    if (one.bits < 1) one.bits = 1;
    shift += one.bits;
    one.chunk = chunk;
    one.alone = count <= kSortTile;
  }
  return plan;
}

}  // namespace forkpoint
