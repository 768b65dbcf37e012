// Operands: what one suspect op was handed and what it left, value by value. The probe saves them where it is asked to
// (FORKPOINT_SAVE), a safetensors file a tensor, in RUN/operands; any safetensors reader opens them. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "lib/record.h"

namespace forkpoint {

inline constexpr char kOperandFolder[] = "operands";

// What a saved tensor is: a record's site, or a buffer of a launch (then `op` is the kernel, and `tensor` its place).
struct OperandKey {
  int rank = 0;
  int64_t step = 0;
  int32_t micro_step = 0;
  Phase phase = Phase::forward;
  Role role = Role::other;
  std::string layer, op, tensor;
  auto operator<=>(const OperandKey&) const = default;
};

struct Operand {
  OperandKey key;
  uint32_t call = 0;  // n-th of its key in the run
  DType dtype = DType::raw;
  std::vector<int64_t> shape;
  std::vector<int64_t> global_shape, global_offset;  // of a shard; else empty
  uint64_t size_bytes = 0;
  std::filesystem::path file;
  uint64_t data_at = 0;  // where in the file its bytes begin, in logical order
};

// What stands in the file before the tensor's bytes. Throws Error for a name that is no UTF-8.
std::string operand_header(const OperandKey& key, const Layout& layout, uint64_t size_bytes);

// "rank-0002-000007.safetensors": the n-th that the rank saved, so that names in order are in the order of time.
std::string operand_file_name(int rank, uint64_t number);

// Of one run, in the order of time within each rank; nothing where it saved none. Throws Error for a file that is damaged
// or cut short.
std::vector<Operand> list_operands(const std::filesystem::path& run_directory);
std::vector<std::byte> load_operand(const Operand& operand);

}  // namespace forkpoint
