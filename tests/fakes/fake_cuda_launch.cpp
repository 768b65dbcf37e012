// Modules, kernels and launches of the fake libcuda.
#include <cuda.h>

#include <cstring>
#include <list>
#include <map>
#include <set>

#include "tests/fakes/fake_cuda_digest.h"
#include "tests/fakes/fake_cuda_memory.h"
#include "tests/fakes/fake_cuda_objects.h"
#include "tests/fakes/fake_cuda_trace.h"

struct CUfunc_st {
  const forkpoint::fake::KernelDefinition* definition;
  CUmodule module;
  unsigned long long context = forkpoint::fake::context_number();
};

struct CUmod_st {
  bool is_fake_image = false;
  std::map<std::string, CUfunction> functions;
  std::map<std::string, std::pair<CUdeviceptr, size_t>> globals;
};

struct CUkern_st {
  CUfunction function;
};

struct CUlib_st {
  CUmodule module;
  std::map<std::string, CUkernel> kernels;
};

namespace forkpoint::fake {
namespace {

constexpr uint32_t kFatBinary = 0xBA55ED50;

struct Modules {
  std::list<KernelDefinition> definitions;  // never removed: functions point to them
  std::map<std::string, size_t> globals;
  std::set<CUfunction> functions;
  std::set<CUkernel> kernels;
};
Modules& modules() {
  static Modules* one = new Modules;
  return *one;
}

const KernelDefinition* find_definition(const CUmod_st& module, const char* name) {
  if (!module.is_fake_image) {
    const KernelDefinition* digest = digest_kernel(name);
    return digest ? digest : collective_kernel(name);
  }
  for (auto one = modules().definitions.rbegin(); one != modules().definitions.rend(); ++one) {
    if (one->name == name) return &*one;
  }
  return nullptr;
}

// What the probe embeds must be a fat binary.
CUresult load(CUmodule* handle, const void* image) {
  if (const CUresult refused = before_unsafe_call(); refused != CUDA_SUCCESS) return refused;
  uint32_t magic = 0;
  memcpy(&magic, image, sizeof(magic));
  const bool is_fake = memcmp(image, kFakeImage, strlen(kFakeImage)) == 0;
  if (magic != kFatBinary && !is_fake) return CUDA_ERROR_INVALID_IMAGE;
  auto* module = new CUmod_st;
  module->is_fake_image = is_fake;
  const std::lock_guard lock(objects());
  if (is_fake) {
    for (const auto& [name, size_bytes] : modules().globals) {
      module->globals[name] = {Memory::get().allocate(size_bytes, MemoryKind::device), size_bytes};
    }
  }
  *handle = module;
  return CUDA_SUCCESS;
}

CUresult unload(CUmodule module) {
  Engine::get().wait_for_all();
  const std::lock_guard lock(objects());
  for (const auto& one : module->functions) {
    modules().functions.erase(one.second);
    delete one.second;
  }
  for (const auto& one : module->globals) Memory::get().remove(one.second.first);
  delete module;
  return CUDA_SUCCESS;
}

CUresult get_function(CUfunction* function, CUmodule module, const char* name) {
  const std::lock_guard lock(objects());
  CUfunction& known = module->functions[name];
  if (!known) {
    const KernelDefinition* definition = find_definition(*module, name);
    if (!definition) {
      module->functions.erase(name);
      return CUDA_ERROR_NOT_FOUND;
    }
    known = new CUfunc_st{definition, module};
    modules().functions.insert(known);
  }
  *function = known;
  return CUDA_SUCCESS;
}

CUresult get_global(CUdeviceptr* address, size_t* size_bytes, CUmodule module, const char* name) {
  const std::lock_guard lock(objects());
  const auto found = module->globals.find(name);
  if (found == module->globals.end()) return CUDA_ERROR_NOT_FOUND;
  if (address) *address = found->second.first;
  if (size_bytes) *size_bytes = found->second.second;
  return CUDA_SUCCESS;
}

CUresult get_kernel(CUkernel* kernel, CUlibrary library, const char* name) {
  CUfunction function = nullptr;
  if (const CUresult result = get_function(&function, library->module, name); result != CUDA_SUCCESS) return result;
  const std::lock_guard lock(objects());
  CUkernel& known = library->kernels[name];
  if (!known) {
    known = new CUkern_st{function};
    modules().kernels.insert(known);
  }
  *kernel = known;
  return CUDA_SUCCESS;
}

CUresult unload_library(CUlibrary library) {
  {
    const std::lock_guard lock(objects());
    for (const auto& one : library->kernels) {
      modules().kernels.erase(one.second);
      delete one.second;
    }
  }
  const CUresult result = unload(library->module);
  delete library;
  return result;
}

const KernelDefinition* function_definition(CUfunction function) {
  const std::lock_guard lock(objects());
  return modules().functions.count(function) ? function->definition : nullptr;
}
const KernelDefinition* kernel_definition(CUkernel kernel) {
  const std::lock_guard lock(objects());
  return modules().kernels.count(kernel) ? kernel->function->definition : nullptr;
}
// A function goes with its context; a library's kernel has none.
bool is_of_gone_context(CUfunction function) {
  const std::lock_guard lock(objects());
  return modules().functions.count(function) && !function->module->is_fake_image &&
         function->context != context_number();
}
// Launches take both.
const KernelDefinition* launched_definition(CUfunction handle) {
  const KernelDefinition* definition = function_definition(handle);
  return definition ? definition : kernel_definition(reinterpret_cast<CUkernel>(handle));
}

CUresult tell_param(const KernelDefinition* definition, size_t index, size_t* offset, size_t* size_bytes) {
  if (!definition) return CUDA_ERROR_INVALID_HANDLE;
  if (index >= definition->params.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = definition->params[index].offset;
  if (size_bytes) *size_bytes = definition->params[index].size_bytes;
  return CUDA_SUCCESS;
}

CUresult tell_name(const KernelDefinition* definition, const char** name) {
  if (!definition) return CUDA_ERROR_INVALID_HANDLE;
  return *name = definition->name.c_str(), CUDA_SUCCESS;
}

bool read_extra(void** extra, std::vector<unsigned char>& block) {
  const void* buffer = nullptr;
  size_t size_bytes = 0;
  for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = extra[1];
    if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE) size_bytes = *static_cast<size_t*>(extra[1]);
  }
  if (size_bytes > block.size() || (size_bytes > 0 && !buffer)) return false;
  if (size_bytes > 0) memcpy(block.data(), buffer, size_bytes);
  return true;
}

CUresult launch(CUfunction function, const LaunchShape& shape, CUstream stream, void** params, void** extra) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult error = forced_launch_error(kernel_name(function)); error != CUDA_SUCCESS) return error;
  stall_at(kernel_name(function));
  Work work;
  const CUresult result = make_launch(function, shape, params, extra, &work);
  return result == CUDA_SUCCESS ? submit(stream, CU_GRAPH_NODE_TYPE_KERNEL, std::move(work)) : result;
}

