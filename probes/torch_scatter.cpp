#include "probes/torch_scatter.h"

namespace forkpoint {
namespace {

constexpr int kNumbers = 16;

template <typename T>
T* address(int64_t number) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(number));
}

ScatterCall call_of(const int64_t* numbers, double alpha) {
  ScatterCall call;
  call.stream = address<void>(numbers[0]);
  call.type = static_cast<ScatterType>(numbers[1]);
  ScatterWork& work = call.work;
  work.flags = static_cast<uint32_t>(numbers[2]);
  work.src = address<const void>(numbers[3]);
  work.out = address<void>(numbers[4]);
  work.rows = address<const int64_t>(numbers[5]);
  work.weights = address<const void>(numbers[6]);
  work.starts = address<uint32_t>(numbers[7]);
  work.partials = address<void>(numbers[8]);
  work.keys = {address<const void>(numbers[9]), numbers[10], numbers[11] != 0};
  work.out_rows = numbers[12];
  work.columns = numbers[13];
  work.src_stride = numbers[14];
  work.out_stride = numbers[15];
  work.alpha = alpha;
  return call;
}

}  // namespace

PythonObject* scatter_for_torch(const Python& python, PythonObject* numbers, double alpha) {
  const PythonRef tuple(python, python.PySequence_Tuple(numbers));
  if (!tuple) return nullptr;
  int64_t values[kNumbers] = {};
  bool good = python.PyTuple_Size(tuple.get()) == kNumbers;
  for (int i = 0; good && i < kNumbers; ++i)
    values[i] = python.PyLong_AsLongLong(python.PyTuple_GetItem(tuple.get(), i));
  if (python.PyErr_Occurred()) return nullptr;
  if (!good || values[1] < 0 || values[1] > static_cast<int64_t>(ScatterType::float64)) {
    python.PyErr_SetString(*python.value_error, "scatter(): 16 numbers are wanted, the second of them a type");
    return nullptr;
  }
  return python.PyLong_FromLongLong(launch_scatter(call_of(values, alpha)));
}

}  // namespace forkpoint
