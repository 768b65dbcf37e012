// Parameters of launches, known by digests only: which differ, and which differences mean nothing.
#include <doctest/doctest.h>

#include <cstring>

#include "lib/launch_params.h"

using namespace forkpoint;

namespace {

// A parameter block of 32-bit words; pointers at the places given are taken out, as the probe does it.
struct Block {
  std::vector<uint32_t> words = std::vector<uint32_t>(24, 7);
  std::vector<BufferRow> buffers;

  Block& set(size_t word, uint32_t value) {
    words[word] = value;
    return *this;
  }
  Block& address(size_t word, uint64_t value) {
    std::memcpy(&words[word], &value, 8);
    return *this;
  }
  Block& pointer(size_t word, uint64_t value, uint64_t allocation, uint64_t offset) {
    BufferRow row;
    row.place = static_cast<uint32_t>(word * 4), row.address = value, row.allocation = allocation, row.offset = offset;
    buffers.push_back(row);
    words[word] = words[word + 1] = 0;
    return *this;
  }
  LaunchRow row() const {
    LaunchRow out;
    out.param_bytes = static_cast<uint32_t>(words.size() * 4);
    out.params = digest_only(words.data(), words.size() * 4);
    return out;
  }
};

ParameterCheck compare(const Block& a, const Block& b) {
  return compare_parameters(a.row(), a.buffers, b.row(), b.buffers, true);
}

}  // namespace

TEST_CASE("equal parameters agree wherever their buffers lie") {
  const Block a = Block().pointer(0, 0x1000, 3, 0).pointer(4, 0x2010, 4, 16),
              b = Block().pointer(0, 0x7000, 9, 0).pointer(4, 0x8010, 8, 16);
  CHECK(compare(a, b).agree());
}

TEST_CASE("one or two words that differ are named, more are not") {
  const ParameterCheck one = compare(Block(), Block().set(6, 8));
  CHECK(one.values_differ);
  REQUIRE(one.words.size() == 1);
  CHECK(to_sentence(one.words) == "parameter bytes 24..27 differ by +1");
  const ParameterCheck wide = compare(Block().address(8, 0x7f0012345678), Block().address(8, 0x7e00a2345678));
  REQUIRE(wide.words.size() == 2);
  CHECK(wide.words[0].word == 8);
  CHECK(wide.words[1].word == 9);
  const ParameterCheck apart = compare(Block(), Block().set(2, 100).set(20, 3));
  REQUIRE(apart.words.size() == 2);
  CHECK(to_sentence(apart.words) == "parameter bytes 8..11 differ by +93, parameter bytes 80..83 differ by -4");
  const ParameterCheck many = compare(Block(), Block().set(2, 100).set(9, 9).set(20, 3));
  CHECK(many.values_differ);
  CHECK(many.words.empty());
}

TEST_CASE("a number that looks like a pointer in one run, or in both, is a number") {
  const uint64_t number = 0x7f0000001000;
  CHECK(compare(Block().pointer(4, number, 3, 64), Block().address(4, number)).agree());
  CHECK(compare(Block().address(4, number), Block().pointer(4, number, 3, 64)).agree());
  CHECK(compare(Block().pointer(4, number, 3, 64), Block().pointer(4, number, 5, 0)).agree());
  const ParameterCheck other = compare(Block().pointer(4, number, 3, 64), Block().address(4, number + 8));
  CHECK(other.values_differ);
  CHECK_FALSE(other.agree());
}

TEST_CASE("pointers agree in where they lead, not in their values") {
  const Block a = Block().pointer(0, 0x1000, 3, 0).pointer(4, 0x2000, 4, 0);
  const ParameterCheck offset = compare(a, Block().pointer(0, 0x5000, 3, 0).pointer(4, 0x6200, 4, 512));
  REQUIRE(offset.pointers.size() == 1);
  CHECK(offset.pointers[0] == "the pointer at parameter byte 16 leads 0 bytes into its buffer in run A, 512 in run B");
  const ParameterCheck aliased = compare(a, Block().pointer(0, 0x5000, 3, 0).pointer(4, 0x5000, 3, 0));
  REQUIRE(aliased.pointers.size() == 1);
  CHECK(aliased.pointers[0].find("lead to one buffer in run B, to two in run A") != std::string::npos);
}

TEST_CASE("parameters that could not be read are not said to agree") {
  Block a;
  LaunchRow row = a.row();
  row.flags = kLaunchParamsUnread;
  CHECK(compare_parameters(row, {}, a.row(), {}, true).unread);
  CHECK_FALSE(compare_parameters(row, {}, a.row(), {}, true).agree());
}

TEST_CASE("words that differed without effect explain a later difference in them, and in no other") {
  FreeWords free;
  free.learn("k", compare(Block(), Block().set(5, 1000)));
  CHECK(free.explain("k", compare(Block(), Block().set(5, 99))));
  CHECK_FALSE(free.explain("k", compare(Block(), Block().set(6, 99))));
  CHECK_FALSE(free.explain("k", compare(Block(), Block().set(5, 99).set(6, 1))));
  CHECK_FALSE(free.explain("other", compare(Block(), Block().set(5, 99))));
  CHECK_FALSE(free.explain("k", compare(Block(), Block().set(5, 99).set(6, 1).set(7, 1))));  // not to be located
  CHECK(free.seen("k") == 1);
}
