// The functions of CPython that the bridge uses, found in the process at run time and never linked: no Python.h, objects
// stay opaque, and only what CPython 3.9 and all later versions export. All but the first two want the GIL.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forkpoint {

struct PythonObject;

// As PyMethodDef, which has been the same in all versions.
struct PythonMethod {
  const char* name;
  void* function;  // of the form that flags say
  int flags;
  const char* doc;
};
inline constexpr int kPythonFastcall = 0x0080 | 0x0002;  // METH_FASTCALL | METH_KEYWORDS
inline constexpr int kPythonFileInput = 257;             // Py_file_input

using PythonFastFunction = PythonObject* (*)(PythonObject* self, PythonObject* const* arguments, ptrdiff_t count,
                                             PythonObject* keywords);

#define FORKPOINT_PYTHON_FUNCTIONS(X)                                                 \
  X(int, Py_IsInitialized, ())                                                        \
  X(int, Py_AddPendingCall, (int (*call)(void*), void* argument))                     \
  X(const char*, Py_GetVersion, ())                                                   \
  X(PythonObject*, PyInterpreterState_Get, ())                                        \
  X(int64_t, PyInterpreterState_GetID, (PythonObject*))                               \
  X(void, Py_IncRef, (PythonObject*))                                                 \
  X(void, Py_DecRef, (PythonObject*))                                                 \
  X(void, PyErr_Fetch, (PythonObject**, PythonObject**, PythonObject**))              \
  X(void, PyErr_Restore, (PythonObject*, PythonObject*, PythonObject*))               \
  X(void, PyErr_NormalizeException, (PythonObject**, PythonObject**, PythonObject**)) \
  X(void*, PyEval_SaveThread, ())                                                     \
  X(void, PyEval_RestoreThread, (void*))                                              \
  X(PythonObject*, PyErr_Occurred, ())                                                \
  X(int, PyErr_ExceptionMatches, (PythonObject*))                                     \
  X(void, PyErr_Clear, ())                                                            \
  X(void, PyErr_SetString, (PythonObject*, const char*))                              \
  X(PythonObject*, PyErr_Format, (PythonObject*, const char*, ...))                   \
  X(PythonObject*, PyObject_GetAttr, (PythonObject*, PythonObject*))                  \
  X(PythonObject*, PyObject_GetAttrString, (PythonObject*, const char*))              \
  X(int, PyObject_SetAttrString, (PythonObject*, const char*, PythonObject*))         \
  X(PythonObject*, PyObject_CallObject, (PythonObject*, PythonObject*))               \
  X(PythonObject*, PyObject_CallFunctionObjArgs, (PythonObject*, ...))                \
  X(PythonObject*, PyObject_CallMethodObjArgs, (PythonObject*, PythonObject*, ...))   \
  X(PythonObject*, PyObject_Type, (PythonObject*))                                    \
  X(PythonObject*, PyObject_Str, (PythonObject*))                                     \
  X(int, PyType_IsSubtype, (PythonObject*, PythonObject*))                            \
  X(PythonObject*, PyUnicode_FromString, (const char*))                               \
  X(PythonObject*, PyUnicode_InternFromString, (const char*))                         \
  X(const char*, PyUnicode_AsUTF8AndSize, (PythonObject*, ptrdiff_t*))                \
  X(int, PyUnicode_CompareWithASCIIString, (PythonObject*, const char*))              \
  X(PythonObject*, PyLong_FromLongLong, (long long))                                  \
  X(long long, PyLong_AsLongLong, (PythonObject*))                                    \
  X(unsigned long long, PyLong_AsUnsignedLongLong, (PythonObject*))                   \
  X(double, PyFloat_AsDouble, (PythonObject*))                                        \
  X(ptrdiff_t, PyTuple_Size, (PythonObject*))                                         \
  X(PythonObject*, PyTuple_GetItem, (PythonObject*, ptrdiff_t))                       \
  X(PythonObject*, PySequence_Tuple, (PythonObject*))                                 \
  X(PythonObject*, PyMemoryView_FromObject, (PythonObject*))                          \
  X(void*, PyCapsule_GetPointer, (PythonObject*, const char*))                        \
  X(PythonObject*, PyBytes_FromObject, (PythonObject*))                               \
  X(int, PyBytes_AsStringAndSize, (PythonObject*, char**, ptrdiff_t*))                \
  X(PythonObject*, PyModule_New, (const char*))                                       \
  X(PythonObject*, PyModule_GetDict, (PythonObject*))                                 \
  X(PythonObject*, PyCFunction_NewEx, (PythonMethod*, PythonObject*, PythonObject*))  \
  X(PythonObject*, PyImport_GetModuleDict, ())                                        \
  X(int, PyDict_SetItemString, (PythonObject*, const char*, PythonObject*))           \
  X(int, PyDict_DelItemString, (PythonObject*, const char*))                          \
  X(PythonObject*, PyDict_GetItemString, (PythonObject*, const char*))                \
  X(int, PyList_Append, (PythonObject*, PythonObject*))                               \
  X(PythonObject*, PyList_New, (ptrdiff_t))                                           \
  X(PythonObject*, PyEval_GetBuiltins, ())                                            \
  X(PythonObject*, Py_CompileString, (const char*, const char*, int))                 \
  X(PythonObject*, PyEval_EvalCode, (PythonObject*, PythonObject*, PythonObject*))

struct Python {
#define FORKPOINT_MEMBER(result, name, arguments) result(*name) arguments = nullptr;
  FORKPOINT_PYTHON_FUNCTIONS(FORKPOINT_MEMBER)
#undef FORKPOINT_MEMBER
  PythonObject* none = nullptr;  // these three: borrowed, for ever
  PythonObject* yes = nullptr;
  PythonObject* no = nullptr;
  PythonObject** type_error = nullptr;
  PythonObject** value_error = nullptr;
  PythonObject** exception = nullptr;

  PythonObject* new_reference(PythonObject* object) const {
    Py_IncRef(object);
    return object;
  }
  PythonObject* boolean(bool value) const { return new_reference(value ? yes : no); }
};

// nullptr: something is missing, and *missing is its name. Looks once; without the GIL.
const Python* find_python(const char** missing);

// One reference. REQUIRES: the GIL, where it goes out of scope too.
class PythonRef {
 public:
  explicit PythonRef(const Python& python, PythonObject* owned = nullptr) : python_(python), object_(owned) {}
  ~PythonRef() {
    if (object_) python_.Py_DecRef(object_);
  }
  PythonRef(const PythonRef&) = delete;
  PythonRef& operator=(const PythonRef&) = delete;
  PythonObject* get() const { return object_; }
  void reset(PythonObject* owned) {
    if (object_) python_.Py_DecRef(object_);
    object_ = owned;
  }
  PythonObject* release() {
    PythonObject* object = object_;
    object_ = nullptr;
    return object;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  const Python& python_;
  PythonObject* object_;
};

// Whatever error is set where it begins is set where it ends.
class PythonErrorKept {
 public:
  explicit PythonErrorKept(const Python& python) : python_(python) { python_.PyErr_Fetch(&type_, &value_, &traceback_); }
  ~PythonErrorKept() { python_.PyErr_Restore(type_, value_, traceback_); }
  PythonErrorKept(const PythonErrorKept&) = delete;
  PythonErrorKept& operator=(const PythonErrorKept&) = delete;

 private:
  const Python& python_;
  PythonObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

}  // namespace forkpoint
