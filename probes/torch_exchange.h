// The table of C functions by which torch (from 2.10 on) tells of a tensor without any Python object being made:
// DLPack's exchange API (https://dmlc.github.io/dlpack, version 1.3), found as Tensor.__dlpack_c_exchange_api__. One
// call in place of some eight attributes and methods.
#pragma once

#include <cstdint>

#include "lib/dtype.h"
#include "probes/python_api.h"

namespace forkpoint {

// As DLTensor, whose layout is the same in all versions 1.x.
struct ExchangedTensor {
  void* data;
  int32_t device_kind;  // ExchangedDevice
  int32_t device;
  int32_t dims;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  const int64_t* shape;  // these two: torch's, while the tensor lives and nobody changes it
  const int64_t* strides;
  uint64_t byte_offset;
};

enum ExchangedDevice : int32_t { kExchangedCpu = 1, kExchangedCuda = 2 };

struct ExchangedType {
  DType dtype;
  bool pairs;  // a complex type that has no DType: its parts, as one more dimension
};

// nullptr: a type that this does not know.
const ExchangedType* exchanged_type(const ExchangedTensor& tensor);

class TorchExchange {
 public:
  // tensor_type: torch.Tensor. REQUIRES: the GIL. No Python error is left behind.
  void find(const Python& python, PythonObject* tensor_type);
  bool is_found() const { return describe_ != nullptr; }

  // false: torch says no (a Python error may be set), or says it in a way that is not known here. REQUIRES: is_found(),
  // and that the object is a tensor.
  bool describe(PythonObject* object, ExchangedTensor* tensor) const {
    return describe_(object, tensor) == 0 && (tensor->dims == 0 || (tensor->shape && tensor->strides));
  }
  // The stream that torch uses now. false: not known (a Python error may be set).
  bool current_stream(int32_t device, void** stream) const { return stream_(kExchangedCuda, device, stream) == 0; }

 private:
  int (*describe_)(void* object, ExchangedTensor* tensor) = nullptr;
  int (*stream_)(int32_t device_kind, int32_t device, void** stream) = nullptr;
};

}  // namespace forkpoint
