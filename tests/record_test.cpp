#include "lib/record.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <vector>

using namespace forkpoint;

namespace {

Site some_site() {
  return {Phase::backward, Kind::collective, Role::gradient, "blocks.3.mlp.fc1", "all_reduce", "weight.grad", "dp"};
}

Layout some_layout() { return {DType::bf16, {4, 64}, {}, {16, 64}, {4, 0}}; }

}  // namespace

TEST_CASE("every enum value has a name of its own, and phases and levels are found by it") {
  std::set<std::string_view> names;
  for (int i = 0; i < kPhaseCount; ++i) {
    names.insert(name(static_cast<Phase>(i)));
    CHECK(phase_from_name(name(static_cast<Phase>(i))) == static_cast<Phase>(i));
  }
  CHECK(names.size() == kPhaseCount);
  names.clear();
  for (int i = 0; i < kKindCount; ++i) names.insert(name(static_cast<Kind>(i)));
  CHECK(names.size() == kKindCount);
  names.clear();
  for (int i = 0; i < kRoleCount; ++i) names.insert(name(static_cast<Role>(i)));
  CHECK(names.size() == kRoleCount);
  CHECK(level_from_name("launch") == Level::launch);
  CHECK_FALSE(phase_from_name("forwards"));
  CHECK(name(static_cast<Phase>(200)) == "unknown");
}

TEST_CASE("a site's key changes with each of its fields and does not depend on where one name ends") {
  std::vector<Site> sites(9, some_site());
  sites[1].phase = Phase::forward;
  sites[2].kind = Kind::tensor;
  sites[3].role = Role::input;
  sites[4].layer = "blocks.3.mlp.fc";
  sites[4].op = "1all_reduce";
  sites[5].op = "all_gather";
  sites[6].tensor = "bias.grad";
  sites[7].communicator = "tp";
  sites[8].layer = "";
  std::set<std::pair<uint64_t, uint64_t>> keys;
  for (const Site& site : sites) {
    const Digest key = site_key(site);
    CHECK(key.a != 0);
    keys.insert({key.a, key.b});
  }
  CHECK(keys.size() == sites.size());
  CHECK(site_key(some_site()) == site_key(some_site()));
}

TEST_CASE("keys are the same in every build: they are compared between runs of different forkpoints") {
  CHECK(site_key(some_site()).a == 0xCD23DCBB10FE2A09ull);
  CHECK(site_key(some_site()).b == 0xBABCE210ADAF5F69ull);
  CHECK(op_key(some_site()) == 0xD262BC222C3098C8ull);
  CHECK(layout_key(some_layout()) == 0x6E6B2821F7CB7FD5ull);
  Record record;
  record.micro_step = 1;
  record.call = 2;
  record.digest = {3, 4};
  record.flags = kRecordRecompute;
  CHECK(tree_leaf({5, 6}, 7, record).a == 0x69B894951FAFB2DBull);
  CHECK(tree_leaf({5, 6}, 7, record).b == 0x3A1A5BBC9FED669Aull);
}

TEST_CASE("the op key is that of the op instance: kind, role and tensor do not matter, the rest does") {
  Site other = some_site();
  other.kind = Kind::tensor;
  other.role = Role::input;
  other.tensor = "input";
  CHECK(op_key(other) == op_key(some_site()));
  for (auto change : {+[](Site* s) { s->phase = Phase::forward; }, +[](Site* s) { s->layer = "x"; },
                      +[](Site* s) { s->op = "x"; }, +[](Site* s) { s->communicator = "x"; }}) {
    Site changed = some_site();
    change(&changed);
    CHECK(op_key(changed) != op_key(some_site()));
  }
}

TEST_CASE("a layout's key holds dtype, shape and place of the shard, but not the strides") {
  Layout strided = some_layout();
  strided.strides = {1, 4};
  CHECK(layout_key(strided) == layout_key(some_layout()));
  std::vector<Layout> layouts(7, some_layout());
  layouts[1].dtype = DType::f16;
  layouts[2].shape = {64, 4};
  layouts[3].shape = {4, 64, 1};
  layouts[4].global_shape = {64, 16};
  layouts[5].global_offset = {0, 4};
  layouts[6].global_shape.clear();
  layouts[6].global_offset.clear();
  std::set<uint64_t> keys;
  for (const Layout& layout : layouts) keys.insert(layout_key(layout));
  CHECK(keys.size() == layouts.size());
}

