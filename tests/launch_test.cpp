// What two launches must have in common to count as the same, and what their kernels are called.
#include "lib/launch.h"

#include <doctest/doctest.h>

#include <functional>
#include <set>

#include "lib/digest_mix.h"

using namespace forkpoint;

namespace {

struct Example {
  Digest site{1, 2};
  uint64_t index = 3;
  LaunchRow row;
  std::vector<BufferRow> buffers;

  Example() {
    row.flags = kLaunchLegacyStream;
    row.site = 4;
    row.micro_step = 1;
    row.stream = 5;
    for (uint32_t i = 0; i < 3; ++i) {
      row.grid[i] = 6 + i;
      row.block[i] = 9 + i;
    }
    row.shared_bytes = 12;
    row.param_bytes = 13;
    row.params = {14, 15};
    row.object = 16;
    row.bytes = 17;
    row.retry_of = 18;
    row.buffers = 2;
    for (uint32_t i = 0; i < 2; ++i) {
      BufferRow buffer;
      buffer.place = 8 * i;
      buffer.flags = i == 0 ? kBufferRead : kBufferWritten;
      buffer.allocation = 20 + i;
      buffer.offset = 22 + i;
      buffer.address = 24 + i;
      buffer.start = 26 + i;
      buffer.bytes = 28 + i;
      buffer.digest = {30 + i, 32 + i};
      buffers.push_back(buffer);
    }
  }
  Digest leaf() const { return launch_leaf(site, index, row, buffers.data()); }
};

Digest leaf_with(const std::function<void(Example*)>& change) {
  Example example;
  change(&example);
  return example.leaf();
}

// Every field that must be equal, as a reference to it.
template <typename Visit>
void visit_fields(Visit visit) {
  visit(
      "site.a", [](Example & e) -> auto& { return e.site.a; });
  visit(
      "site.b", [](Example & e) -> auto& { return e.site.b; });
  visit(
      "index", [](Example & e) -> auto& { return e.index; });
  visit(
      "flags", [](Example & e) -> auto& { return e.row.flags; });
  visit(
      "micro_step", [](Example & e) -> auto& { return e.row.micro_step; });
  visit(
      "stream", [](Example & e) -> auto& { return e.row.stream; });
  visit(
      "grid[0]", [](Example & e) -> auto& { return e.row.grid[0]; });
  visit(
      "grid[1]", [](Example & e) -> auto& { return e.row.grid[1]; });
  visit(
      "grid[2]", [](Example & e) -> auto& { return e.row.grid[2]; });
  visit(
      "block[0]", [](Example & e) -> auto& { return e.row.block[0]; });
  visit(
      "block[1]", [](Example & e) -> auto& { return e.row.block[1]; });
  visit(
      "block[2]", [](Example & e) -> auto& { return e.row.block[2]; });
  visit(
      "shared_bytes", [](Example & e) -> auto& { return e.row.shared_bytes; });
  visit(
      "param_bytes", [](Example & e) -> auto& { return e.row.param_bytes; });
  visit(
      "params.a", [](Example & e) -> auto& { return e.row.params.a; });
  visit(
      "params.b", [](Example & e) -> auto& { return e.row.params.b; });
  visit(
      "object", [](Example & e) -> auto& { return e.row.object; });
  visit(
      "bytes", [](Example & e) -> auto& { return e.row.bytes; });
  visit(
      "retry_of", [](Example & e) -> auto& { return e.row.retry_of; });
  visit(
      "buffer.place", [](Example & e) -> auto& { return e.buffers[1].place; });
  visit(
      "buffer.allocation", [](Example & e) -> auto& { return e.buffers[1].allocation; });
  visit(
      "buffer.offset", [](Example & e) -> auto& { return e.buffers[1].offset; });
  visit(
      "buffer.start", [](Example & e) -> auto& { return e.buffers[1].start; });
  visit(
      "buffer.bytes", [](Example & e) -> auto& { return e.buffers[1].bytes; });
  visit(
      "buffer.digest.a", [](Example & e) -> auto& { return e.buffers[1].digest.a; });
  visit(
      "buffer.digest.b", [](Example & e) -> auto& { return e.buffers[1].digest.b; });
}

}  // namespace

TEST_CASE("a leaf differs in both lanes when any bit of any field but an address does") {
  const Digest leaf = Example().leaf();
  std::set<uint64_t> seen{leaf.a, leaf.b};
  size_t changes = 0;
  visit_fields([&](const char* name, auto field) {
    CAPTURE(name);
    Example example;
    for (size_t bit = 0; bit < 8 * sizeof(field(example)); ++bit) {
      Example changed;
      auto& value = field(changed);
      value = static_cast<std::remove_reference_t<decltype(value)>>(value ^ (uint64_t{1} << bit));
      const Digest other = changed.leaf();
      CHECK(other.a != leaf.a);
      CHECK(other.b != leaf.b);
      seen.insert(other.a);
      seen.insert(other.b);
      ++changes;
    }
  });
  CHECK(changes > 1000);
  CHECK(seen.size() == 2 * (changes + 1));  // no two changes look alike
  for (int kind = 1; kind < kLaunchKindCount; ++kind) {
    CHECK(leaf_with([&](Example* e) { e->row.kind = static_cast<LaunchKind>(kind); }) != leaf);
  }
  for (int bit = 0; bit < 8; ++bit) {
    CHECK(leaf_with([&](Example* e) { e->buffers[0].flags ^= static_cast<uint8_t>(1u << bit); }) != leaf);
  }
}

