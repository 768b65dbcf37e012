#include "tests/support/launch_generator.h"

#include <fmt/format.h>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

constexpr size_t kLiveTensors = 200;
constexpr int kKernelsAnOp = 3;
constexpr int kKinds = 24;  // of kernels

uint64_t mixed(uint64_t a, uint64_t b) { return mix64(mix64(a) ^ b); }

// What kernel number `slot` of a layer is does not depend on the layer.
LaunchRow kernel_row(uint64_t slot) {
  LaunchRow row;
  row.stream = 7;
  row.grid[0] = static_cast<uint32_t>(mixed(slot, 1) % 3 == 0 ? 4096 : 132 + mixed(slot, 2) % 2000);
  row.grid[1] = mixed(slot, 3) % 4 == 0 ? 8 : 1;
  row.grid[2] = 1;
  row.block[0] = mixed(slot, 4) % 3 == 0 ? 512 : 128;
  row.block[1] = row.block[2] = 1;
  row.shared_bytes = mixed(slot, 5) % 3 == 0 ? 99328 : 0;
  row.param_bytes = static_cast<uint32_t>(32 + 8 * (mixed(slot, 6) % 60));
  row.params = {mixed(slot, 7), mixed(slot, 8)};
  return row;
}

}  // namespace

LaunchGenerator::Tensor& LaunchGenerator::allocate(uint64_t bytes, LaunchColumns* launches) {
  Tensor tensor;
  for (size_t i = free_.size(); i-- > 0 && tensor.address == 0;) {
    if (free_[i].bytes != bytes) continue;
    tensor = free_[i];
    free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (tensor.address == 0) {
    tensor.address = next_address_;
    next_address_ += (bytes + 511) / 512 * 512;
  }
  tensor.bytes = bytes;
  tensor.allocation = ++last_allocation_;
  if (options_.allocation_rows) {
    LaunchRow row;
    row.kind = LaunchKind::allocate;
    row.stream = 7;
    row.object = tensor.allocation;
    row.bytes = bytes;
    launches->rows.push_back(row);
  }
  live_.push_back(tensor);
  return live_.back();
}

void LaunchGenerator::release_oldest(LaunchColumns* launches) {
  if (options_.allocation_rows) {
    LaunchRow row;
    row.kind = LaunchKind::release;
    row.stream = 7;
    row.object = live_.front().allocation;
    launches->rows.push_back(row);
  }
  free_.push_back(live_.front());
  live_.erase(live_.begin());
}

void LaunchGenerator::add_buffer(Tensor* tensor, uint32_t place, bool is_new_value, LaunchColumns* launches) {
  if (is_new_value || !options_.unchanged_inputs) tensor->digest = {mix64(draw()), mix64(draw())};
  BufferRow buffer;
  buffer.place = place;
  buffer.allocation = tensor->allocation;
  buffer.address = tensor->address;
  buffer.bytes = tensor->bytes;
  buffer.digest = tensor->digest;
  launches->buffers.push_back(buffer);
  ++launches->rows.back().buffers;
}

LaunchColumns LaunchGenerator::next_step(HashStreamWriter* writer) {
  LaunchColumns launches;
  const int a_layer = options_.launches_per_step / options_.layers;
  for (int i = 0; weights_.empty() && i < a_layer * options_.layers / 10; ++i)
    weights_.push_back(allocate(4u << 20, &launches));
  for (int i = 0; i < options_.launches_per_step; ++i) {
    const int layer = i / a_layer;  // what is left over stands for the optimizer
    const auto slot = static_cast<uint64_t>(layer == options_.layers ? i : i % a_layer);
    const bool makes_one = mixed(slot, 9) % 20 < 8, reads_weight = mixed(slot, 10) % 10 == 0;
    Tensor* made = nullptr;
    if (makes_one) made = &allocate(mixed(slot, 11) % 3 == 0 ? 8u << 20 : 512 << mixed(slot, 12) % 12, &launches);
    const Site site{layer == options_.layers ? Phase::optimizer
                    : slot < 110             ? Phase::forward
                                             : Phase::backward,
                    Kind::launch,
                    Role::other,
                    layer == options_.layers ? "" : fmt::format("blocks.{}", layer),
                    fmt::format("aten::op_{}", slot / kKernelsAnOp),
                    fmt::format("_ZN2at6native8kernel{:02}ILi4EfEEvT_", mixed(slot, 13) % kKinds),
                    ""};
    LaunchRow row = kernel_row(slot);
    row.site = writer->site_id(site);
    if (mixed(slot, 14) % 50 == 0) row.params.a = draw();  // a seed
    launches.rows.push_back(row);
    const auto place = static_cast<uint32_t>(8 * (mixed(slot, 15) % 6));
    if (makes_one) add_buffer(made, place, true, &launches);
    Tensor* input = reads_weight ? &weights_[static_cast<size_t>(i) / 10 % weights_.size()]
                                 : &live_[live_.size() - 1 - mixed(slot, 16) % 4 % live_.size()];
    if (!makes_one || mixed(slot, 17) % 16 < 15) add_buffer(input, place + 8, false, &launches);
    while (live_.size() > kLiveTensors) release_oldest(&launches);
  }
  return launches;
}

}  // namespace forkpoint
