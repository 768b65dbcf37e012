// The bridge into PyTorch: Python code that lies in this library (probes/torch/*.py) and is put into the interpreter of a
// Python process as the package _forkpoint_bridge, with no file on disk. Its __init__ runs at once and the rest when torch
// is imported (`bootstrap.start()`). It decides what is recorded and under which name;
// its module _native (torch_calls.cpp) describes tensors and records them.
#pragma once

#include <cstdint>

#include "lib/record.h"
#include "probes/python_api.h"

namespace forkpoint {

struct Settings;

// When the library is loaded and the environment read. In a process without CPython in it nothing happens. Otherwise a
// thread waits until the interpreter is up (10 s at most), has its main thread run the installation, and ends: it has ended
// before a line of the bridge runs, and before a fork of the process goes on.
void install_torch_bridge(const Settings& settings);
// false: the bridge records nothing in this process; it may be there for deterministic mode all the same.
bool records_torch(const Settings& settings);
// Why it could not be installed, once, on stderr; nothing where it was. For the first record: a Python that records nothing
// stays silent.
void say_bridge_problem();

// ---- In a process that sleeps (no FORKPOINT_RUN) only the import of torch is noticed, which makes the process reachable; the
// hooks go in when `forkpoint attach` wakes it, at whatever line its main thread is then, and stay.
enum class BridgeState : uint8_t { none, waiting, sleeping, waking, awake, failed };  // waiting: for the import
const char* name(BridgeState state);
BridgeState torch_bridge_state();
// The agent's thread: has the interpreter's main thread wake the hooks, or do so again, to record at that level. Does nothing
// without torch.
void wake_torch_bridge(Level level);
// The bridge's own calls.
void torch_is_imported();
void torch_bridge_is_awake(bool well);
// Has the interpreter's main thread call function, soon; false: there is no interpreter, or it has too much to call.
bool call_on_interpreter(int (*function)(void*));

// The module _native, new; nullptr: a Python error is set. torch_calls.cpp.
PythonObject* make_native_module(const Python& python, const Settings& settings);

// One of probes/torch/*.py, made by the build.
struct PythonSource {
  const char* name;  // "layers"
  const char* text;
};
extern const PythonSource kPythonSources[];
extern const int kPythonSourceCount;
const char* python_source(const char* name);  // nullptr: there is none

}  // namespace forkpoint
