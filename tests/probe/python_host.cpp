// A program that brings a Python along: python_host LIBPYTHON WAY.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <thread>

namespace {

template <typename Function>
Function find(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (!found) printf("no %s\n", name);
  return reinterpret_cast<Function>(found);
}

struct Host {
  void* library;
  void (*initialize)() = find<void (*)()>(library, "Py_Initialize");
  int (*finalize)() = find<int (*)()>(library, "Py_FinalizeEx");
  int (*run)(const char*, void*) = find<int (*)(const char*, void*)>(library, "PyRun_SimpleStringFlags");
  void* (*new_interpreter)() = find<void* (*)()>(library, "Py_NewInterpreter");
  void (*end_interpreter)(void*) = find<void (*)(void*)>(library, "Py_EndInterpreter");
  void* (*swap)(void*) = find<void* (*)(void*)>(library, "PyThreadState_Swap");
  void* (*current)() = find<void* (*)()>(library, "PyThreadState_Get");

  void once(const char* code) const {
    initialize();
    run(code, nullptr);
    if (finalize() != 0) puts("finalize failed");
  }
};

// Without site an interpreter is up and at work before the thread that waits for it has looked again.
void be_quick(void* library) {
  if (auto* no_site = static_cast<int*>(dlsym(library, "Py_NoSiteFlag"))) *no_site = 1;
}

constexpr char kSeen[] =
    "import sys, time\nfor i in range(100):\n  if '_forkpoint_bridge' in sys.modules: break\n  time.sleep(0.01)\n"
    "print('_forkpoint_bridge' in sys.modules, flush=True)";
constexpr char kWork[] = "import json, sys, time; time.sleep(0.02); print(json.dumps({'a': [1, 2]}), flush=True)";

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const std::string way = argv[2];
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
  if (!library) return puts(dlerror()), 3;
  const Host host = {library};
  if (way == "late") host.once(kWork);
  if (way == "never") usleep(50'000);
  if (way == "cycles") {
    for (int i = 0; i < 5; ++i) host.once("pass");
    host.once(kWork);
  }
  if (way == "threads") std::thread([&] { host.once(kWork); }).join();
  if (way == "subinterpreter") {
    be_quick(library);
    host.initialize();
    void* first = host.current();
    void* second = host.new_interpreter();
    host.run(kWork, nullptr);
    host.run(kSeen, nullptr);
    host.end_interpreter(second);
    host.swap(first);
    host.run(kWork, nullptr);
    host.finalize();
  }
  if (way == "fork first") {
    const pid_t child = fork();
    if (child != 0) waitpid(child, nullptr, 0);
    host.once(kSeen);
  }
  if (way == "fork at once") {
    be_quick(library);
    host.initialize();
    host.run("import posix\npid = posix.fork()\nif pid: posix.waitpid(pid, 0)", nullptr);
    host.run(kSeen, nullptr);
    host.finalize();
  }
  return 0;
}
