#include "probes/nccl_records.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

#include "probes/nccl_calls.h"
#include "probes/nccl_swap.h"
#include "probes/os.h"
#include "probes/per_thread.h"
#include "probes/recorder.h"

#define FORKPOINT_PROBE_ITSELF 1
#include "probes/forkpoint.h"

namespace forkpoint {
namespace {

constexpr int64_t kPatienceNs = 5'000'000'000;
constexpr int64_t kPatienceOnceInVainNs = 20'000'000;  // a program that drives several communicators from one thread
constexpr int64_t kShortestPauseNs = 20'000;
constexpr int64_t kLongestPauseNs = 1'000'000;

struct MadeInGroup {
  NcclComm* made;
  const NcclLibrary* library;
  NcclFamily* family;
  int place;
};

// Of one thread. Both lists keep their room, so that only a group larger than any before allocates.
struct Group {
  std::vector<NcclOutput> outputs;
  std::vector<MadeInGroup> made;
};
thread_local int group_depth __attribute__((tls_model("initial-exec"))) = 0;

constinit std::atomic<uint32_t> nobody_wakes{0};

// Our failures are a Gap, never the host's.
template <typename Body>
void within_probe(Body body) {
  const Guard guard;
  if (!guard.entered()) return recorder.refuse_reentrant();
  try {
    body(guard.token());
  } catch (const std::exception& error) {
    recorder.refuse_broken(error.what());
  }
}

// std::ldexp would link libm.
double power_of_two(int exponent) { return std::bit_cast<double>(static_cast<uint64_t>(1023 + exponent) << 52); }

double half_to_double(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent ? (1024 + fraction) * power_of_two(exponent - 25) : fraction * power_of_two(-24));
}

template <typename Number>
Number read(const void* data) {
  Number number;
  memcpy(&number, data, sizeof(number));
  return number;
}

forkpoint_tensor_desc describe(const Name* name, Role role, const void* data, DType dtype, const int64_t* shape,
                               int dims, void* stream) {
  forkpoint_tensor_desc desc = {};
  desc.struct_size = sizeof(desc);
  desc.name = name->text;
  desc.data = data;
  desc.dtype = static_cast<int32_t>(dtype);
  desc.role = static_cast<int32_t>(role);
  desc.device = FORKPOINT_CUDA;
  desc.ndim = dims;
  desc.shape = shape;
  desc.stream = stream;
  return desc;
}

class CallRecorder {
 public:
  CallRecorder(const Token& token, const NcclCall& call, NcclCommunicator& communicator)
      : token_(token), call_(call), communicator_(communicator) {}

  bool run(NcclOutput* output) {
    if (!make_frame()) return false;
    const DType* dtype = nccl_dtype(call_.type);
    const bool at_root = call_.root == communicator_.place;
    const bool has_input = call_.input.parts != NcclBuffer::none && (at_root || !call_.input_at_root);
    const bool has_output = call_.output.parts != NcclBuffer::none && (at_root || !call_.output_at_root);
    if (!dtype) {
      recorder.lose_records(Loss::bad_dtype, uint64_t{has_input} + has_output);
      return false;
    }
    record_arguments();
    if (has_input) record_input(*dtype);
    if (has_output) fill(output, *dtype);
    return has_output && output->tensor;
  }

 private:
  bool make_frame() {
    const ScopeStack* stack = ScopeStack::of_thread_if_any(token_);
    if (stack) frame_ = stack->top();
    frame_.phase = static_cast<int8_t>(Phase::collective);
    frame_.collective = true;
    frame_.op = recorder.names().create() ? recorder.names().name(call_.op) : nullptr;
    frame_.communicator = nccl_communicators.entry(token_, communicator_);
    family_ = nccl_communicators.snapshot(*communicator_.family);  // its size is known only now
    if (frame_.op && frame_.communicator) return true;
    recorder.lose_records(Loss::nccl_communicator, 1);
    return false;
  }

  // What it was asked to do stands before what it was given, so that a difference in it comes first.
  void record_arguments() {
    const int reduction = std::min(call_.reduction, kNcclBuiltInReductions);
    if (reduction >= 0) record_argument("reduction", reduction);
    if (call_.root >= 0) record_argument("root", call_.root);
    // Two runs of which one went another way differ here, and not in a result without a reason.
    if (nccl_swap_is_on() && call_.swap != NcclCall::Swap::none) {
      if (const int does = nccl_swap_does(call_); does >= 0) record_argument("in rank order", does);
    }
    if (reduction == kNcclBuiltInReductions) record_factor();
  }

