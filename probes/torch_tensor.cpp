#include "probes/torch_tensor.h"

#include <atomic>
#include <new>

#include "lib/dtype.h"
#include "probes/descriptor.h"
#include "probes/torch_exchange.h"

namespace forkpoint {
namespace {

struct TorchDType {
  const char* name;
  DType dtype;
  bool pairs = false;  // a complex type that has no DType: its parts, as one more dimension
};
// The usual ones first. What is not here (quantised types, bits) has no bytes that mean something by themselves.
constexpr TorchDType kDTypes[] = {
    {"float32", DType::f32},      {"bfloat16", DType::bf16},        {"float16", DType::f16},
    {"int64", DType::i64},        {"bool", DType::boolean},         {"float64", DType::f64},
    {"int32", DType::i32},        {"uint8", DType::u8},             {"float8_e4m3fn", DType::f8e4m3},
    {"float8_e5m2", DType::f8e5m2}, {"int8", DType::i8},            {"int16", DType::i16},
    {"complex64", DType::c64},    {"complex128", DType::c128},      {"complex32", DType::f16, true},
    {"uint16", DType::u16},       {"uint32", DType::u32},           {"uint64", DType::u64},
    {"float4_e2m1fn_x2", DType::f4x2}, {"float8_e4m3fnuz", DType::raw}, {"float8_e5m2fnuz", DType::raw},
    {"float8_e8m0fnu", DType::raw},
};
constexpr int kDTypeNames = sizeof(kDTypes) / sizeof(kDTypes[0]);

// No memory of a tensor lies below: a small address is what an offset into freed storage gives (or malloc of a program
// that is not relocated, which is looked at more closely).
constexpr uint64_t kLowAddress = uint64_t{1} << 40;

// What is asked of torch, looked up once. References are kept for ever.
struct Torch {
  PythonObject* tensor = nullptr;     // types whose attributes are torch's own
  PythonObject* parameter = nullptr;
  PythonObject* buffer = nullptr;     // from 2.5 on
  PythonObject* dispatch = nullptr;   // Tensor.__torch_dispatch__: that of a type without one of its own
  PythonObject* dtypes[kDTypeNames] = {};  // nullptr: this torch has none
  PythonObject* function_modes = nullptr;  // how many modes are entered; nullptr: this torch has none
  PythonObject* no_functions = nullptr;    // a context manager under which no mode and no subclass is asked
  PythonObject* raw_stream = nullptr;      // nullptr: built without CUDA
  TorchExchange exchange;                  // from 2.10 on
  // Names of attributes and methods.
  PythonObject *is_cpu, *is_cuda, *get_device, *dtype, *shape, *stride, *data_ptr, *is_neg, *is_conj, *storage, *nbytes,
      *torch_dispatch, *enter, *exit;
};
constinit std::atomic<const Torch*> known_torch{nullptr};

PythonObject* attribute(const Python& python, PythonObject* of, const char* name) {
  PythonObject* value = of ? python.PyObject_GetAttrString(of, name) : nullptr;
  if (!value) python.PyErr_Clear();
  return value;
}

void name_attributes(const Python& python, Torch* torch) {
  const auto named = [&](const char* text) { return python.PyUnicode_InternFromString(text); };
  torch->is_cpu = named("is_cpu");
  torch->is_cuda = named("is_cuda");
  torch->get_device = named("get_device");
  torch->dtype = named("dtype");
  torch->shape = named("shape");
  torch->stride = named("stride");
  torch->data_ptr = named("data_ptr");
  torch->is_neg = named("is_neg");
  torch->is_conj = named("is_conj");
  torch->storage = named("untyped_storage");
  torch->nbytes = named("nbytes");
  torch->torch_dispatch = named("__torch_dispatch__");
  torch->enter = named("__enter__");
  torch->exit = named("__exit__");
}

// nullptr: torch is not imported, or not yet whole.
const Torch* find_torch(const Python& python) {
  if (const Torch* known = known_torch.load(std::memory_order_acquire)) return known;
  PythonObject* module = python.PyDict_GetItemString(python.PyImport_GetModuleDict(), "torch");  // borrowed
  PythonObject* tensor = attribute(python, module, "Tensor");
  auto* torch = tensor ? new (std::nothrow) Torch : nullptr;
  if (!torch) return nullptr;
  torch->tensor = tensor;
  PythonObject* nn = attribute(python, module, "nn");
  torch->parameter = attribute(python, nn, "Parameter");
  torch->buffer = attribute(python, nn, "Buffer");
  torch->dispatch = attribute(python, tensor, "__torch_dispatch__");
  for (int i = 0; i < kDTypeNames; ++i) torch->dtypes[i] = attribute(python, module, kDTypes[i].name);
  PythonObject* native = attribute(python, module, "_C");
  torch->function_modes = attribute(python, native, "_len_torch_function_stack");
  torch->no_functions = attribute(python, native, "DisableTorchFunction");
  torch->raw_stream = attribute(python, native, "_cuda_getCurrentRawStream");
  torch->exchange.find(python, tensor);
  name_attributes(python, torch);
  const Torch* first = nullptr;
  const bool whole = torch->parameter && known_torch.compare_exchange_strong(first, torch);
  return whole ? torch : first;  // what was made in vain stays
}

// While it lives, attributes of tensors come from torch itself.
class NoTorchFunctions {
 public:
  NoTorchFunctions(const Python& python, const Torch& torch, bool wanted)
      : python_(python), torch_(torch), context_(python) {
    if (!wanted || !torch.no_functions) return;
    PythonObject* context = python.PyObject_CallObject(torch.no_functions, nullptr);
    if (context) context_.reset(context);
    const PythonRef entered(python,
                            context ? python.PyObject_CallMethodObjArgs(context, torch.enter, nullptr) : nullptr);
    if (!entered) python.PyErr_Clear();
  }
  ~NoTorchFunctions() {
    if (!context_) return;
    const PythonErrorKept kept(python_);
    PythonObject* none = python_.none;
    const PythonRef left(python_,
                         python_.PyObject_CallMethodObjArgs(context_.get(), torch_.exit, none, none, none, nullptr));
    if (!left) python_.PyErr_Clear();
  }
  NoTorchFunctions(const NoTorchFunctions&) = delete;
  NoTorchFunctions& operator=(const NoTorchFunctions&) = delete;

