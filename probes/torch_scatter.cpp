#include "probes/torch_scatter.h"

namespace forkpoint {
namespace {

constexpr int kNumbers = 16;
constexpr int kIndexNumbers = 10;
constexpr int kByIndexNumbers = 9 + kIndexNumbers;
constexpr int kSortNumbers = 4 + kIndexNumbers;

template <typename T>
T* address(int64_t number) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(number));
}

// false: an error is set.
bool take_numbers(const Python& python, PythonObject* numbers, int64_t* values, int count, const char* error) {
  const PythonRef tuple(python, python.PySequence_Tuple(numbers));
  if (!tuple) return false;
  if (python.PyTuple_Size(tuple.get()) != count) return python.PyErr_SetString(*python.value_error, error), false;
  for (int i = 0; i < count; ++i) values[i] = python.PyLong_AsLongLong(python.PyTuple_GetItem(tuple.get(), i));
  return !python.PyErr_Occurred();
}

bool is_type(const Python& python, int64_t type) {
  if (type >= 0 && type <= static_cast<int64_t>(ScatterType::float64)) return true;
  python.PyErr_SetString(*python.value_error, "scatter(): there is no such type");
  return false;
}

// What both kinds of call begin with.
ScatterCall begin_call(const int64_t* numbers, double alpha) {
  ScatterCall call;
  call.stream = address<void>(numbers[0]);
  call.type = static_cast<ScatterType>(numbers[1]);
  ScatterWork& work = call.work;
  work.flags = static_cast<uint32_t>(numbers[2]);
  work.src = address<const void>(numbers[3]);
  work.out = address<void>(numbers[4]);
  work.alpha = alpha;
  return call;
}

ScatterCall call_of(const int64_t* numbers, double alpha) {
  ScatterCall call = begin_call(numbers, alpha);
  ScatterWork& work = call.work;
  work.rows = address<const void>(numbers[5]);
  work.weights = address<const void>(numbers[6]);
  work.starts = address<uint32_t>(numbers[7]);
  work.partials = address<void>(numbers[8]);
  work.keys = {address<const void>(numbers[9]), numbers[10], numbers[11] != 0};
  work.out_rows = numbers[12];
  work.columns = numbers[13];
  work.src_stride = numbers[14];
  work.out_stride = numbers[15];
  return call;
}

ScatterCall call_by_index(const int64_t* numbers, double alpha) {
  ScatterCall call = begin_call(numbers, alpha);
  ScatterWork& work = call.work;
  work.columns = numbers[6];
  work.src_stride = numbers[7];
  work.out_stride = numbers[8];
  return call;
}

// *index from kIndexNumbers numbers; false: an error is set.
bool take_index(const Python& python, const int64_t* numbers, scatter::IndexView* index) {
  index->data = address<const void>(numbers[0]);
  index->flags = static_cast<uint32_t>(numbers[1]);
  for (int i = 0; i < 3; ++i) index->strides[i] = numbers[2 + i];
  index->blocks = numbers[5];
  index->length = numbers[6];
  index->columns = numbers[7];
  index->rows = numbers[8];
  index->padding = numbers[9];
  const bool good = index->blocks > 0 && index->length > 0 && index->columns > 0 && index->rows > 0 &&
                    index->count() <= scatter::kMostKeys && index->limit() <= scatter::kMostKeys;
  if (!good) python.PyErr_SetString(*python.value_error, "scatter(): an index of none, or of more than 2^31 - 1 keys");
  return good;
}

}  // namespace

PythonObject* scatter_for_torch(const Python& python, PythonObject* numbers, double alpha) {
  int64_t values[kNumbers];
  if (!take_numbers(python, numbers, values, kNumbers, "scatter(): 16 numbers are wanted")) return nullptr;
  if (!is_type(python, values[1])) return nullptr;
  return python.PyLong_FromLongLong(launch_scatter(call_of(values, alpha)));
}

PythonObject* scatter_by_index_for_torch(const Python& python, PythonObject* numbers, double alpha) {
  int64_t values[kByIndexNumbers];
  scatter::IndexView index;
  if (!take_numbers(python, numbers, values, kByIndexNumbers, "scatter_by_index(): 19 numbers are wanted") ||
      !is_type(python, values[1]) || !take_index(python, values + 9, &index)) {
    return nullptr;
  }
  void* const scratch = address<void>(values[5]);
  return python.PyLong_FromLongLong(launch_scatter_by_index(call_by_index(values, alpha), index, scratch));
}

PythonObject* sort_by_index_for_torch(const Python& python, PythonObject* numbers) {
  int64_t values[kSortNumbers];
  SortCall call;
  if (!take_numbers(python, numbers, values, kSortNumbers, "sort_by_index(): 14 numbers are wanted") ||
      !take_index(python, values + 4, &call.work.index)) {
    return nullptr;
  }
  call.stream = address<void>(values[0]);
  call.work.keys = address<uint32_t>(values[1]);
  call.work.places = address<void>(values[2]);
  call.work.wide_places = true;
  call.work.scratch = address<uint32_t>(values[3]);
  return python.PyLong_FromLongLong(launch_sort(call));
}

PythonObject* scatter_scratch_for_torch(const Python& python, int64_t type, int64_t count, int64_t columns) {
  if (!is_type(python, type)) return nullptr;
  const ScatterScratch scratch = lay_out_scratch(static_cast<ScatterType>(type), count, columns);
  return python.PyLong_FromLongLong(static_cast<long long>(scratch.bytes));
}

}  // namespace forkpoint
