#include "probes/torch_bridge.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "probes/guard.h"
#include "probes/os.h"
#include "probes/recorder.h"
#include "probes/settings.h"

namespace forkpoint {
namespace {

constexpr char kPackage[] = "_forkpoint_bridge";
constexpr char kNativeModule[] = "_forkpoint_bridge._native";
constexpr char kLimit[] = "PyTorch is not recorded by layers";
constexpr size_t kThreadStackBytes = 256u << 10;
constexpr int64_t kPatienceNs = 10'000'000'000;
constexpr int64_t kPeriodNs = 500'000;  // from its being up to the script's first line an interpreter takes some ms
constexpr int64_t kLongPeriodNs = 5'000'000;

constinit const Settings* settings = nullptr;
int (*is_initialized)() = nullptr;
int (*add_pending_call)(int (*)(void*), void*) = nullptr;

pthread_t thread;
constinit std::atomic<uint32_t> to_join{0};   // 1: the thread was started, and nobody has joined it
constinit std::atomic<int> thread_id{0};
constinit std::atomic<uint32_t> stop{0};      // futex: the thread ends at once
constinit std::atomic<bool> queued{false};
constinit std::atomic<int64_t> give_up_ns{0};
char problem[400] = "";                       // written by the installation, on the interpreter's main thread
constinit std::atomic<bool> problem_known{false};
constinit std::atomic<BridgeState> bridge_state{BridgeState::none};
constinit std::atomic<Level> wake_level{Level::step};

int install(void*);

// By the thread, or before a fork: by whoever comes first.
bool queue_if_up() {
  if (queued.load() || !is_initialized()) return queued.load();
  if (!queued.exchange(true) && add_pending_call(install, nullptr) != 0) queued.store(false);  // 32 others wait: again
  return queued.load();
}

void* wait_for_interpreter(void*) {
  const Guard guard;
  thread_id.store(static_cast<int>(syscall(SYS_gettid)));
  const int64_t begun_ns = now_ns();
  while (stop.load() == 0 && !queue_if_up()) {
    const int64_t now = now_ns();
    if (now > give_up_ns.load()) break;
    futex_wait(stop, 0, now - begun_ns < 1'000'000'000 ? kPeriodNs : kLongPeriodNs);
  }
  return nullptr;
}

void start_thread() {
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return;
  pthread_attr_setstacksize(&attributes, kThreadStackBytes);
  const AllSignalsBlocked blocked;
  stop.store(0);
  thread_id.store(0);
  const bool started = pthread_create(&thread, &attributes, wait_for_interpreter, nullptr) == 0;
  pthread_attr_destroy(&attributes);
  if (started) to_join.store(1);
  else recorder.note_limit(kLimit, "no thread could be started to install the bridge with");
}

// Returns when the kernel does not count the thread any more: Python 3.12 warns when a process with threads forks.
void end_thread() {
  if (to_join.exchange(0) == 0) return;
  stop.store(1);
  futex_wake(stop);
  pthread_join(thread, nullptr);
  const int64_t give_up = now_ns() + 10'000'000;
  while (syscall(SYS_tgkill, getpid(), thread_id.load(), 0) == 0 && now_ns() < give_up) sched_yield();
}

void before_fork() {
  if (to_join.load() == 0) return;
  end_thread();
  queue_if_up();
}

// A program that forks before it starts its interpreter: both sides go on waiting.
void after_fork() {
  if (stop.load() != 0 && !queued.load() && now_ns() < give_up_ns.load()) start_thread();
}

// ---- On the interpreter's main thread, with the GIL

void refuse(const char* reason) {
  snprintf(problem, sizeof(problem), "%s", reason);
  problem_known.store(true);
  bridge_state.store(BridgeState::failed);
  recorder.note_limit(kLimit, problem);
}

// The error that is set, in words; clears it.
void refuse_with_error(const Python& python) {
  PythonObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  python.PyErr_Fetch(&type, &value, &traceback);
  python.PyErr_NormalizeException(&type, &value, &traceback);
  const PythonRef type_ref(python, type), value_ref(python, value), traceback_ref(python, traceback);
  const PythonRef name(python, type ? python.PyObject_GetAttrString(type, "__name__") : nullptr);
  const PythonRef text(python, value ? python.PyObject_Str(value) : nullptr);
  const char* name_text = name ? python.PyUnicode_AsUTF8AndSize(name.get(), nullptr) : nullptr;
  const char* value_text = text ? python.PyUnicode_AsUTF8AndSize(text.get(), nullptr) : nullptr;
  char reason[300];
  snprintf(reason, sizeof(reason), "the bridge could not be installed: %.60s: %.200s",
           name_text ? name_text : "an error", value_text ? value_text : "without words");
  python.PyErr_Clear();
  recorder.note_gap(reason);
  refuse(reason);
}

bool put_module(const Python& python, const char* name, PythonObject* module) {
  return python.PyDict_SetItemString(python.PyImport_GetModuleDict(), name, module) == 0;
}

// The package, with its module _native; its own code, which is run here, does the rest. false: a Python error is set.
bool make_package(const Python& python) {
  const PythonRef package(python, python.PyModule_New(kPackage)), path(python, python.PyList_New(0));
  const PythonRef native(python, package ? make_native_module(python, *settings) : nullptr);
  if (!package || !path || !native) return false;
  PythonObject* globals = python.PyModule_GetDict(package.get());
  if (python.PyDict_SetItemString(globals, "__path__", path.get()) != 0 ||
      python.PyDict_SetItemString(globals, "__builtins__", python.PyEval_GetBuiltins()) != 0 ||
      python.PyDict_SetItemString(globals, "_native", native.get()) != 0 ||
      !put_module(python, kPackage, package.get()) || !put_module(python, kNativeModule, native.get())) {
    return false;
  }
  const char* text = python_source("__init__");
  const PythonRef code(python, python.Py_CompileString(text, "<forkpoint>/__init__.py", kPythonFileInput));
  const PythonRef done(python, code ? python.PyEval_EvalCode(code.get(), globals, globals) : nullptr);
  return static_cast<bool>(done);
}

// nullptr: this interpreter is one that the bridge knows.
const char* why_unfit(const Python& python) {
  const char* version = python.Py_GetVersion();
  if (strstr(version, "free-threading")) return "a Python without GIL (free-threaded) is not supported";
  const bool main = python.PyInterpreterState_GetID(python.PyInterpreterState_Get()) == 0;
  return main ? nullptr : "the interpreter that was found is a subinterpreter";
}

bool is_supported_version() {
  const auto get_version = reinterpret_cast<const char* (*)()>(dlsym(RTLD_DEFAULT, "Py_GetVersion"));
  const char* version = get_version ? get_version() : "";
  return strncmp(version, "3.", 2) == 0 && atoi(version + 2) >= 9;
}

// 0, or -1 with an error set that is not ours: a signal that came meanwhile (Ctrl-C).
int install_into(const Python& python) {
  if (const char* unfit = why_unfit(python)) return refuse(unfit), 0;
  const PythonErrorKept kept(python);
  auto none = BridgeState::none;
  if (settings->state == Settings::State::unset) bridge_state.compare_exchange_strong(none, BridgeState::waiting);
  if (make_package(python)) return 0;
  const bool foreign = !python.PyErr_ExceptionMatches(*python.exception);
  if (!foreign) refuse_with_error(python);
  return foreign ? -1 : 0;
}

int install(void*) {
  end_thread();
  const char* missing = nullptr;
  if (!is_supported_version()) return refuse("Python 3.9 or newer is needed"), 0;
  const Python* python = find_python(&missing);
  if (python) return install_into(*python);
  char reason[160];
  snprintf(reason, sizeof(reason), "this Python lacks %s", missing);
  return refuse(reason), 0;
}

// false: a Python error is set.
bool run_wake(const Python& python) {
  PythonObject* native = python.PyDict_GetItemString(python.PyImport_GetModuleDict(), kNativeModule);
  const PythonRef level(python, python.PyLong_FromLongLong(static_cast<int>(wake_level.load())));
  if (!native || !level || python.PyObject_SetAttrString(native, "LEVEL", level.get()) != 0) return false;
  const PythonRef module(python, python.PyModule_New("_forkpoint_wake"));
  PythonObject* globals = module ? python.PyModule_GetDict(module.get()) : nullptr;
  if (!globals || python.PyDict_SetItemString(globals, "__builtins__", python.PyEval_GetBuiltins()) != 0) return false;
  const char* text = "from _forkpoint_bridge import bootstrap\nbootstrap.wake()\n";
  const PythonRef code(python, python.Py_CompileString(text, "<forkpoint>/wake", kPythonFileInput));
  const PythonRef done(python, code ? python.PyEval_EvalCode(code.get(), globals, globals) : nullptr);
  return static_cast<bool>(done);
}

int wake_on_interpreter(void*) {
  const char* missing = nullptr;
  const Python* python = find_python(&missing);
  if (!python) return bridge_state.store(BridgeState::failed), 0;
  const PythonErrorKept kept(*python);
  if (run_wake(*python)) return 0;
  bridge_state.store(BridgeState::failed);
  const bool foreign = python->PyErr_Occurred() && !python->PyErr_ExceptionMatches(*python->exception);
  if (!foreign) refuse_with_error(*python);
  return foreign ? -1 : 0;
}

}  // namespace

const char* name(BridgeState state) {
  static constexpr const char* kNames[] = {"none", "waiting", "sleeping", "waking", "awake", "failed"};
  return kNames[static_cast<int>(state)];
}

BridgeState torch_bridge_state() { return bridge_state.load(); }

bool call_on_interpreter(int (*function)(void*)) {
  return is_initialized && add_pending_call && is_initialized() && add_pending_call(function, nullptr) == 0;
}

void wake_torch_bridge(Level level) {
  const BridgeState known = bridge_state.load();
  if (known != BridgeState::sleeping && known != BridgeState::awake && known != BridgeState::waking) return;
  wake_level.store(level);
  bridge_state.store(call_on_interpreter(wake_on_interpreter) ? BridgeState::waking : BridgeState::failed);
}

void torch_is_imported() {
  bridge_state.store(BridgeState::sleeping);
  recorder.be_reachable();
}

void torch_bridge_is_awake(bool well) { bridge_state.store(well ? BridgeState::awake : BridgeState::failed); }

bool records_torch(const Settings& read) {
  const bool other_rank = read.state == Settings::State::ready && read.rank >= 0 && !read.wants_rank(read.rank);
  return read.torch && !other_rank;
}

void install_torch_bridge(const Settings& read) {
  if (read.state == Settings::State::malformed) return;
  if (!records_torch(read) && read.knobs[0] == '\0') return;  // ranks that are not recorded have to repeat as well
  is_initialized = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  add_pending_call = reinterpret_cast<decltype(add_pending_call)>(dlsym(RTLD_DEFAULT, "Py_AddPendingCall"));
  if (!is_initialized || !add_pending_call) return;
  settings = &read;
  give_up_ns.store(now_ns() + kPatienceNs);
  pthread_atfork(before_fork, after_fork, after_fork);
  start_thread();
}

void say_bridge_problem() {
  if (problem_known.exchange(false)) say("%s: %s", kLimit, problem);
}

const char* python_source(const char* name) {
  for (int i = 0; i < kPythonSourceCount; ++i) {
    if (strcmp(kPythonSources[i].name, name) == 0) return kPythonSources[i].text;
  }
  return nullptr;
}

}  // namespace forkpoint
