#include "probes/torch_exchange.h"

namespace forkpoint {
namespace {

struct Version {
  uint32_t major, minor;
};

// As DLPackExchangeAPI: the first two members are there in all versions, the others in versions 1.x.
struct ExchangeTable {
  Version version;
  const ExchangeTable* older;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*describe)(void* object, ExchangedTensor* tensor);  // may be missing
  int (*current_stream)(int32_t device_kind, int32_t device, void** stream);
};

struct Known {
  uint8_t code, bits;
  uint16_t lanes;
  ExchangedType type;
};
constexpr uint8_t kInt = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6, kE4m3fn = 10,
                  kE4m3fnuz = 11, kE5m2 = 12, kE5m2fnuz = 13, kE8m0 = 14, kE2m1 = 17;
// The usual ones first.
constexpr Known kKnown[] = {
    {kFloat, 32, 1, {DType::f32, false}},    {kBfloat, 16, 1, {DType::bf16, false}},
    {kFloat, 16, 1, {DType::f16, false}},    {kInt, 64, 1, {DType::i64, false}},
    {kBool, 8, 1, {DType::boolean, false}},  {kFloat, 64, 1, {DType::f64, false}},
    {kInt, 32, 1, {DType::i32, false}},      {kUnsigned, 8, 1, {DType::u8, false}},
    {kE4m3fn, 8, 1, {DType::f8e4m3, false}}, {kE5m2, 8, 1, {DType::f8e5m2, false}},
    {kInt, 8, 1, {DType::i8, false}},        {kInt, 16, 1, {DType::i16, false}},
    {kComplex, 64, 1, {DType::c64, false}},  {kComplex, 128, 1, {DType::c128, false}},
    {kComplex, 32, 1, {DType::f16, true}},   {kUnsigned, 16, 1, {DType::u16, false}},
    {kUnsigned, 32, 1, {DType::u32, false}}, {kUnsigned, 64, 1, {DType::u64, false}},
    {kE2m1, 4, 2, {DType::f4x2, false}},     {kE4m3fnuz, 8, 1, {DType::raw, false}},
    {kE5m2fnuz, 8, 1, {DType::raw, false}},  {kE8m0, 8, 1, {DType::raw, false}},
};

}  // namespace

const ExchangedType* exchanged_type(const ExchangedTensor& tensor) {
  for (const Known& known : kKnown) {
    if (known.code == tensor.type_code && known.bits == tensor.type_bits && known.lanes == tensor.type_lanes)
      return &known.type;
  }
  return nullptr;
}

void TorchExchange::find(const Python& python, PythonObject* tensor_type) {
  const PythonRef capsule(python, python.PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__"));
  const void* found = capsule ? python.PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api") : nullptr;
  python.PyErr_Clear();
  const auto* table = static_cast<const ExchangeTable*>(found);
  while (table && table->version.major > 1) table = table->older;
  if (!table || table->version.major != 1 || !table->describe || !table->current_stream) return;
  describe_ = table->describe;
  stream_ = table->current_stream;
}

}  // namespace forkpoint
