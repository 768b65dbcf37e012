// The one recorder of a process: every way in (the C API, hooks) translates its call into one of these. All functions may
// be called by any thread, never throw, and leave the host's state alone. The object needs no construction and is never
// destroyed: threads of the host may still call while the process ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "probes/descriptor.h"
#include "probes/frames.h"
#include "probes/guard.h"
#include "probes/handle_table.h"
#include "probes/notes.h"
#include "probes/scopes.h"
#include "probes/session.h"
#include "probes/stop_board.h"

struct forkpoint_api;
struct CUctx_st;

namespace forkpoint {

class CudaContext;
class RecordBatch;
struct BatchPlace;
struct TensorRequest;

// Which settings count: those that the process was loaded with, or those of a recording that was asked for later.
class CurrentSettings {
 public:
  void operator=(const Settings* settings) { settings_.store(settings, std::memory_order_release); }
  const Settings* operator->() const { return settings_.load(std::memory_order_acquire); }
  const Settings& operator*() const { return *settings_.load(std::memory_order_acquire); }
  operator const Settings*() const { return settings_.load(std::memory_order_acquire); }

 private:
  std::atomic<const Settings*> settings_{nullptr};
};

class Recorder {
 public:
  // When the probe is loaded. settings are ready; table's `active` is cleared when recording ends.
  void set_up(const Settings* settings, forkpoint_api* table);

  void set_rank(const Token& token, int32_t rank, int32_t world_size);
  // computed: records of kRecordCandidate that came since the last step ended belong to it.
  void begin_step(const Token& token, int64_t step, bool computed = false) { begin_step(token, {step, nullptr, computed}); }
  // The next of those that are counted from first_step() on: *begun of them have begun.
  void begin_counted_step(const Token& token, std::atomic<int64_t>* begun) {
    begin_step(token, {first_step() + begun->load(), begun, false});
  }
  // Behind the last step, for what the program left: a part of that step, which comes again in the stream with nothing but
  // records of kRecordEval. end_step() ends it. False: there is no step that is recorded, or one is open.
  bool begin_final(const Token& token);
  void end_step(const Token& token);
  void set_micro_step(const Token& token, int32_t index);
  void begin_scope(const Token& token, int32_t phase, const char* layer, const char* op);
  void begin_collective(const Token& token, const char* op, const char* communicator, const int32_t* members,
                        int32_t member_count, const char* layer);
  void end_scope(const Token& token);
  void tensor(const Token& token, const forkpoint_tensor_desc* desc);
  void scalar(const Token& token, const char* name, int32_t role, double value);
  void state(const Token& token, const char* name, int32_t role, const void* data, size_t size_bytes);
  void fact(const Token& token, const char* name, const char* value);

  // ---- Collectives as hooks see them (nccl_records.h). Awake: something may be recorded, now or later.
  bool is_awake() const {
    return settings_ && settings_->state == Settings::State::ready && !ended_.load(std::memory_order_relaxed);
  }
  // Or once somebody attaches: what a communicator was made from is only seen while it is made.
  bool may_wake() const { return is_awake() || sleeps_by_itself(); }
  bool wants_records() const { return is_awake() && wanted_.load(std::memory_order_relaxed); }
  // As tensor, scalar and state, in a scope that is given. flags: of RecordFlags, beside those of the scope.
  void tensor_in(const Token& token, const ScopeFrame& frame, const forkpoint_tensor_desc* desc, uint8_t flags = 0);
  void scalar_in(const Token& token, const ScopeFrame& frame, const char* name, int32_t role, double value,
                 uint8_t flags = 0);
  void state_in(const Token& token, const ScopeFrame& frame, const char* name, int32_t role, const void* data,
                size_t size_bytes, uint8_t flags = 0);
  // A number that a collective was called with; in its scope.
  void argument_in(const Token& token, const ScopeFrame& frame, const char* name, double value);
  void lose_records(Loss loss, uint64_t records) { losses_.add(loss, place(), records); }
  // -1: neither the program nor its launcher has told it.
  int known_rank(int* world_size) const;
  // As set_rank, from what was merely seen: without effect where the rank is known, or something was recorded already.
  void suggest_rank(const Token& token, int rank, int world_size);