 private:
  const Python& python_;
  const Torch& torch_;
  PythonRef context_;
};

class Describer {
 public:
  Describer(const Python& python, const Torch& torch, PythonObject* object, TorchTensor* tensor)
      : python_(python), torch_(torch), object_(object), tensor_(*tensor) {}

  bool run() {
    const NoTorchFunctions quiet(python_, torch_, functions_are_overridden());
    if (!is_readable_) return false;
    begin();
    if (torch_.exchange.is_found()) {
      ExchangedTensor exchanged;
      if (torch_.exchange.describe(object_, &exchanged)) {
        const ExchangedType* type = exchanged_type(exchanged);
        if (type && take_device(exchanged)) return take(exchanged, *type);
      }
      python_.PyErr_Clear();  // whatever that is, torch's attributes say so
      begin();
    }
    const TorchDType* type = nullptr;
    if (!find_device() || !(type = find_dtype())) return false;
    return !is_lazy(type->dtype, type->pairs) && find_shape(*type) && find_data();
  }

 private:
  void begin() {
    tensor_.desc = {};
    tensor_.desc.struct_size = sizeof(tensor_.desc);
  }

  // false: not a device that is known here; a Python error may be set.
  bool take_device(const ExchangedTensor& exchanged) {
    tensor_.desc.device = FORKPOINT_HOST;
    if (exchanged.device_kind != kExchangedCuda) return exchanged.device_kind == kExchangedCpu;
    set_cuda_device(exchanged.device);
    return torch_.exchange.current_stream(exchanged.device, &tensor_.desc.stream);
  }

  bool take(const ExchangedTensor& exchanged, const ExchangedType& type) {
    const int32_t dims = exchanged.dims;
    if (dims < 0 || dims + (type.pairs ? 1 : 0) > kMaxDims || is_lazy(type.dtype, type.pairs)) return false;
    tensor_.desc.dtype = static_cast<int32_t>(type.dtype);
    for (int32_t d = 0; d < dims; ++d) set_dimension(d, exchanged.shape[d], exchanged.strides[d], type.pairs);
    set_dimensions(dims, type.pairs);
    return set_data(reinterpret_cast<uint64_t>(exchanged.data) + exchanged.byte_offset);
  }