TEST_CASE("layouts are counted and written in words") {
  CHECK(element_count({DType::f32, {}, {}, {}, {}}) == 1);
  CHECK(element_count({DType::f32, {3, 0, 5}, {}, {}, {}}) == 0);
  CHECK(element_count({DType::f32, {8, 1024}, {}, {}, {}}) == 8192);
  CHECK(to_string(Layout{DType::bf16, {8, 1024}, {}, {}, {}}) == "bf16[8, 1024]");
  CHECK(to_string(some_layout()) == "bf16[4, 64] of [16, 64] at [4, 0]");
  CHECK(to_string(Layout{DType::f64, {}, {}, {}, {}}) == "f64[]");
}

TEST_CASE("scalars come back bit by bit") {
  for (double value : {0.0, -0.0, 1.5, std::numeric_limits<double>::denorm_min(),
                       std::numeric_limits<double>::infinity(), std::nan("0x123")}) {
    const double back = scalar_value(scalar_digest(value));
    CHECK(std::memcmp(&back, &value, sizeof(value)) == 0);
  }
  CHECK(scalar_digest(0.0) != scalar_digest(-0.0));
  CHECK(scalar_digest(1.0) != scalar_digest(std::nextafter(1.0, 2.0)));
}

TEST_CASE("a leaf changes with everything that identifies a record or is its value, and with nothing else") {
  Record record;
  record.digest = {11, 12};
  const Digest key = site_key(some_site());
  const Digest leaf = tree_leaf(key, 99, record);
  const auto changed = [&](auto change) {
    Record other = record;
    change(&other);
    return tree_leaf(key, 99, other);
  };
  std::set<std::pair<uint64_t, uint64_t>> leaves = {{leaf.a, leaf.b}};
  const auto add = [&](const Digest& digest) { leaves.insert({digest.a, digest.b}); };
  add(changed([](Record* r) { r->digest.a ^= 1; }));
  add(changed([](Record* r) { r->digest.b ^= 1; }));
  add(changed([](Record* r) { r->micro_step = 1; }));
  add(changed([](Record* r) { r->call = 1; }));
  add(changed([](Record* r) { r->flags = kRecordRecompute; }));
  add(tree_leaf({key.a ^ 1, key.b}, 99, record));
  add(tree_leaf({key.a, key.b ^ 1}, 99, record));
  add(tree_leaf(key, 98, record));
  CHECK(leaves.size() == 9);
  CHECK(changed([](Record* r) {
          r->site = 7;
          r->layout = 8;
          r->stats = {1, 2, 3};
        }) == leaf);
}

TEST_CASE("exchanging the values or the places of two records changes the sum of their leaves") {
  const Digest key = site_key(some_site());
  Site other_site = some_site();
  other_site.tensor = "bias.grad";
  const Digest other_key = site_key(other_site);
  Record a, b;
  a.digest = {1, 2};
  b.digest = {3, 4};
  CHECK(tree_leaf(key, 1, a) + tree_leaf(other_key, 1, b) != tree_leaf(key, 1, b) + tree_leaf(other_key, 1, a));
  CHECK(tree_leaf(key, 1, a) + tree_leaf(key, 2, b) != tree_leaf(key, 2, a) + tree_leaf(key, 1, b));
  Record later_a = a, later_b = b;
  later_a.call = later_b.call = 1;
  CHECK(tree_leaf(key, 1, a) + tree_leaf(key, 1, later_b) != tree_leaf(key, 1, b) + tree_leaf(key, 1, later_a));
}

TEST_CASE("of a million leaves that differ in one number no two are equal, in either lane") {
  std::vector<uint64_t> lane_a, lane_b;
  for (uint32_t i = 0; i < 1'000'000; ++i) {
    Record record;
    if (i % 4 == 0) record.call = i;
    if (i % 4 == 1) record.micro_step = static_cast<int>(i);
    if (i % 4 == 2) record.digest.a = i;
    if (i % 4 == 3) record.digest.b = i;
    const Digest leaf = tree_leaf({1, 2}, 3, record);
    lane_a.push_back(leaf.a);
    lane_b.push_back(leaf.b);
  }
  for (auto* lane : {&lane_a, &lane_b}) {
    std::sort(lane->begin(), lane->end());
    CHECK(std::adjacent_find(lane->begin(), lane->end()) == lane->end());
  }
}
