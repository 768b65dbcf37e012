// A program with NVTX ranges, as trainers have them: nvtx_client SCENARIO.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "probes/forkpoint.h"

namespace {

void record(const char* name) {
  const float value[] = {1, 2};
  forkpoint::tensor(name, FORKPOINT_ROLE_GRADIENT, value, {2});
}

nvtxEventAttributes_t event_of(nvtxStringHandle_t registered) {
  nvtxEventAttributes_t event = {};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  event.message.registered = registered;
  return event;
}

void nested() {
  forkpoint::Step step(0);
  printf("%d ", nvtxRangePushA("forward"));
  record("a");
  nvtxRangePushW(L"blöcke.0 ☃𝄞");
  record("b");
  nvtxEventAttributes_t event = {};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = "fc1";
  nvtxRangePushEx(&event);
  record("c");
  printf("%d ", nvtxRangePop());
  event.messageType = NVTX_MESSAGE_UNKNOWN;
  nvtxRangePushEx(&event);  // without a name: adds nothing
  record("d");
  nvtxRangePop();
  nvtxRangePop();
  nvtxRangePop();
  printf("%d\n", nvtxRangePop());  // one too many
  record("e");
}

void domains() {
  nvtxDomainHandle_t model = nvtxDomainCreateA("model"), wide = nvtxDomainCreateW(L"library"),
                     nccl = nvtxDomainCreateA("NCCL");
  const nvtxEventAttributes_t block = event_of(nvtxDomainRegisterStringA(model, "block"));
  const nvtxEventAttributes_t call = event_of(nvtxDomainRegisterStringW(wide, L"call"));
  forkpoint::Step step(0);
  nvtxDomainRangePushEx(model, &block);
  nvtxDomainRangePushEx(nccl, &call);
  nvtxDomainRangePushEx(wide, &call);
  record("both");
  nvtxDomainRangePop(model);  // crosses
  record("crossed");
  nvtxDomainRangePop(wide);
  nvtxDomainRangePop(nccl);
  record("none");
}

void with_layers() {
  forkpoint::Step step(0);
  nvtxRangePushA("outer");
  {
    forkpoint::Scope layer(FORKPOINT_BACKWARD, "blocks.0");
    record("of the program");
    nvtxRangePushA("aten::mm, seq = 17, op_id = 12");
    record("below it");
    nvtxRangePop();
  }
  record("outer again");
  nvtxRangePop();
  std::thread([] { record("another thread"); }).join();
}

void steps() {
  record("before");
  for (int i = 0; i < 3; ++i) {
    const std::string name = "step " + std::to_string(i + 100);
    if (i == 0) nvtxRangePushA(name.c_str());
    if (i == 1) nvtxMarkA(name.c_str());
    if (i == 2) nvtxRangeStartA(name.c_str());
    nvtxRangePushA("layer");
    record("in it");
    nvtxRangePop();
    if (i == 0) nvtxRangePop();
  }
}

void own_steps() {
  for (int i = 5; i < 7; ++i) {
    forkpoint::Step step(i);
    nvtxRangePushA("step");
    record("in it");
    nvtxRangePop();
  }
}

void marks_then_own_steps() {
  nvtxRangePushA("step");
  own_steps();
  nvtxRangePop();
}

void many_names() {
  forkpoint::Step step(0);
  for (int i = 0; i < 20'000; ++i) {
    nvtxRangePushA(("range " + std::to_string(i) + " of many").c_str());
    nvtxRangePop();
  }
  nvtxRangePushA("one more");
  record("late");
  nvtxRangePop();
}

void pushed(const std::string& range, const char* tensor) {
  nvtxRangePushA(range.c_str());
  if (tensor) record(tensor);
  nvtxRangePop();
}

// Names that count on and on, among those of a deep model's layers.
void counting() {
  {
    forkpoint::Step step(0);
    for (int i = 0; i < 20'000; ++i) {
      const std::string number = std::to_string(i);
      const bool last = i == 19'999;
      pushed("iter " + number, i == 63 ? "64th" : i == 64 ? "65th" : last ? "iter" : nullptr);
      pushed("step=" + number, last ? "equals" : nullptr);
      pushed("batch #" + number, last ? "hash" : nullptr);
      pushed("i:" + number, last ? "colon" : nullptr);
      pushed("epoch (" + number + ")", last ? "brackets" : nullptr);
      pushed("batch [" + number + "/20000]", last ? "of" : nullptr);
      pushed("iter" + number, last ? "word" : nullptr);
    }
    pushed("iter 3", "early");
    for (int i = 0; i < 200; ++i) {
      const std::string number = std::to_string(i);
      pushed("blocks." + number + ".attn", i == 199 ? "attn" : nullptr);
      pushed("blocks." + number, i == 199 ? "block" : nullptr);
      pushed("layer" + number, i == 199 ? "layer" : nullptr);
      pushed("layers[" + number + "]", i == 199 ? "index" : nullptr);
    }
    pushed("one more", "late");
  }
}

// A counting name that is a step mark.
void counting_steps() {
  for (int i = 0; i < 200; ++i) {
    nvtxRangePushA(("turn " + std::to_string(i)).c_str());
    record("in it");
    nvtxRangePop();
  }
}

void deep() {
  forkpoint::Step step(0);
  for (int i = 0; i < 100; ++i) nvtxRangePushA("x");
  for (int i = 0; i < 100; ++i) nvtxRangePop();
  nvtxRangePushA("shallow");
  record("after");
  nvtxRangePop();
}

void show_environment() {
  nvtxRangePushA("x");
  const char* path = getenv("NVTX_INJECTION64_PATH");
  printf("%s\n", path ? path : "unset");
  nvtxRangePop();
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> scenarios = {
      {"nested", nested},         {"domains", domains},     {"with_layers", with_layers},
      {"steps", steps},           {"own_steps", own_steps}, {"marks_then_own_steps", marks_then_own_steps},
      {"many_names", many_names}, {"deep", deep},           {"environment", show_environment},
      {"counting", counting},     {"counting_steps", counting_steps}};
  const auto found = scenarios.find(argc > 1 ? argv[1] : "");
  if (found == scenarios.end()) return 98;
  found->second();
  return 0;
}