  // ---- A framework's bridge (torch_calls.cpp). Scopes that are named once and then by a number, for the process's life;
  // 0: there are too many (counted as lost). phase: -1 for none. Nothing is inherited. communicator: of communicator(), 0: none.
  uint32_t frame(const Token& token, int32_t phase, const char* layer, const char* op, uint32_t communicator, uint8_t flags);
  // id, own_place: as Communicator (lib/record.h); a zero id: its members call it by one name.
  uint32_t communicator(const Token& token, const char* name, const int32_t* members, int32_t member_count,
                        const Digest& id = {}, int32_t own_place = -1);
  // 0 (or a number that was not given out): the scope that the thread has open.
  const ScopeFrame& frame_or_scope(const Token& token, uint32_t handle) const {
    const ScopeFrame* frame = frames_.find(handle);
    return frame ? *frame : scope(token);
  }
  // As tensor_in for each, in their order, with the digests of what lies on a device in as few launches as can be, all of them
  // enqueued when this returns. batch: room for them, the caller's alone. record_batch.h.
  void tensors_in(const Token& token, const TensorRequest* requests, size_t count, RecordBatch& batch);
  const ScopeFrame* find_frame(uint32_t handle) const { return frames_.find(handle); }
  void enter_frame(const Token& token, const ScopeFrame& frame);  // until end_scope
  // As ScopeStack::set_backward.
  void set_backward(const Token& token, const ScopeFrame* frame);
  // Where the numbers of the steps come from ("optimizer", "scheduler", ...). Without effect behind the first record.
  void set_step_base(const Token& token, const char* base);
  // FORKPOINT_STOP_AFTER: begin_step() of this step will wait to be ended.
  bool is_past_last_step(int64_t step) const { return settings_ && settings_->stop_after >= 0 && stop_.is_past(step); }
  // Each text once. With masked names only what stands before a colon is written, and no detail.
  void note_limit(const char* what, const char* detail);
  void note_gap(const char* reason);

  // ---- Launch level (launch_recorder.h). Are launches of this moment kept?
  bool wants_launches() const {
    return records_launches() && wanted_.load(std::memory_order_relaxed) && !ended_.load(std::memory_order_relaxed);
  }
  // Were they asked for at all?
  bool records_launches() const {
    return settings_ && settings_->state == Settings::State::ready && settings_->level == Level::launch;
  }
  struct RowPlace {
    Session* session = nullptr;
    Session::Ring::Claim claim;
  };
  // A place for a row; false: it is lost (counted). Then publish_row must follow, which takes the packet.
  bool claim_row(const Token& token, RowPlace* place);
  void publish_row(const Token& token, const RowPlace& place, LaunchPacket* packet);
  // Waits, bounded, until the writer has got on: what it holds is given back by then. false: it has not.
  bool await_writer(const Token& token);
  // See Session::is_stalled.
  bool is_stalled() const;
  void note_stall();
  // REQUIRES: names().create() was true. nullptr when there are too many.
  // recompute: the thread is in a layer's second forward.
  const SiteEntry* launch_site(const Token& token, const Name* kernel, bool* recompute = nullptr);
  void lose_row(Loss loss, int error = 0) { lose(loss, error); }
  const Settings& settings() const { return *settings_; }
  int own_rank() const;
  int32_t micro_step() const { return micro_step_.load(std::memory_order_relaxed); }
  void limit(Limit limit) { limits_.add(limit); }
  NameTables& names() { return names_; }
  int64_t first_step() const { return settings_->first_step >= 0 ? settings_->first_step : 0; }  // of marked steps
  // Of a launch made now: between two steps it belongs to the next one.
  int64_t current_step() const {
    if (!any_step_.load(std::memory_order_relaxed)) return kPrologueStep;
    return step_.load() + (in_step_.load(std::memory_order_relaxed) ? 0 : 1);
  }
  uint64_t next_row() const { return next_row_.load(std::memory_order_relaxed); }  // of the step, as it will be numbered
  // The probe's part of `context`, which is current. nullptr: it could not be made.
  CudaContext* digest_context(const Token& token, CUctx_st* context, int* error);

  // A call that came while its thread was in the probe already: counted, not served.
  void refuse_reentrant();
  // A call that failed for a reason that nobody foresaw.
  void refuse_broken(const char* what);
  // Waits, bounded, until what was recorded so far is written. Before the CUDA driver goes.
  void drain_at_exit();
  // Ends the stream as whole, bounded. Safe in a signal handler; does nothing in a child that does not own the stream.
  void finish_at_exit();
  // As much as can be on disk within a second, before abort. The stream goes on, should the process live. Safe in a signal handler.
  void save_before_death();
  // In the child of a fork: nothing of the parent's recording is touched.
  void after_fork_in_child();
  void deactivate();

