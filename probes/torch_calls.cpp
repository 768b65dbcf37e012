// The module _native of the bridge into PyTorch: what its Python code calls. Positional or keyword arguments; a wrong
// one raises, as in any other module. Tensors are described before the probe is entered, since asking them allocates,
// and that may collect garbage, which runs code of the host.
#include <cstring>
#include <exception>
#include <vector>

#include "lib/digest_mix.h"
#include "probes/enter.h"
#include "probes/launch_level.h"
#include "probes/os.h"
#include "probes/recorder.h"
#include "probes/step_marks.h"
#include "probes/torch_arguments.h"
#include "probes/torch_bridge.h"
#include "probes/torch_graph.h"
#include "probes/torch_many.h"
#include "probes/torch_scatter.h"
#include "probes/torch_tensor.h"
#include "probes/watch_control.h"

namespace forkpoint {
namespace {
constinit const Python* api = nullptr;  // set when the module is made

PythonObject* none() { return api->new_reference(api->none); }

PythonObject* call_active(FORKPOINT_CALL_PARAMETERS) { return api->boolean(recorder.is_awake()); }
PythonObject* call_wanted(FORKPOINT_CALL_PARAMETERS) { return api->boolean(recorder.wants_records()); }

// Of the step that has begun last.
PythonObject* call_level(FORKPOINT_CALL_PARAMETERS) {
  return api->PyLong_FromLongLong(static_cast<int>(level_now(recorder.settings())));
}

PythonObject* call_source(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("source", 1, "name");
  const char* name = arguments.text(0);
  if (!name) return nullptr;
  const char* text = python_source(name);
  return text ? api->PyUnicode_FromString(text) : none();
}

// ---- Who and when

PythonObject* call_rank(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("rank", 2, "rank", "world");
  const auto rank = static_cast<int32_t>(arguments.number(0)), world = static_cast<int32_t>(arguments.number(1));
  if (!arguments.good()) return nullptr;
  if (recorder.is_awake()) enter([=](const Token& token) { recorder.set_rank(token, rank, world); });
  return none();
}

PythonObject* call_begin_step(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("begin_step", 2, "n", "base", "computed");
  const int64_t step = arguments.number(0);
  const char* base = arguments.text(1);
  const bool computed = arguments.number(2) != 0;
  if (!arguments.good()) return nullptr;
  // Who names the steps by --step-on has them counted by that alone.
  if (!recorder.is_awake() || has_step_mark()) return none();
  // Behind the last step that is wanted a rank waits, for seconds: threads of the program that save a checkpoint go on.
  void* const thread = recorder.is_past_last_step(step) ? api->PyEval_SaveThread() : nullptr;
  enter([=](const Token& token) {
    recorder.set_step_base(token, base);
    recorder.begin_step(token, step, computed);
  });
  if (thread) api->PyEval_RestoreThread(thread);
  return none();
}

// The part of the last step that takes what the program left behind it, until end_step. False: none is wanted.
PythonObject* call_begin_final(FORKPOINT_CALL_PARAMETERS) {
  bool begun = false;
  if (recorder.is_awake() && !has_step_mark()) enter([&](const Token& token) { begun = recorder.begin_final(token); });
  return api->boolean(begun);
}

PythonObject* call_set_base(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("set_base", 1, "base");
  const char* base = arguments.text(0);
  if (!arguments.good()) return nullptr;
  if (recorder.is_awake() && !has_step_mark()) enter([=](const Token& token) { recorder.set_step_base(token, base); });
  return none();
}

PythonObject* call_end_step(FORKPOINT_CALL_PARAMETERS) {
  if (recorder.is_awake() && !has_step_mark()) enter([](const Token& token) { recorder.end_step(token); });
  return none();
}

PythonObject* call_micro_step(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("micro_step", 1, "i");
  const auto index = static_cast<int32_t>(arguments.number(0));
  if (!arguments.good()) return nullptr;
  if (recorder.is_awake()) enter([=](const Token& token) { recorder.set_micro_step(token, index); });
  return none();
}

// ---- Scopes. Handles are given out to a sleeping recorder as well: its child after a fork may be awake.

// Equal on all members, since they were given one text.
Digest communicator_id(const char* made_from) {
  const Digest plain = digest_only(made_from, strlen(made_from));
  const Digest id{mix64(plain.a), mix64(plain.b + strlen(made_from))};
  return id == Digest{} ? Digest{1, 1} : id;
}

PythonObject* call_communicator(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("communicator", 2, "name", "members", "made_from", "place");
  const char* name = arguments.text(0);
  const char* made_from = arguments.good() ? arguments.text(2) : nullptr;
  const auto place = static_cast<int32_t>(arguments.number(3, -1));
  if (!arguments.good()) return nullptr;
  const PythonRef tuple(*api, api->PySequence_Tuple(arguments.object(1)));
  if (!tuple) return nullptr;
  std::vector<int32_t> members;
  const ptrdiff_t size = api->PyTuple_Size(tuple.get());
  for (ptrdiff_t i = 0; i < size; ++i) {
    members.push_back(static_cast<int32_t>(api->PyLong_AsLongLong(api->PyTuple_GetItem(tuple.get(), i))));
    if (members.back() == -1 && api->PyErr_Occurred()) return nullptr;
  }
  const Digest id = *made_from ? communicator_id(made_from) : Digest{};
  uint32_t handle = 0;
  enter([&](const Token& token) {
    handle = recorder.communicator(token, name, members.data(), static_cast<int32_t>(members.size()), id, place);
  });
  return api->PyLong_FromLongLong(handle);
}

PythonObject* call_frame(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("frame", 2, "phase", "layer", "op", "communicator", "flags");
  const auto phase = static_cast<int32_t>(arguments.number(0));
  const char* layer = arguments.text(1);
  const char* op = arguments.text(2);
  const uint32_t communicator = arguments.handle(3);
  const uint8_t flags = arguments.flags(4);
  if (!arguments.good()) return nullptr;
  uint32_t handle = 0;
  enter([&](const Token& token) { handle = recorder.frame(token, phase, layer, op, communicator, flags); });
  return api->PyLong_FromLongLong(handle);
}

PythonObject* call_push(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("push", 1, "frame");
  const uint32_t frame = arguments.handle(0);
  if (!arguments.good()) return nullptr;
  enter([=](const Token& token) { recorder.enter_frame(token, recorder.frame_or_scope(token, frame)); });
  return none();
}

PythonObject* call_pop(FORKPOINT_CALL_PARAMETERS) {
  enter([](const Token& token) { recorder.end_scope(token); });
  return none();
}

PythonObject* call_set_backward(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("set_backward", 1, "frame");
  const uint32_t frame = arguments.handle(0);
  if (!arguments.good()) return nullptr;
  enter([=](const Token& token) { recorder.set_backward(token, recorder.find_frame(frame)); });
  return none();
}

// ---- Records

struct Where {
  uint32_t frame = 0;
  int32_t role = 0;
  uint8_t flags = 0;
};

void record_tensor(const Where& where, const char* name, TorchTensor* tensor) {
  tensor->desc.name = name;
  tensor->desc.role = where.role;
  enter([&](const Token& token) {
    recorder.tensor_in(token, recorder.frame_or_scope(token, where.frame), &tensor->desc, where.flags);
  });
}

PythonObject* call_tensor(FORKPOINT_CALL_PARAMETERS) {
  if (!recorder.wants_records()) return api->boolean(true);
  FORKPOINT_ARGUMENTS("tensor", 4, "frame", "role", "name", "t", "flags", "global_shape", "global_offset");
  const Where where = {arguments.handle(0), static_cast<int32_t>(arguments.number(1)), arguments.flags(4)};
  const char* name = arguments.text(2);
  if (!arguments.good()) return nullptr;
  TorchTensor tensor;
  if (!describe_torch_tensor(*api, arguments.object(3), &tensor)) return api->boolean(false);
  const bool shard = arguments.has(5) || arguments.has(6);
  if (shard && !(arguments.has(5) && arguments.has(6) &&
                 describe_shard(*api, arguments.object(5), arguments.object(6), &tensor))) {
    api->PyErr_SetString(*api->value_error, "tensor(): global_shape and global_offset want one number a dimension each");
    return nullptr;
  }
  record_tensor(where, name, &tensor);
  return api->boolean(true);
}

PythonObject* call_tensors(FORKPOINT_CALL_PARAMETERS) {
  if (!recorder.wants_records()) return none();
  FORKPOINT_ARGUMENTS("tensors", 4, "frame", "role", "names", "tensors", "flags");
  TorchTensors many = {arguments.object(2), arguments.object(3)};
  many.frame = arguments.handle(0);
  many.role = static_cast<int32_t>(arguments.number(1));
  many.flags = arguments.flags(4);
  return arguments.good() ? record_torch_tensors(*api, many) : nullptr;
}

// The same in several scopes and of several roles, one of each a tensor: all that there is at one moment.
PythonObject* call_tensors_at(FORKPOINT_CALL_PARAMETERS) {
  if (!recorder.wants_records()) return none();
  FORKPOINT_ARGUMENTS("tensors_at", 4, "frames", "roles", "names", "tensors", "flags", "boxes");
  TorchTensors many = {arguments.object(2), arguments.object(3), arguments.object(0), arguments.object(1)};
  many.boxes = arguments.has(5) ? arguments.object(5) : nullptr;
  many.flags = arguments.flags(4);
  return arguments.good() ? record_torch_tensors(*api, many) : nullptr;
}

PythonObject* call_scalar(FORKPOINT_CALL_PARAMETERS) {
  if (!recorder.wants_records()) return none();
  FORKPOINT_ARGUMENTS("scalar", 4, "frame", "role", "name", "value", "flags");
  const Where where = {arguments.handle(0), static_cast<int32_t>(arguments.number(1)), arguments.flags(4)};
  const char* name = arguments.text(2);
  const double value = arguments.good() ? arguments.real(3) : 0;
  if (!arguments.good()) return nullptr;
  enter([&](const Token& token) {
    recorder.scalar_in(token, recorder.frame_or_scope(token, where.frame), name, where.role, value, where.flags);
  });
  return none();
}

// A number that a collective was called with; frame: of the collective.
PythonObject* call_argument(FORKPOINT_CALL_PARAMETERS) {
  if (!recorder.wants_records()) return none();
  FORKPOINT_ARGUMENTS("argument", 3, "frame", "name", "value");
  const uint32_t frame = arguments.handle(0);
  const char* name = arguments.text(1);
  const double value = arguments.good() ? arguments.real(2) : 0;
  if (!arguments.good()) return nullptr;
  enter([&](const Token& token) { recorder.argument_in(token, recorder.frame_or_scope(token, frame), name, value); });
  return none();
}

PythonObject* call_state(FORKPOINT_CALL_PARAMETERS) {
  if (!recorder.wants_records()) return none();
  FORKPOINT_ARGUMENTS("state", 4, "frame", "role", "name", "data", "flags");
  const Where where = {arguments.handle(0), static_cast<int32_t>(arguments.number(1)), arguments.flags(4)};
  const char* name = arguments.text(2);
  if (!arguments.good()) return nullptr;
  const PythonRef bytes(*api, api->PyBytes_FromObject(arguments.object(3)));  // itself, where it is bytes already
  char* data = nullptr;
  ptrdiff_t size = 0;
  if (!bytes || api->PyBytes_AsStringAndSize(bytes.get(), &data, &size) != 0) return nullptr;
  enter([&](const Token& token) {
    recorder.state_in(token, recorder.frame_or_scope(token, where.frame), name, where.role, data, static_cast<size_t>(size),
                      where.flags);
  });
  return none();
}

// ---- Words

PythonObject* call_fact(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("fact", 2, "name", "text");
  const char* name = arguments.text(0);
  const char* text = arguments.good() ? arguments.text(1) : nullptr;
  if (!arguments.good()) return nullptr;
  if (recorder.is_awake()) enter([=](const Token& token) { recorder.fact(token, name, text); });
  return none();
}

PythonObject* call_limit(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("limit", 2, "what", "detail");
  const char* what = arguments.text(0);
  const char* detail = arguments.good() ? arguments.text(1) : nullptr;
  if (!arguments.good()) return nullptr;
  enter([=](const Token&) { recorder.note_limit(what, detail); });
  return none();
}

PythonObject* call_gap(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("gap", 1, "reason");
  const char* reason = arguments.text(0);
  if (!arguments.good()) return nullptr;
  enter([=](const Token&) { recorder.note_gap(reason); });
  return none();
}

PythonObject* call_say(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("say", 1, "text");
  const char* text = arguments.text(0);
  if (!arguments.good()) return nullptr;
  say("%s", text);
  return none();
}

// ---- Autograd's graph

PythonObject* call_contributions(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("contributions", 4, "starts", "edges", "oldest", "most");
  const auto oldest = static_cast<uint64_t>(arguments.number(2));
  const GraphWalk walk = {arguments.object(0), arguments.object(1), oldest, arguments.number(3)};
  return arguments.good() ? find_contributions(*api, walk) : nullptr;
}

// ---- Of a process that sleeps until `forkpoint attach` wakes it

PythonObject* call_torch_imported(FORKPOINT_CALL_PARAMETERS) {
  torch_is_imported();
  return none();
}

PythonObject* call_awake(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("awake", 1, "well");
  const bool well = arguments.number(0) != 0;
  if (!arguments.good()) return nullptr;
  return torch_bridge_is_awake(well), none();
}

// ---- Deterministic kernels

PythonObject* call_scatter(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("scatter", 2, "numbers", "alpha");
  const double alpha = arguments.real(1);
  return arguments.good() ? scatter_for_torch(*api, arguments.object(0), alpha) : nullptr;
}

PythonObject* call_scatter_by_index(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("scatter_by_index", 2, "numbers", "alpha");
  const double alpha = arguments.real(1);
  return arguments.good() ? scatter_by_index_for_torch(*api, arguments.object(0), alpha) : nullptr;
}

PythonObject* call_sort_by_index(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("sort_by_index", 1, "numbers");
  return sort_by_index_for_torch(*api, arguments.object(0));
}

PythonObject* call_scatter_scratch(FORKPOINT_CALL_PARAMETERS) {
  FORKPOINT_ARGUMENTS("scatter_scratch", 3, "type", "count", "columns");
  const int64_t numbers[] = {arguments.number(0), arguments.number(1), arguments.number(2)};
  return arguments.good() ? scatter_scratch_for_torch(*api, numbers[0], numbers[1], numbers[2]) : nullptr;
}

PythonObject* call_load_scatter(FORKPOINT_CALL_PARAMETERS) { return api->PyLong_FromLongLong(load_scatter()); }

struct Function {
  const char* name;
  PythonFastFunction function;
};
constexpr Function kFunctions[] = {
    {"active", call_active}, {"wanted", call_wanted}, {"level", call_level}, {"source", call_source},
    {"rank", call_rank}, {"begin_step", call_begin_step}, {"set_base", call_set_base},
    {"begin_final", call_begin_final}, {"end_step", call_end_step}, {"micro_step", call_micro_step},
    {"communicator", call_communicator}, {"frame", call_frame}, {"push", call_push}, {"pop", call_pop},
    {"set_backward", call_set_backward}, {"tensor", call_tensor}, {"tensors", call_tensors},
    {"tensors_at", call_tensors_at}, {"scalar", call_scalar}, {"state", call_state}, {"fact", call_fact},
    {"limit", call_limit}, {"gap", call_gap}, {"say", call_say}, {"argument", call_argument},
    {"torch_imported", call_torch_imported}, {"awake", call_awake}, {"contributions", call_contributions},
    {"scatter", call_scatter}, {"load_scatter", call_load_scatter}, {"scatter_by_index", call_scatter_by_index},
    {"sort_by_index", call_sort_by_index}, {"scatter_scratch", call_scatter_scratch},
};
constexpr int kFunctionCount = sizeof(kFunctions) / sizeof(kFunctions[0]);
PythonMethod methods[kFunctionCount] = {};  // Python keeps their addresses

bool set(PythonObject* module, const char* name, PythonObject* owned) {
  const PythonRef value(*api, owned);
  return value && api->PyObject_SetAttrString(module, name, value.get()) == 0;
}

const char* watch_text(const Settings& settings) {
  if (settings.watch_nan && settings.watch_replicas) return "nan,replicas";
  return settings.watch_nan ? "nan" : settings.watch_replicas ? "replicas" : "";
}

bool add_constants(PythonObject* module, const Settings& settings) {
  static constexpr const char* kOnTrigger[] = {"warn", "stop", "deepen"};  // in the order of OnTrigger
  return set(module, "SLEEPS", api->boolean(settings.state == Settings::State::unset)) &&
         set(module, "LEVEL", api->PyLong_FromLongLong(static_cast<int>(settings.level))) &&
         set(module, "KNOBS", api->PyUnicode_FromString(settings.knobs)) &&
         set(module, "RANK", api->PyLong_FromLongLong(settings.rank)) &&
         set(module, "RECORDS", api->boolean(records_torch(settings))) &&
         set(module, "OPS", api->PyUnicode_FromString(settings.ops)) &&
         set(module, "FIRST_STEP", api->PyLong_FromLongLong(settings.first_step)) &&
         set(module, "WATCH", api->PyUnicode_FromString(watch_text(settings))) &&
         set(module, "ON_TRIGGER", api->PyUnicode_FromString(kOnTrigger[static_cast<int>(settings.on_trigger)]));
}

}  // namespace

PythonObject* make_native_module(const Python& python, const Settings& settings) {
  api = &python;
  PythonRef module(python, python.PyModule_New("_forkpoint_bridge._native"));
  if (!module || !add_constants(module.get(), settings)) return nullptr;
  for (int i = 0; i < kFunctionCount; ++i) {
    methods[i] = {kFunctions[i].name, reinterpret_cast<void*>(kFunctions[i].function), kPythonFastcall, nullptr};
    if (!set(module.get(), kFunctions[i].name, python.PyCFunction_NewEx(&methods[i], nullptr, nullptr))) return nullptr;
  }
  return module.release();
}

}  // namespace forkpoint
