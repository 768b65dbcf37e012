#include "probes/python_api.h"

#include <dlfcn.h>

#include <atomic>

namespace forkpoint {
namespace {

constinit Python python;
constinit std::atomic<const Python*> found{nullptr};

// nullptr: all is there; else what is not.
const char* look_up(Python* api) {
#define FORKPOINT_FIND(result, name, arguments)                                               \
  api->name = reinterpret_cast<decltype(Python::name)>(dlsym(RTLD_DEFAULT, #name));           \
  if (!api->name) return #name;
  FORKPOINT_PYTHON_FUNCTIONS(FORKPOINT_FIND)
#undef FORKPOINT_FIND
  const auto object = [](const char* name) { return static_cast<PythonObject*>(dlsym(RTLD_DEFAULT, name)); };
  const auto variable = [](const char* name) { return static_cast<PythonObject**>(dlsym(RTLD_DEFAULT, name)); };
  if (!(api->none = object("_Py_NoneStruct"))) return "_Py_NoneStruct";
  if (!(api->yes = object("_Py_TrueStruct"))) return "_Py_TrueStruct";
  if (!(api->no = object("_Py_FalseStruct"))) return "_Py_FalseStruct";
  if (!(api->type_error = variable("PyExc_TypeError"))) return "PyExc_TypeError";
  if (!(api->value_error = variable("PyExc_ValueError"))) return "PyExc_ValueError";
  if (!(api->exception = variable("PyExc_Exception"))) return "PyExc_Exception";
  return nullptr;
}

}  // namespace

// Called at installation only, by one thread; the rest of the process sees it through `found`.
const Python* find_python(const char** missing) {
  if (const Python* known = found.load(std::memory_order_acquire)) return known;
  *missing = look_up(&python);
  if (*missing) return nullptr;
  found.store(&python, std::memory_order_release);
  return &python;
}

}  // namespace forkpoint