  // Named as its tensors are: the calls of several places of one process come in another order in each run.
  void record_argument(const char* what, double value) {
    const Name* name = tensor_name(what);
    if (!name) return recorder.lose_records(Loss::names_full, 1);
    recorder.argument_in(token_, frame_, name->text, value);
  }

  void record_factor() {
    NcclCommunicators::Reduction known;
    if (!nccl_communicators.find_reduction(token_, call_.comm, call_.reduction, &known)) {
      return recorder.lose_records(Loss::nccl_reduction, 1);
    }
    if (!known.on_device) return record_argument("premul.scale", known.value);
    const DType* dtype = nccl_dtype(known.type);
    const Name* name = tensor_name("premul.scale");
    if (!dtype || !name) return recorder.lose_records(Loss::nccl_reduction, 1);
    const auto desc = describe(name, Role::input, known.address, *dtype, nullptr, 0, call_.stream);
    recorder.tensor_in(token_, frame_, &desc);
  }

  // "input", of a send "input to 3"; with its place in front where this process holds several.
  const Name* tensor_name(const char* side) const {
    char text[96];
    int length = 0;
    if (family_.places > 1) length = snprintf(text, sizeof(text), "rank %d: ", communicator_.place);
    length += snprintf(text + length, sizeof(text) - static_cast<size_t>(length), "%s", side);
    if (call_.peer >= 0) {
      const char* direction = side[0] == 'i' ? "to" : "from";
      snprintf(text + length, sizeof(text) - static_cast<size_t>(length), " %s %d", direction, call_.peer);
    }
    return recorder.names().name(text);
  }

  // Shares of several members are a row each.
  int shape_of(NcclBuffer::Parts parts, int64_t* shape) const {
    const auto count = static_cast<int64_t>(call_.count);
    shape[0] = parts == NcclBuffer::each ? family_.size : count;
    shape[1] = count;
    return parts == NcclBuffer::each ? 2 : 1;
  }

  void record_input(DType dtype) {
    int64_t shape[2];
    const int dims = shape_of(call_.input.parts, shape);
    const Name* name = tensor_name("input");
    if (!name) return recorder.lose_records(Loss::names_full, 1);
    const auto desc = describe(name, Role::input, call_.input.data, dtype, shape, dims, call_.stream);
    recorder.tensor_in(token_, frame_, &desc);
  }

  void fill(NcclOutput* output, DType dtype) {
    output->frame = frame_;
    output->tensor = tensor_name("output");
    if (!output->tensor) return recorder.lose_records(Loss::names_full, 1);
    output->communicator = &communicator_;
    output->comm = call_.comm;
    output->data = call_.output.data;
    output->stream = call_.stream;
    output->dims = shape_of(call_.output.parts, output->shape);
    output->dtype = dtype;
  }

  const Token& token_;
  const NcclCall& call_;
  NcclCommunicator& communicator_;
  NcclFamily family_;
  ScopeFrame frame_;
};

void record_output(const Token& token, const NcclOutput& output) {
  const auto desc =
      describe(output.tensor, Role::output, output.data, output.dtype, output.shape, output.dims, output.stream);
  recorder.tensor_in(token, output.frame, &desc);
}

// Has NCCL enqueued what it was given? in progress: not within our patience. The probe is not entered meanwhile.
NcclResult settled(const NcclOutput& output, int64_t give_up_ns) {
  const auto ask = output.communicator->library->CommGetAsyncError;
  if (!ask) return kNcclInProgress;
  const bool hopeless = output.communicator->waited_in_vain.load(std::memory_order_relaxed);
  if (hopeless) give_up_ns = std::min(give_up_ns, now_ns() + kPatienceOnceInVainNs);
  for (int64_t pause_ns = kShortestPauseNs;; pause_ns = std::min(2 * pause_ns, kLongestPauseNs)) {
    NcclResult state = kNcclInProgress;
    const auto asked = [&] { return ask(output.comm, &state); };
    if (ask_state(output.comm, &state, asked) != kNcclSuccess) return kNcclSystemError;
    if (state != kNcclInProgress) return state;
    if (now_ns() > give_up_ns) break;
    futex_wait(nobody_wakes, 0, pause_ns);  // nanosleep is a cancellation point
  }
  output.communicator->waited_in_vain.store(true, std::memory_order_relaxed);
  return kNcclInProgress;
}

// Outputs from `first` on that are of one communicator.
size_t end_of_run(const std::vector<NcclOutput>& outputs, size_t first) {
  size_t end = first;
  while (end < outputs.size() && outputs[end].comm == outputs[first].comm) ++end;
  return end;
}

void finish_outputs(const std::vector<NcclOutput>& outputs, bool in_progress) {
  const int64_t give_up_ns = now_ns() + kPatienceNs;
  for (size_t i = 0; i < outputs.size();) {
    const size_t end = end_of_run(outputs, i);
    const NcclResult result = in_progress ? settled(outputs[i], give_up_ns) : kNcclSuccess;
    within_probe([&](const Token& token) {
      if (result == kNcclInProgress) recorder.lose_records(Loss::nccl_in_progress, end - i);
      for (; result == kNcclSuccess && i < end; ++i) record_output(token, outputs[i]);
    });
    i = end;
  }
}

}  // namespace