  // ---- Recordings that are asked for while the process runs (attachment.h). Not asked for at load: the process sleeps.
  bool sleeps_by_itself() const { return base_ && base_->state == Settings::State::unset; }
  void be_reachable();  // this process trains: it may be attached from now on. At calls of the host
  // Agent's thread. Awake, but for steps only. settings: ready, and without a wanted step.
  void listen(const Settings* settings);
  void stop_listening();
  // Host's thread, at a step's begin: what follows is recorded as settings say.
  void wake(const Settings* settings);
  void end_watching(const Token& token);
  void fall_asleep(bool cut);  // any thread. cut: in the middle of a step
  // Agent's thread, behind fall_asleep.
  bool session_has_ended();
  void copy_session_failure(char* text, size_t text_bytes);
  bool reclaim_session();  // false: somebody may still use it; ask again
  // The last step that has begun; -1: none, or nobody counted while the process slept.
  int64_t last_step() const;
  bool in_step() const { return in_step_.load(); }
  const char* run_directory() const { return settings_->run_directory; }
  std::string_view level_name() const { return name(settings_->level); }

 private:
  enum class Life : uint32_t { idle, starting, running, ended };

  Session* session(const Token& token);
  Session* session_if_running();
  Session* start(const Token& token);
  bool start_session(const Token& token);
  void say_rank_problem(int rank, int world_size) const;
  bool is_own_rank(int rank) const;
  void handle_forks();
  const ScopeFrame& scope(const Token& token) const;
  void push_scope(const Token& token, const ScopeFrame& frame);
  bool skips(Role role, bool collective) const;
  SiteKey site_key_of(const ScopeFrame& frame, Role role, Kind kind, const Name* name) const;
  void record(const Token& token, const SiteKey& site, uint8_t flags, const LayoutKey& layout, const DigestResult& result);
  void record_number(const Token& token, const SiteKey& site, uint8_t flags, double value);
  void record_on_device(const Token& token, const SiteKey& site, uint8_t flags, const CheckedTensor& tensor);
  void fill_record(Event& event, const SiteEntry& site, const LayoutEntry& layout, uint8_t flags, const DigestResult& result) const;
  void publish_on_device(const Token& token, Session& session, const BatchPlace& place, const DeviceOutcome& outcome);
  bool stage(const Token& token, const TensorRequest& request, BatchPlace* place);
  void flush(const Token& token, RecordBatch& batch);
  void publish(const Token& token, Session& session, RecordBatch& batch, size_t first, size_t end);
  struct StepBegin {
    int64_t step;                 // counted: as it was when the caller came
    std::atomic<int64_t>* begun;  // nullptr: the program has numbered it
    bool computed;
  };
  void begin_step(const Token& token, StepBegin begin);
  bool tell_step(const Token& token, const StepBegin& begin, bool sleeper);
  bool push_step_event(const Token& token, const Event& event, bool ends_step);
  void lose(Loss loss, int error = 0);
  int64_t place() const;  // the step for a Gap
  int64_t exit_deadline_ns();
  void note_session_end(bool whole);
  bool is_past_stop(const Token& token, int64_t step);
  void stop_recording(const Token& token);

  CurrentSettings settings_;
  const Settings* base_ = nullptr;  // as the process was loaded
  Session* retired_ = nullptr;      // ended, and not freed yet; agent's thread
  forkpoint_api* table_ = nullptr;
  NameTables names_;
  FactList facts_;
  LossLog losses_;
  LimitSet limits_;
  Notes notes_;
  FrameTable frames_;
  std::atomic<uint32_t> life_{0};  // enum Life; futex
  std::atomic<Session*> session_{nullptr};
  std::atomic<bool> tables_ready_{false};
  std::atomic<int> given_rank_{-1};  // by forkpoint_rank
  std::atomic<int> given_world_{0};
  std::atomic<bool> broken_said_{false};
  std::atomic<bool> fork_handler_{false};
  std::atomic<bool> drain_registered_{false};
  std::atomic<int64_t> exit_deadline_ns_{0};

  // Steps begin and end one after another, in the stream as well, whoever tells of them: two threads may come at once.
  // Held while there is no place in the ring; never across a CUDA call.
  SpinLock step_lock_;
  std::atomic<bool> any_step_{false};
  std::atomic<bool> step_is_known_{false};  // it was told since the process last fell asleep
  std::atomic<bool> in_step_{false};
  std::atomic<bool> wanted_{true};  // records of this moment are kept
  std::atomic<int64_t> step_{kPrologueStep};
  std::atomic<uint64_t> step_serial_{0};
  std::atomic<int32_t> micro_step_{0};
  std::atomic<uint64_t> next_row_{0};
  std::atomic<bool> facts_full_{false};
  std::atomic<bool> ended_{false};

  // Ranks of the ancestors that have streams: a child under one of them (a data-loader worker) must not record.
  static constexpr int kMaxAncestors = 8;
  int ancestor_ranks_[kMaxAncestors] = {};
  int ancestors_ = 0;

  Stop stop_;
};

extern Recorder recorder;

}  // namespace forkpoint
