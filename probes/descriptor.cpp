#include "probes/descriptor.h"

#include <span>

#define FORKPOINT_PROBE_ITSELF 1
#include "probes/forkpoint.h"

namespace forkpoint {
namespace {

// No tensor is larger, so that byte counts and offsets stay far from overflow.
constexpr int64_t kMaxBytes = int64_t{1} << 62;

// false: negative, or more than kMaxBytes bytes.
bool count_elements(const int64_t* shape, int dims, int element_bytes, int64_t* elements) {
  bool empty = false;
  for (int d = 0; d < dims; ++d) {
    if (shape[d] < 0) return false;
    empty = empty || shape[d] == 0;
  }
  __int128 count = empty ? 0 : 1;
  for (int d = 0; d < dims && !empty; ++d) {
    count *= shape[d];
    if (count * element_bytes > kMaxBytes) return false;
  }
  *elements = static_cast<int64_t>(count);
  return true;
}

bool is_row_major(const int64_t* shape, const int64_t* strides, int dims) {
  int64_t expected = 1;
  for (int d = dims - 1; d >= 0; --d) {
    if (shape[d] != 1 && strides[d] != expected) return false;
    expected *= shape[d];
  }
  return true;
}

bool find_extent(CheckedTensor* tensor, int element_bytes) {
  const LayoutKey& layout = tensor->layout;
  tensor->end_offset = tensor->size_bytes;
  if (!layout.strides) return true;
  __int128 low = 0, high = 0;
  for (int d = 0; d < layout.dims; ++d) {
    const __int128 reach = static_cast<__int128>(layout.shape[d] - 1) * layout.strides[d] * element_bytes;
    (reach < 0 ? low : high) += reach;
    if (low < -kMaxBytes || high > kMaxBytes) return false;
  }
  tensor->lowest_offset = static_cast<int64_t>(low);
  tensor->end_offset = static_cast<int64_t>(high) + element_bytes;
  return true;
}

bool box_fits(const LayoutKey& layout, int element_bytes) {
  int64_t global_elements = 0;
  if (!count_elements(layout.global_shape, layout.dims, element_bytes, &global_elements)) return false;
  for (int d = 0; d < layout.dims; ++d) {
    const int64_t room = layout.global_shape[d] - layout.shape[d];
    if (layout.global_offset[d] < 0 || layout.global_offset[d] > room) return false;
  }
  return true;
}

std::span<const int64_t> numbers(const int64_t* first, int32_t dims) {
  return first ? std::span(first, static_cast<size_t>(dims)) : std::span<const int64_t>();
}

}  // namespace

bool is_role(int32_t role) { return role >= 0 && role < kRoleCount; }

TensorView CheckedTensor::view() const {
  const auto shape = numbers(layout.shape, layout.dims);
  const auto strides = numbers(layout.strides, layout.dims);
  if (!is_shard()) return whole_view(layout.dtype, shape, strides);
  return shard_view(layout.dtype, shape, strides, numbers(layout.global_shape, layout.dims),
                    numbers(layout.global_offset, layout.dims));
}

DigestResult CheckedTensor::digest() const {
  if (elements == 0) return {};
  if (!is_shard() && !layout.strides) return digest_bytes(data, static_cast<size_t>(size_bytes), layout.dtype);
  return digest_view(data, view());
}

Loss check_tensor(const forkpoint_tensor_desc* desc, CheckedTensor* tensor) {
  if (!desc || desc->struct_size < sizeof(forkpoint_tensor_desc)) return Loss::bad_descriptor;
  if (!desc->name) return Loss::bad_name;
  if (desc->dtype < 0 || desc->dtype >= kDTypeCount) return Loss::bad_dtype;
  if (!is_role(desc->role)) return Loss::bad_role;
  if (desc->device != FORKPOINT_HOST && desc->device != FORKPOINT_CUDA && !is_owned_on_device(desc->device)) return Loss::bad_device;
  if (desc->ndim < 0 || desc->ndim > kMaxDims || (desc->ndim > 0 && !desc->shape)) return Loss::bad_shape;

  tensor->role = static_cast<Role>(desc->role);
  tensor->on_device = desc->device != FORKPOINT_HOST;
  if (is_owned_on_device(desc->device)) tensor->owned_on = desc->device - kOwnedOnDevice;
  tensor->data = desc->data;
  tensor->stream = desc->stream;
  LayoutKey& layout = tensor->layout;
  layout.dtype = static_cast<DType>(desc->dtype);
  layout.dims = desc->ndim;
  layout.shape = desc->shape;
  const int element_bytes = size_bytes(layout.dtype);
  if (!count_elements(layout.shape, layout.dims, element_bytes, &tensor->elements)) return Loss::bad_shape;
  tensor->size_bytes = tensor->elements * element_bytes;
  if (tensor->elements > 0 && !desc->data) return Loss::bad_data;
  if (layout.dims > 0 && !desc->global_shape != !desc->global_offset) return Loss::bad_shard;
  if (layout.dims > 0 && desc->global_shape) {
    layout.global_shape = desc->global_shape;
    layout.global_offset = desc->global_offset;
    if (!box_fits(layout, element_bytes)) return Loss::bad_shard;
  }
  if (tensor->elements > 0 && desc->strides && !is_row_major(layout.shape, desc->strides, layout.dims)) {
    layout.strides = desc->strides;
  }
  return find_extent(tensor, element_bytes) ? Loss::count_ : Loss::bad_strides;
}

}  // namespace forkpoint
