#include <fmt/core.h>

#include <algorithm>

#include "lib/digest.h"
#include "lib/digest_raw.h"
#include "lib/digest_view_plan.h"
#include "lib/error.h"

namespace forkpoint {
namespace {

void check_dims(size_t dims, size_t strides) {
  if (dims > static_cast<size_t>(kMaxDims)) {
    throw Error(fmt::format("tensor view: {} dimensions, expected at most {}", dims, kMaxDims));
  }
  if (strides != 0 && strides != dims) {
    throw Error(fmt::format("tensor view: {} strides for {} dimensions", strides, dims));
  }
}

void check_shape(std::span<const int64_t> shape) {
  for (int64_t extent : shape) {
    if (extent < 0) throw Error(fmt::format("tensor view: a dimension of {} elements", extent));
  }
}

// Unsigned, so that a nonsensical shape wraps instead of overflowing.
void row_major(std::span<const int64_t> shape, int64_t* strides) {
  uint64_t step = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = static_cast<int64_t>(step);
    step *= static_cast<uint64_t>(shape[d]);
  }
}

TensorView local_view(DType dtype, std::span<const int64_t> shape, std::span<const int64_t> strides) {
  check_dims(shape.size(), strides.size());
  check_shape(shape);
  TensorView view;
  view.dtype = dtype;
  view.dims = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape);
  if (strides.empty()) {
    row_major(shape, view.strides);
  } else {
    std::copy(strides.begin(), strides.end(), view.strides);
  }
  return view;
}

// Elements of one run: contiguous in memory and in the logical tensor, or one at a time.
void add_run(const char* base, const TensorView& view, const ViewPlan& plan, int64_t offset, int64_t position,
             RawDigest& out) {
  const int64_t size = size_bytes(view.dtype);
  const char* start = base + offset * size;
  const auto first_byte = static_cast<uint64_t>(position) * static_cast<uint64_t>(size);
  if (plan.inner.stride == 1 && plan.inner.position == 1) {
    add_contiguous(start, static_cast<size_t>(plan.inner.extent * size), view.dtype, first_byte, out);
    return;
  }
  for (int64_t i = 0; i < plan.inner.extent; ++i) {
    add_contiguous(start + i * plan.inner.stride * size, static_cast<size_t>(size), view.dtype,
                   first_byte + static_cast<uint64_t>(i * plan.inner.position * size), out);
  }
}

}  // namespace

TensorView whole_view(DType dtype, std::span<const int64_t> shape, std::span<const int64_t> strides) {
  TensorView view = local_view(dtype, shape, strides);
  row_major(shape, view.positions);
  return view;
}

TensorView shard_view(DType dtype, std::span<const int64_t> shape, std::span<const int64_t> strides,
                      std::span<const int64_t> global_shape, std::span<const int64_t> global_offset) {
  TensorView view = local_view(dtype, shape, strides);
  if (global_shape.size() != shape.size() || global_offset.size() != shape.size()) {
    throw Error(fmt::format("shard: {} dimensions within a tensor of {} at an offset of {}", shape.size(),
                            global_shape.size(), global_offset.size()));
  }
  check_shape(global_shape);
  row_major(global_shape, view.positions);
  for (size_t d = 0; d < shape.size(); ++d) {
    if (global_offset[d] < 0 || global_offset[d] > global_shape[d] || shape[d] > global_shape[d] - global_offset[d]) {
      throw Error(fmt::format("shard: dimension {} spans {} + {} of {} elements", d, global_offset[d], shape[d],
                              global_shape[d]));
    }
    view.first_position += global_offset[d] * view.positions[d];
  }
  return view;
}

ViewPlan plan_view(const TensorView& view) {
  ViewPlan plan;
  plan.elements = 1;
  for (int d = 0; d < view.dims; ++d) {
    plan.elements *= view.shape[d];
    if (view.shape[d] == 1) continue;
    const ViewDim dim{view.shape[d], view.strides[d], view.positions[d]};
    ViewDim* last = plan.dims > 0 ? &plan.dim[plan.dims - 1] : nullptr;
    // One step of the outer dimension is the whole of the inner one, in memory and in the logical tensor.
    if (last && last->stride == dim.stride * dim.extent && last->position == dim.position * dim.extent) {
      *last = {last->extent * dim.extent, dim.stride, dim.position};
    } else {
      plan.dim[plan.dims++] = dim;
    }
  }
  if (plan.dims > 0) plan.inner = plan.dim[--plan.dims];
  return plan;
}

DigestResult digest_view(const void* base, const TensorView& view) {
  RawDigest raw;
  const ViewPlan plan = plan_view(view);
  if (plan.elements == 0) return finish(view.dtype, raw);
  int64_t index[kMaxDims] = {};
  int64_t offset = 0;
  int64_t position = view.first_position;
  for (;;) {
    add_run(static_cast<const char*>(base), view, plan, offset, position, raw);
    int d = plan.dims - 1;
    for (; d >= 0; --d) {
      offset += plan.dim[d].stride;
      position += plan.dim[d].position;
      if (++index[d] < plan.dim[d].extent) break;
      offset -= plan.dim[d].stride * plan.dim[d].extent;
      position -= plan.dim[d].position * plan.dim[d].extent;
      index[d] = 0;
    }
    if (d < 0) break;
  }
  return finish(view.dtype, raw);
}

}  // namespace forkpoint