double nccl_scalar(const void* data, int type) {
  const DType* dtype = nccl_dtype(type);
  switch (dtype ? *dtype : DType::raw) {
    case DType::i8:
      return read<int8_t>(data);
    case DType::u8:
      return read<uint8_t>(data);
    case DType::i32:
      return read<int32_t>(data);
    case DType::u32:
      return read<uint32_t>(data);
    case DType::i64:
      return static_cast<double>(read<int64_t>(data));
    case DType::u64:
      return static_cast<double>(read<uint64_t>(data));
    case DType::f16:
      return half_to_double(read<uint16_t>(data));
    case DType::bf16:
      return std::bit_cast<float>(static_cast<uint32_t>(read<uint16_t>(data)) << 16);
    case DType::f32:
      return read<float>(data);
    case DType::f64:
      return read<double>(data);
    default:
      return read<uint8_t>(data);  // of the 8-bit floats the bits
  }
}

namespace {

// The torch bridge's scope around what is beside the training: saving, loading, pickled objects, barriers (torch/aside.py),
// or an NVTX range in it.
bool is_aside(const ScopeFrame& frame) {
  return frame.phase == static_cast<int8_t>(Phase::state) && (frame.flags & kRecordEval) != 0;
}

}  // namespace

bool record_nccl_inputs(const NcclCall& call, const NcclLibrary* library, NcclOutput* output) {
  bool to_finish = false;
  if (!call.comm) return false;  // NCCL refuses it
  within_probe([&](const Token& token) {
    const ScopeStack* stack = ScopeStack::of_thread_if_any(token);
    if (stack && (stack->top().collective || is_aside(stack->top()))) return;  // the program reports it itself, or nobody does
    NcclCommunicator* communicator = nccl_communicators.find(token, call.comm, library);
    if (!communicator) return recorder.lose_records(Loss::nccl_communicator, 1);
    to_finish = CallRecorder(token, call, *communicator).run(output);
  });
  return to_finish;
}

void finish_nccl_call(NcclResult result, const NcclOutput& output) {
  if (result != kNcclSuccess && result != kNcclInProgress) return;
  if (inside_nccl_group()) {
    within_probe([&](const Token&) {
      if (Group* group = PerThread<Group>::get())
        group->outputs.push_back(output);
      else
        recorder.lose_records(Loss::no_memory, 1);
    });
    return;
  }
  if (result == kNcclInProgress) result = settled(output, now_ns() + kPatienceNs);
  within_probe([&](const Token& token) {
    if (result == kNcclSuccess) record_output(token, output);
    if (result == kNcclInProgress) recorder.lose_records(Loss::nccl_in_progress, 1);
  });
}

void nccl_group_begun() { ++group_depth; }

bool nccl_group_ends() {
  if (group_depth == 0) return false;  // the caller's mistake, which NCCL tells it
  return --group_depth == 0;
}

void finish_nccl_group(NcclResult result, bool launched) {
  Group* group = PerThread<Group>::if_any();
  if (!group) return;
  const bool good = result == kNcclSuccess || result == kNcclInProgress;
  within_probe([&](const Token& token) {
    for (const MadeInGroup& one : group->made) {
      if (good)
        nccl_communicators.made(token, one.made, one.library, one.family, one.place);
      else
        nccl_communicators.leave(token, one.family);
    }
    if (result == kNcclSuccess && !group->made.empty()) nccl_communicators.suggest_rank(token, *group->made[0].family);
  });
  group->made.clear();
  if (good && launched) finish_outputs(group->outputs, result == kNcclInProgress);
  group->outputs.clear();
}

bool inside_nccl_group() { return group_depth > 0; }

void made_in_nccl_group(NcclComm* made, const NcclLibrary* library, NcclFamily* family, int place) {
  if (Group* group = PerThread<Group>::get()) group->made.push_back({made, library, family, place});
}

void forget_nccl_groups_in_child() {
  group_depth = 0;
  Group* group = PerThread<Group>::if_any();
  if (!group) return;
  group->outputs.clear();
  group->made.clear();
}

}  // namespace forkpoint