  bool is_true(PythonObject* name) {
    const PythonRef value(python_, python_.PyObject_GetAttr(object_, name));
    return value.get() == python_.yes;
  }
  bool call_is_true(PythonObject* name) {
    const PythonRef value(python_, python_.PyObject_CallMethodObjArgs(object_, name, nullptr));
    return value.get() == python_.yes;
  }
  // false: not a number; an error is set.
  bool number(PythonObject* object, int64_t* value) {
    if (!object) return false;
    *value = python_.PyLong_AsLongLong(object);
    return *value != -1 || !python_.PyErr_Occurred();
  }

  // Decides by the type alone whether the object is a tensor with memory of its own. true: attributes must be asked for
  // with care, since a subclass or a mode wants to be told of each.
  bool functions_are_overridden() {
    const PythonRef type(python_, python_.PyObject_Type(object_));
    const bool plain = type.get() == torch_.tensor || type.get() == torch_.parameter ||
                       (torch_.buffer && type.get() == torch_.buffer);
    is_readable_ = plain || is_plain_inside(type.get());
    return is_readable_ && (!plain || modes_are_entered());
  }
  // A subclass that only overrides functions. One with __torch_dispatch__ wraps others, and has no bytes to read.
  bool is_plain_inside(PythonObject* type) {
    if (!type || !python_.PyType_IsSubtype(type, torch_.tensor)) return false;
    const PythonRef dispatch(python_, python_.PyObject_GetAttr(type, torch_.torch_dispatch));
    return dispatch && dispatch.get() == torch_.dispatch;
  }
  bool modes_are_entered() {
    if (!torch_.function_modes) return false;
    const PythonRef modes(python_, python_.PyObject_CallObject(torch_.function_modes, nullptr));
    int64_t count = 0;
    return !number(modes.get(), &count) || count != 0;
  }

  bool find_device() {
    if (is_true(torch_.is_cuda)) {
      const PythonRef index(python_, python_.PyObject_CallMethodObjArgs(object_, torch_.get_device, nullptr));
      if (!index || !torch_.raw_stream) return false;
      const PythonRef stream(python_, python_.PyObject_CallFunctionObjArgs(torch_.raw_stream, index.get(), nullptr));
      if (!stream) return false;
      const int64_t device = python_.PyLong_AsLongLong(index.get());
      set_cuda_device(device);
      tensor_.desc.stream = reinterpret_cast<void*>(python_.PyLong_AsUnsignedLongLong(stream.get()));
      return !python_.PyErr_Occurred();
    }
    tensor_.desc.device = FORKPOINT_HOST;
    return is_true(torch_.is_cpu);
  }

  void set_cuda_device(int64_t device) {
    const bool is_numbered = device >= 0 && device < kMostOwnedDevices;
    tensor_.desc.device = is_numbered ? kOwnedOnDevice + static_cast<int32_t>(device) : FORKPOINT_CUDA;
  }

  const TorchDType* find_dtype() {
    const PythonRef dtype(python_, python_.PyObject_GetAttr(object_, torch_.dtype));
    for (int i = 0; dtype && i < kDTypeNames; ++i) {
      if (torch_.dtypes[i] != dtype.get()) continue;
      tensor_.desc.dtype = static_cast<int32_t>(kDTypes[i].dtype);
      return &kDTypes[i];
    }
    return nullptr;
  }

  // Its bytes are not yet what it stands for.
  bool is_lazy(DType dtype, bool pairs) {
    const bool complex = pairs || dtype == DType::c64 || dtype == DType::c128;
    return call_is_true(torch_.is_neg) || (complex && call_is_true(torch_.is_conj));
  }