LaunchShape shape_of(const CUlaunchConfig& config) {
  return {{config.gridDimX, config.gridDimY, config.gridDimZ},
          {config.blockDimX, config.blockDimY, config.blockDimZ},
          config.sharedMemBytes};
}

}  // namespace

const char* kernel_name(CUfunction function) {
  const KernelDefinition* definition = launched_definition(function);
  return definition ? definition->name.c_str() : nullptr;
}

CUresult make_launch(CUfunction function, const LaunchShape& shape, void** params, void** extra, Work* work) {
  const KernelDefinition* definition = launched_definition(function);
  if (!definition) return CUDA_ERROR_INVALID_HANDLE;
  if (is_of_gone_context(function)) return CUDA_ERROR_INVALID_HANDLE;
  for (int i = 0; i < 3; ++i) {
    if (shape.grid[i] == 0 || shape.block[i] == 0) return CUDA_ERROR_INVALID_VALUE;
  }
  if (params && extra) return CUDA_ERROR_INVALID_VALUE;
  std::vector<unsigned char> block(definition->param_bytes());
  if (extra && !read_extra(extra, block)) return CUDA_ERROR_INVALID_VALUE;
  if (!extra && !params && !block.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; params && i < definition->params.size(); ++i) {
    memcpy(&block[definition->params[i].offset], params[i], definition->params[i].size_bytes);
  }
  *work = [definition, shape, block] {
    FakeKernelCall call = {block.data(), block.size(), {}, {}, shape.shared_bytes};
    for (int i = 0; i < 3; ++i) {
      call.grid[i] = shape.grid[i];
      call.block[i] = shape.block[i];
    }
    definition->kernel(&call, definition->user);
  };
  return CUDA_SUCCESS;
}

}  // namespace forkpoint::fake

using namespace forkpoint::fake;

extern "C" __attribute__((visibility("default"))) void fake_cuda_define_kernel(const char* name, FakeKernel kernel,
                                                                               void* user,
                                                                               const FakeKernelParam* params,
                                                                               size_t count) {
  const std::lock_guard lock(objects());
  modules().definitions.push_back({name, kernel, user, {params, params + count}});
}
extern "C" __attribute__((visibility("default"))) void fake_cuda_define_global(const char* name, size_t size_bytes) {
  const std::lock_guard lock(objects());
  modules().globals[name] = size_bytes;
}