TEST_CASE(
    "addresses are in no leaf: neither a pointer, nor the site's id in this stream, nor a digest over addresses") {
  const Digest leaf = Example().leaf();
  CHECK(leaf_with([](Example* e) { e->buffers[0].address += 512; }) == leaf);
  CHECK(leaf_with([](Example* e) { e->row.site = 99; }) == leaf);
  const auto table = [](uint64_t lane) {
    return leaf_with([&](Example* e) {
      e->buffers[1].flags |= kBufferAddresses;
      e->buffers[1].digest.a = lane;
    });
  };
  CHECK(table(1) == table(2));
  CHECK(table(1) != leaf);
}

TEST_CASE("a leaf differs when values change places") {
  const Digest leaf = Example().leaf();
  CHECK(leaf_with([](Example* e) { std::swap(e->row.grid, e->row.block); }) != leaf);
  CHECK(leaf_with([](Example* e) { std::swap(e->row.params.a, e->row.params.b); }) != leaf);
  CHECK(leaf_with([](Example* e) { std::swap(e->buffers[0], e->buffers[1]); }) != leaf);
  CHECK(leaf_with([](Example* e) { std::swap(e->buffers[0].digest, e->buffers[1].digest); }) != leaf);
  CHECK(leaf_with([](Example* e) { e->row.buffers = 1; }) != leaf);
  // One more buffer of zeros is one more buffer.
  CHECK(leaf_with([](Example* e) { e->buffers.emplace_back(), e->row.buffers = 3; }) != leaf);
}

TEST_CASE("the sum of a step differs when two launches change places or a buffer moves to the next") {
  Example first, second;
  second.index = first.index + 1;
  second.row.stream = 77;
  const Digest sum = first.leaf() + second.leaf();
  std::swap(first.index, second.index);
  CHECK(first.leaf() + second.leaf() != sum);
  std::swap(first.index, second.index);
  second.buffers.insert(second.buffers.begin(), first.buffers.back());
  first.row.buffers = 1;
  second.row.buffers = 3;
  CHECK(first.leaf() + second.leaf() != sum);
}

TEST_CASE("the leaf is part of the format: it does not change") {
  // Computed by a few lines of Python from the description in FORMAT.md.
  CHECK(Example().leaf() == Digest{0xDAE7C21B745E49E0ull, 0xDB17ACB34415BFD2ull});
  CHECK(launch_leaf({}, 0, {}, nullptr) == Digest{0x0A74A8D11FAE9A9Cull, 0x379C446B4530071Cull});
}

TEST_CASE("every kind has a name of its own") {
  std::set<std::string_view> names;
  for (int kind = 0; kind < kLaunchKindCount; ++kind) names.insert(name(static_cast<LaunchKind>(kind)));
  CHECK(names.size() == kLaunchKindCount);
  CHECK(name(LaunchKind::retry) == "retry");
  CHECK(name(LaunchKind::kernel) == "kernel");
  CHECK(name(static_cast<LaunchKind>(kLaunchKindCount)) == "unknown");
}

TEST_CASE("a mangled kernel name is made readable, anything else stays") {
  CHECK(demangled("_Z5plaini") == "plain(int)");
  CHECK(demangled("_ZN2at6native6kernelILi4EfEEvT0_") == "void at::native::kernel<4, float>(float)");
  for (const char* text :
       {"sm90_xmma_gemm_bf16bf16", "triton_poi_fused_add_0", "cuMemcpyAsync", "", "_Zbroken", "_Z"}) {
    CHECK(demangled(text) == text);
    CHECK(short_kernel_name(text) == text);
  }
}

TEST_CASE("the short name of a kernel has no return type, scope, template arguments or parameters") {
  struct Case {
    const char *mangled, *name;
  };
  const Case cases[] = {
      {"_Z5plaini", "plain"},
      // void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(...)
      {"_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_",
       "vectorized_elementwise_kernel"},
      // void at::native::(anonymous namespace)::hidden<int>(int*)
      {"_ZN2at6native12_GLOBAL__N_16hiddenIiEEvPT_", "hidden"},
      // A lambda of a function's parameters stands in the template arguments.
      {"_ZN2at6native18elementwise_kernelILi128EZNS0_15gpu_kernel_implIZNS0_2goERNS0_2ItEEUliE_EEvS4_RKT_EUliE_EEviT0_",
       "elementwise_kernel"},
      // bool template argument made by a comparison: ">" that closes nothing
      {"_ZN2at6native2bbILb1EEEvv", "bb"},
      {"_ZNK2at6native1SclEi", "operator()"},
      {"_ZNK2at6native1SltIiEEvT_", "operator<"},
      {"_ZN2at6native1SptEv", "operator->"},
      {"_ZNK2at6native1ScvbEv", "operator bool"},
      {"_Z11my_operatorIiEvT_", "my_operator"},
      // std::pair<int, int>* at::native::pp<int>(int)
      {"_ZN2at6native2ppIiEEPSt4pairIT_S3_ES3_", "pp"},
      {"_ZN7cutlass7Kernel2I10cutlass_80EEvNT_6ParamsE", "Kernel2"},
  };
  for (const Case& one : cases) {
    CAPTURE(demangled(one.mangled));
    CHECK(short_kernel_name(one.mangled) == one.name);
  }
}

TEST_CASE("no bytes in a name are a danger") {
  uint64_t random = 7;
  for (int i = 0; i < 20000; ++i) {
    std::string text = "_ZN2at6native18elementwise_kernelILi128EZNS0_2goERNS0_2ItEEUliE_EEviT0_";
    for (int k = 0; k < 4; ++k) {
      random = mix64(random);
      text[2 + random % (text.size() - 2)] = "NILE_SZUlv0123456789KPRabcdop<>()"[random / 256 % 33];
    }
    CHECK_FALSE(short_kernel_name(text).empty());
  }
}