  bool find_shape(const TorchDType& type) {
    const PythonRef shape(python_, python_.PyObject_GetAttr(object_, torch_.shape));
    const PythonRef strides(python_, python_.PyObject_CallMethodObjArgs(object_, torch_.stride, nullptr));
    if (!shape || !strides) return false;
    const ptrdiff_t dims = python_.PyTuple_Size(shape.get());
    if (dims < 0 || dims + (type.pairs ? 1 : 0) > kMaxDims || python_.PyTuple_Size(strides.get()) != dims) return false;
    for (ptrdiff_t d = 0; d < dims; ++d) {
      int64_t size = 0, stride = 0;
      if (!number(python_.PyTuple_GetItem(shape.get(), d), &size)) return false;
      if (!number(python_.PyTuple_GetItem(strides.get(), d), &stride)) return false;
      set_dimension(d, size, stride, type.pairs);
    }
    set_dimensions(static_cast<int32_t>(dims), type.pairs);
    return true;
  }

  void set_dimension(ptrdiff_t d, int64_t size, int64_t stride, bool pairs) {
    tensor_.shape[d] = size;
    tensor_.strides[d] = pairs ? 2 * stride : stride;
    elements_ = size == 0 ? 0 : elements_;
  }
  void set_dimensions(int32_t dims, bool pairs) {
    tensor_.pairs = pairs;
    if (pairs) {
      tensor_.shape[dims] = 2;
      tensor_.strides[dims] = 1;
    }
    tensor_.desc.ndim = dims + (pairs ? 1 : 0);
    tensor_.desc.shape = tensor_.shape;
    tensor_.desc.strides = tensor_.strides;
  }

  bool find_data() {
    const PythonRef address(python_, python_.PyObject_CallMethodObjArgs(object_, torch_.data_ptr, nullptr));
    if (!address) return false;  // functorch's wrappers, sparse tensors
    const uint64_t data = python_.PyLong_AsUnsignedLongLong(address.get());
    return !python_.PyErr_Occurred() && set_data(data);
  }

  bool set_data(uint64_t data) {
    tensor_.desc.data = reinterpret_cast<const void*>(data);
    return elements_ == 0 || (data != 0 && (data >= kLowAddress || has_storage()));
  }

  // FSDP frees the storage of parameters whose shape stays.
  bool has_storage() {
    const PythonRef storage(python_, python_.PyObject_CallMethodObjArgs(object_, torch_.storage, nullptr));
    if (!storage) return false;
    const PythonRef bytes(python_, python_.PyObject_CallMethodObjArgs(storage.get(), torch_.nbytes, nullptr));
    int64_t count = 0;
    return number(bytes.get(), &count) && count > 0;
  }

  const Python& python_;
  const Torch& torch_;
  PythonObject* object_;
  TorchTensor& tensor_;
  bool is_readable_ = false;
  int64_t elements_ = 1;  // 0: none; else at least this many
};

// false: not a sequence of `count` numbers.
bool read_numbers(const Python& python, PythonObject* sequence, int count, int64_t* numbers) {
  const PythonRef tuple(python, python.PySequence_Tuple(sequence));
  if (!tuple || python.PyTuple_Size(tuple.get()) != count) return false;
  for (int d = 0; d < count; ++d) {
    numbers[d] = python.PyLong_AsLongLong(python.PyTuple_GetItem(tuple.get(), d));
    if (numbers[d] == -1 && python.PyErr_Occurred()) return false;
  }
  return true;
}

}  // namespace

bool describe_torch_tensor(const Python& python, PythonObject* object, TorchTensor* tensor) {
  const Torch* torch = find_torch(python);
  const bool described = torch && Describer(python, *torch, object, tensor).run();
  python.PyErr_Clear();
  return described;
}

bool describe_shard(const Python& python, PythonObject* global_shape, PythonObject* global_offset,
                    TorchTensor* tensor) {
  const int dims = tensor->desc.ndim - (tensor->pairs ? 1 : 0);
  const bool good = read_numbers(python, global_shape, dims, tensor->global_shape) &&
                    read_numbers(python, global_offset, dims, tensor->global_offset);
  if (good) {
    if (tensor->pairs) {
      tensor->global_shape[dims] = 2;
      tensor->global_offset[dims] = 0;
    }
    tensor->desc.global_shape = tensor->global_shape;
    tensor->desc.global_offset = tensor->global_offset;
  }
  python.PyErr_Clear();
  return good;
}

}  // namespace forkpoint