FAKE cuModuleLoadData(CUmodule* module, const void* image) {
  FAKE_TRACE(cuModuleLoadData, module, image);
  return traced.end(load(module, image));
}
FAKE cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int count, CUjit_option* options, void** values) {
  FAKE_TRACE(cuModuleLoadDataEx, module, image, count, options, values);
  return traced.end(load(module, image));
}
FAKE cuModuleUnload(CUmodule module) {
  FAKE_TRACE(cuModuleUnload, module);
  return traced.end(unload(module));
}
FAKE cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  FAKE_TRACE(cuModuleGetFunction, function, module, name);
  return traced.end(get_function(function, module, name));
}
FAKE cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* size_bytes, CUmodule module, const char* name) {
  FAKE_TRACE(cuModuleGetGlobal_v2, address, size_bytes, module, name);
  return traced.end(get_global(address, size_bytes, module, name));
}
FAKE cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* jit, void** jit_values,
                       unsigned int jit_count, CUlibraryOption* options, void** values, unsigned int count) {
  FAKE_TRACE(cuLibraryLoadData, library, code, jit, jit_values, jit_count, options, values, count);
  CUmodule module = nullptr;
  const CUresult result = load(&module, code);
  if (result == CUDA_SUCCESS) *library = new CUlib_st{module, {}};
  return traced.end(result);
}
FAKE cuLibraryUnload(CUlibrary library) {
  FAKE_TRACE(cuLibraryUnload, library);
  return traced.end(unload_library(library));
}
FAKE cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  FAKE_TRACE(cuLibraryGetKernel, kernel, library, name);
  return traced.end(get_kernel(kernel, library, name));
}
FAKE cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  if (!kernel_definition(kernel)) return CUDA_ERROR_INVALID_HANDLE;
  return *function = kernel->function, CUDA_SUCCESS;
}
FAKE cuKernelGetName(const char** name, CUkernel kernel) { return tell_name(kernel_definition(kernel), name); }
FAKE cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size_bytes) {
  return tell_param(kernel_definition(kernel), index, offset, size_bytes);
}
FAKE cuFuncGetName(const char** name, CUfunction function) { return tell_name(function_definition(function), name); }
FAKE cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* size_bytes) {
  return tell_param(function_definition(function), index, offset, size_bytes);
}
FAKE cuFuncGetModule(CUmodule* module, CUfunction function) {
  if (!function_definition(function)) return CUDA_ERROR_INVALID_HANDLE;
  return *module = function->module, CUDA_SUCCESS;
}
FAKE cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction function) {
  if (!function_definition(function)) return CUDA_ERROR_INVALID_HANDLE;
  return *value = 32, CUDA_SUCCESS;
}
FAKE cuFuncLoad(CUfunction function) {
  return function_definition(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

// Of launches CUPTI tells the kernel's name too.
#define FAKE_LAUNCH(function, suffix, kernel, body, parameters, ...)                                                   \
  FAKE function##suffix parameters {                                                                                   \
    [[maybe_unused]] constexpr bool per_thread = sizeof(#suffix) > 1;                                                  \
    const function##suffix##_params traced_params{__VA_ARGS__};                                                        \
    Traced traced(CUPTI_DRIVER_TRACE_CBID_##function##suffix, #function #suffix, &traced_params, kernel_name(kernel)); \
    return traced.end(body);                                                                                           \
  }
#define FAKE_LAUNCH_TWINS(function, ...) \
  FAKE_LAUNCH(function, , __VA_ARGS__)   \
  FAKE_LAUNCH(function, _ptsz, __VA_ARGS__)

FAKE_LAUNCH_TWINS(cuLaunchKernel, f,
                  launch(f, {{gx, gy, gz}, {bx, by, bz}, shared}, find_stream(stream, per_thread), params, extra),
                  (CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
                   unsigned int bz, unsigned int shared, CUstream stream, void** params, void** extra),
                  f, gx, gy, gz, bx, by, bz, shared, stream, params, extra)
FAKE_LAUNCH_TWINS(cuLaunchKernelEx, f,
                  launch(f, shape_of(*config), find_stream(config->hStream, per_thread), params, extra),
                  (const CUlaunchConfig* config, CUfunction f, void** params, void** extra), config, f, params, extra)
FAKE_LAUNCH_TWINS(cuLaunchCooperativeKernel, f,
                  launch(f, {{gx, gy, gz}, {bx, by, bz}, shared}, find_stream(stream, per_thread), params, nullptr),
                  (CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
                   unsigned int bz, unsigned int shared, CUstream stream, void** params),
                  f, gx, gy, gz, bx, by, bz, shared, stream, params)

namespace {
CUresult launch_host_function(CUstream stream, CUhostFn function, void* user) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  return submit(stream, CU_GRAPH_NODE_TYPE_HOST, [=] { function(user); });
}
}  // namespace
FAKE_TWINS(cuLaunchHostFunc, _ptsz, launch_host_function(find_stream(stream, per_thread), function, user),
           (CUstream stream, CUhostFn function, void* user), stream, function, user)
