// The arguments of a function of the module _native, positional or by keyword. For the thread that holds the interpreter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "probes/python_api.h"

namespace forkpoint {

// What a function was called with, in the order of its parameters. Borrowed from the caller.
class Arguments {
 public:
  static constexpr int kMost = 8;

  // required: how many of the `count` parameters have no default. good() is false, and an error is set, where they do
  // not fit.
  Arguments(const Python& python, const char* function, const char* const* names, int count, int required,
            PythonObject* const* given, ptrdiff_t given_count, PythonObject* keywords)
      : python_(python) {
    for (ptrdiff_t i = 0; i < given_count && i < count; ++i) values_[i] = given[i];
    good_ = given_count <= count && (!keywords || take_keywords(names, count, given + given_count, keywords));
    for (int i = 0; i < required; ++i) good_ = good_ && values_[i];
    if (!good_) python_.PyErr_Format(*python_.type_error, "%s(): wrong arguments", function);
  }

  bool good() const { return good_; }
  bool has(int i) const { return values_[i] && values_[i] != python_.none; }
  PythonObject* object(int i) const { return values_[i]; }
  // nullptr, and an error is set: no string.
  const char* text(int i) {
    if (!values_[i]) return "";
    const char* text = python_.PyUnicode_AsUTF8AndSize(values_[i], nullptr);
    good_ = good_ && text;
    return text;
  }
  int64_t number(int i, int64_t otherwise = 0) {
    if (!values_[i]) return otherwise;
    const int64_t value = python_.PyLong_AsLongLong(values_[i]);
    if (value == -1 && python_.PyErr_Occurred()) good_ = false;
    return value;
  }
  double real(int i) {
    const double value = python_.PyFloat_AsDouble(values_[i]);
    if (value == -1 && python_.PyErr_Occurred()) good_ = false;
    return value;
  }
  uint8_t flags(int i) { return static_cast<uint8_t>(number(i)); }
  uint32_t handle(int i) {
    const int64_t value = number(i);
    return value >= 0 && value <= UINT32_MAX ? static_cast<uint32_t>(value) : 0;
  }

 private:
  bool take_keywords(const char* const* names, int count, PythonObject* const* given, PythonObject* keywords) {
    const ptrdiff_t keyword_count = python_.PyTuple_Size(keywords);
    for (ptrdiff_t k = 0; k < keyword_count; ++k) {
      int at = 0;
      PythonObject* keyword = python_.PyTuple_GetItem(keywords, k);
      while (at < count && python_.PyUnicode_CompareWithASCIIString(keyword, names[at]) != 0) ++at;
      if (at == count || values_[at]) return false;
      values_[at] = given[k];
    }
    return true;
  }

  const Python& python_;
  PythonObject* values_[kMost] = {};
  bool good_ = true;
};

#define FORKPOINT_CALL_PARAMETERS \
  [[maybe_unused]] PythonObject* self, [[maybe_unused]] PythonObject* const* given, [[maybe_unused]] ptrdiff_t count, \
      [[maybe_unused]] PythonObject* keywords
// Declares `arguments` (of `api`, a const Python*); leaves the function with an error where they are wrong. required: without a default.
#define FORKPOINT_ARGUMENTS(function, required, ...)                                                       \
  static constexpr const char* kNames[] = {__VA_ARGS__};                                                   \
  constexpr int kCount = sizeof(kNames) / sizeof(kNames[0]);                                               \
  static_assert(kCount <= Arguments::kMost);                                                               \
  Arguments arguments(*api, function, kNames, kCount, required, given, count, keywords);                         \
  if (!arguments.good()) return nullptr

}  // namespace forkpoint
