#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <new>

#include "lib/error.h"
#include "lib/probe_contract.h"
#include "probes/agent.h"
#include "probes/attachment.h"
#include "probes/recorder.h"
#include "probes/step_marks.h"
#include "probes/torch_bridge.h"

namespace forkpoint {
namespace {

using control::Message;

const Settings* base = nullptr;
control::SocketName own;

Message refused(const std::string& why) { return Message("refused").set("why", why); }

Message status() {
  int world = 0;
  const int rank = recorder.known_rank(&world);
  const AttachState state = attachment.state();
  struct stat space = {};
  Message message("status");
  message.set("pid", own.pid).set("ticks", static_cast<int64_t>(own.start_ticks)).set("probe", FORKPOINT_VERSION);
  message.set("abi", contract::kProbeAbi).set("job", base->job).set("state", name(state));
  message.set("namespace", stat("/proc/self/ns/pid", &space) == 0 ? static_cast<int64_t>(space.st_ino) : 0);
  if (rank >= 0) message.set("rank", rank).set("world", world);
  if (recorder.last_step() >= 0) message.set("step", recorder.last_step()).set("in_step", recorder.in_step()).set("base", step_base());
  message.set("bridge", name(torch_bridge_state()));
  if (attachment.first_step() != INT64_MAX) message.set("first", attachment.first_step());
  if (attachment.last_step() != INT64_MAX) message.set("last", attachment.last_step());
  if (state > AttachState::listening) message.set("run", recorder.run_directory()).set("level", std::string(recorder.level_name()));
  if (state == AttachState::done) message.set("recorded", attachment.recorded()).set("why", attachment.outcome());
  return message;
}

Message listen(const Message& request, AgentClient* client, bool owned) {
  if (owned && !client->is_owner) return refused("another `forkpoint attach` has it");
  const auto level = level_from_name(request.text("level"));
  if (!level) return refused(fmt::format("it knows no level `{}`", request.text("level")));
  if (*level == Level::launch) {
    return refused("its launches cannot be recorded from the middle on: which buffers there are was not seen (use --level layer)");
  }
  if (!attachment.listen(*base, *level)) return refused("its last recording has not ended yet");
  client->is_owner = true;
  wake_torch_bridge(*level);
  return status();
}

Message arm(const Message& request) {
  if (attachment.state() != AttachState::listening) return refused("it was not told to listen");
  const auto first = request.number("first"), last = request.number("last");
  const std::string run = request.text("run");
  if (!first || !last || *first < 0 || *last < *first) return refused("the steps it was given make no sense");
  if (run.size() >= sizeof(base->run_directory) || !run.starts_with('/')) return refused("the run folder's path is too long or not absolute");
  std::unique_ptr<Settings> window(new (std::nothrow) Settings(*base));
  if (!window) return refused("it has no memory");
  window->state = Settings::State::ready;
  window->level = *level_from_name(recorder.level_name());
  window->first_wanted_step = *first;
  window->last_wanted_step = *last;
  window->mask_names = request.text("mask") == "1";
  window->max_size_bytes = static_cast<uint64_t>(std::max<int64_t>(request.number("max_size").value_or(0), 0));
  run.copy(window->run_directory, run.size());
  window->run_directory[run.size()] = '\0';
  attachment.arm(window.release());
  return status();
}

Message end_at(const Message& request) {
  const auto step = request.number("step");
  if (attachment.state() <= AttachState::listening) return refused("it is not attached");
  if (!step || *step < 0) return refused("the step it was given makes no sense");
  attachment.end_at(*step);
  return status();
}

}  // namespace

void answer_for(const Settings& settings, const control::SocketName& process) {
  base = &settings;
  own = process;
}

Message answer_request(const Message& request, AgentClient* client, bool owned) {
  if (request.version != control::kVersion) {
    return refused(fmt::format("its probe {} speaks version {} of the protocol", FORKPOINT_VERSION, control::kVersion));
  }
  if (request.word == "status") return status();
  if (request.word == "end_at") return end_at(request);
  if (request.word == "listen") return listen(request, client, owned);
  if (!client->is_owner) return refused("it is not attached by this client");
  if (request.word == "arm") return arm(request);
  if (request.word == "go") attachment.go();
  else if (request.word == "call_off") attachment.call_off();
  else if (request.word == "abort") attachment.abort();
  else if (request.word == "release") {
    if (!attachment.release()) return refused("its recording has not ended yet");
    client->is_owner = false;
  } else {
    return refused(fmt::format("it knows no request `{}`", request.word));
  }
  return status();
}

void owner_has_gone() {
  // What has begun ends with its step: nobody waits for a tidy end any more, but a half step is of no use.
  if (attachment.state() == AttachState::recording) attachment.call_off();
  else attachment.abort();
}

}  // namespace forkpoint
