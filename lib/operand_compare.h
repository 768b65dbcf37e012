// One operand of two runs, element by element: how many differ, where, and by how much. Pure; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lib/operand_file.h"

namespace forkpoint {

// What the values of one side are like.
struct ValueRange {
  double least = 0, greatest = 0;  // among the finite ones; meaningful when finite > 0
  uint64_t finite = 0, nan = 0, infinite = 0;
};

// Elements are compared bit by bit: -0.0 and 0.0 differ, and so do two NaN of other payloads. A complex number counts as
// two elements. ulp: places between two values in the order of all values of the type (integers: their difference).
struct ElementReport {
  DType dtype = DType::raw;
  uint64_t elements = 0;
  uint64_t differing = 0;
  uint64_t first = 0, last = 0;          // logical indices of the outermost that differ; meaningful when differing > 0
  uint64_t runs = 0;                     // how many stretches of neighbours the differing ones make
  ValueRange a, b;
  uint64_t nan_moved = 0;                // elements that are NaN in one run alone
  uint64_t payload_only = 0;             // both NaN, other bits
  uint64_t sign_of_zero_only = 0;        // 0.0 and -0.0
  static constexpr int kUlpClasses = 5;  // 1, 2 to 3, 4 to 15, 16 to 255, more
  std::array<uint64_t, kUlpClasses> ulp = {};
  uint64_t most_ulp = 0;                 // among elements that are numbers in both
  double most_difference = 0;            // absolute, among finite ones
  bool same_values_other_order = false;  // one is a permutation of the other
};

// REQUIRES: both hold elements * size_bytes(dtype) bytes.
ElementReport compare_elements(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b);

// Indices per dimension of a logical index; of `shape`.
std::vector<int64_t> position_of(uint64_t index, const std::vector<int64_t>& shape);

// "37 of 4,096 elements differ, first at [3, 17]: 36 by 1 ulp, 1 by 2 to 3; values -2.1 to 3.4 in both runs"
std::string sentence(const ElementReport& report, const std::vector<int64_t>& shape);

// The operands of one op in two runs, side by side. What only one run saved, or of other form, has no report and says why.
struct OperandPair {
  OperandKey key;
  uint32_t call = 0;
  std::vector<int64_t> shape;
  std::optional<ElementReport> report;
  std::string why_not;
  bool differs() const { return !report || report->differing > 0; }
};
// In the order of run A's files. Bytes without a type (a launch's buffers) are compared as `untyped`. Throws Error.
std::vector<OperandPair> compare_operands(const std::filesystem::path& run_a, const std::filesystem::path& run_b,
                                          DType untyped = DType::raw);

}  // namespace forkpoint
