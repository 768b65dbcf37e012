// FORKPOINT_SAVE on a launch, on the fake libcuda: what it was handed and what it left are kept, and nothing else.
#include <doctest/doctest.h>

#include <algorithm>

#include "lib/operand_compare.h"
#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

struct Saved {
  TempFolder folder;
  probe_test::Outcome outcome;
  std::vector<Operand> operands;

  explicit Saved(const std::string& what) {
    outcome = run_program({FORKPOINT_PROGRAM, "record", "-o", folder.run(), "--level", "launch", "--save-operands", what, "--",
                           client_path("launch_client"), client_path("libcuda.so.1"), "steps"},
                          {{"FORKPOINT_CUPTI", client_path("libcupti.so.13")}, {"FORKPOINT_PROBE", probe_path()}});
    INFO(outcome.err);
    REQUIRE(outcome.status == 0);
    operands = list_operands(folder.run());
  }
};

}  // namespace

TEST_CASE("a launch's buffers are kept as they were before it and after it") {
  const Saved saved("step=2;launch=0");
  REQUIRE(saved.operands.size() >= 2);
  const auto is_before = [](const Operand& operand) { return operand.key.tensor.ends_with("before"); };
  const auto befores = std::count_if(saved.operands.begin(), saved.operands.end(), is_before);
  CHECK(befores > 0);
  CHECK(2 * befores == static_cast<long>(saved.operands.size()));
  bool changed = false;
  for (const Operand& operand : saved.operands) {
    CHECK(operand.key.step == 2);
    CHECK(operand.key.op == "scale");
    for (const Operand& other : saved.operands) {
      const bool is_pair = is_before(operand) && !is_before(other) && operand.size_bytes == other.size_bytes &&
                           other.key.tensor.starts_with(operand.key.tensor.substr(0, operand.key.tensor.find(',')));
      changed |= is_pair && load_operand(operand) != load_operand(other);
    }
  }
  CHECK(changed);  // it scales what it is handed
}

TEST_CASE("what a launch leaves has the digest of its row") {
  const Saved saved("step=2;launch=0");
  const auto stream = open_stream(saved.folder.run());
  std::vector<Digest> digests;
  for (const Operand& operand : saved.operands) digests.push_back(digest_only(load_operand(operand).data(), operand.size_bytes));
  LaunchColumns rows;
  for (size_t i = 0; i < stream->steps().size(); ++i) {
    if (stream->steps()[i].step == 2) stream->read_launches(i, &rows);
  }
  REQUIRE(rows.rows.size() > 0);
  bool found = false;
  for (uint32_t i = 0; i < rows.rows[0].buffers; ++i) {
    found |= std::find(digests.begin(), digests.end(), rows.buffers[i].digest) != digests.end();
  }
  CHECK(found);
}

TEST_CASE("a launch that never comes leaves no operands, and two equal runs' operands are equal") {
  CHECK(Saved("step=2;launch=999").operands.empty());
  const Saved one("step=1;launch=0"), other("step=1;launch=0");
  const auto pairs = compare_operands(one.folder.run(), other.folder.run(), DType::f32);
  REQUIRE(!pairs.empty());
  for (const OperandPair& pair : pairs) CHECK(!pair.differs());
}
