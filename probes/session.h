// One recording of this process: the ring, the writer thread and the stream. Begun by the first record, ended by the
// process's exit, an error, the size limit, or `forkpoint attach`. Other threads may hold it: only the last of these frees
// it, when it is done and no thread of the host is inside the probe.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "probes/cuda_digest.h"
#include "probes/event.h"
#include "probes/event_ring.h"
#include "probes/facts.h"
#include "probes/guard.h"
#include "probes/losses.h"
#include "probes/settings.h"
#include "probes/stream_appender.h"

namespace forkpoint {

struct BufferRow;
struct GraphNode;  // session_launches.cpp
struct GraphRow;
struct LaunchPacket;
struct RawDigest;

struct SessionStart {
  const Settings* settings = nullptr;
  const FactList* facts = nullptr;
  LossLog* losses = nullptr;
  LimitSet* limits = nullptr;
  Notes* notes = nullptr;
  // Called on the writer thread when recording ends for whatever reason, maybe more than once; whole: the stream is, and
  // holds all that it was given.
  void (*on_end)(bool whole) = nullptr;
  int rank = 0;
  int world_size = 1;
  bool any_step = false;       // a step has begun before the first record
  bool in_step = false;        // and is still open
  int64_t step = 0;
  uint64_t step_serial = 0;
  bool step_wanted = false;
  char device[128] = "cpu";
  char driver[32] = "";        // version of the CUDA driver; empty: none
};

class Session {
 public:
  using Ring = EventRing<Event>;

  // Starts the writer thread, with all signals blocked. nullptr: no memory or no thread (said on stderr).
  static Session* start(const Token& token, const SessionStart& start);

  // A place for the next event. Waits for one at most FORKPOINT_RING_WAIT_MS, and not at all while the writer has made no
  // progress since the last wait that was in vain. false: none.
  bool claim(const Token& token, Ring::Claim* claim);
  // As claim(), without a wait: for whoever holds places that are not published yet, behind which the writer stands.
  bool try_claim(const Token&, Ring::Claim* claim) { return ring_.try_claim(claim); }
  // Waits until the writer has handled one event more, as claim() waits for a place. false: it has not.
  bool await_progress(const Token& token);
  // Has the writer made no progress since a wait for it was in vain? Then no other wait, of whatever kind, is worth its time.
  bool is_stalled() const { return stalled_at_.load(std::memory_order_relaxed) == ring_.popped(); }
  void note_stall() { stalled_at_.store(ring_.popped(), std::memory_order_relaxed); }
  void publish(const Token&, const Ring::Claim& claim) { ring_.publish(claim); }
  // Has the writer write the step at once. Its first steps are waited for a little (kYoungPatience in all):
  // a job that dies young must not have lost what ended because the writer's thread had only just begun.
  void step_has_ended();

  // Waits until what was claimed so far is written, or deadline_ns (of now_ns()). Async-signal-safe, as finish() is.
  void drain(int64_t deadline_ns);
  // As drain, and has what the open step has so far written as well.
  void save(int64_t deadline_ns);
  // Writes everything and ends the stream as whole. Returns at the latest shortly after deadline_ns.
  void finish(int64_t deadline_ns);

  // Has the writer end the stream by itself, as finish() does, and returns at once. cut: in the middle of a step (a Gap).
  void end_soon(int64_t deadline_ns, bool cut);
  // The writer has ended the stream, or could not go on: nothing more comes of it. Then copy_failure gives why, if it failed.
  bool is_done() const { return done_.load(std::memory_order_acquire) != 0; }
  void copy_failure(char* text, size_t text_bytes) const;

  int rank() const { return start_.rank; }
  int world_size() const { return start_.world_size; }
  // False in a child, also in one whose fork did not run our handler (vfork, clone).
  bool owned_by_this_process() const;
  // In the child of a fork: gives back what can be given back without touching what the parent's threads worked on.
  void abandon_in_child();

  ~Session() { ring_.destroy(); }

 private:
  explicit Session(const SessionStart& start) : start_(start) {}
  void note_failure(const char* text);
  bool start_thread();
  void run() noexcept;
  void open_stream();
  void add_to_header();
  void note_first_step(const Event& event);
  void consume();
  void handle(Event& event);
  bool await_device(Event& event);
  DevicePoll await_slot(DeviceSlot& slot, DigestResult* result);
  void handle_launch(LaunchPacket& packet);
  bool await_launch(LaunchPacket& packet, BufferRow* rows);
  void handle_graph_rows(const LaunchPacket& launched);
  void handle_graph_row(const LaunchPacket& launched, size_t part, const GraphRow& captured, Loss* lost);
  bool take_graph_digest(const GraphNode& node, BufferRow* row, Loss* lost);
  bool await_graph_digest(const GraphNode& node, RawDigest* digest, Loss* lost);
  Loss why_graph_digest_is_lost(const GraphNode& node, int64_t waited_ns, bool look);
  void wait_a_little(int64_t* pause_ns);
  void kick();  // the writer looks at once
  bool drop_unpublished();
  void maintain();
  void idle();
  void end_at_size_limit();
  void check_descriptor() const;
  bool descriptor_is_ours() const;
  void fail(const char* what, const std::string& hint) noexcept;
  bool stopping() const { return stop_.load(std::memory_order_acquire) != 0; }

  SessionStart start_;
  Ring ring_;
  int64_t owner_pid_ = 0;
  uint32_t number_ = 0;
  std::unique_ptr<HashStreamWriter> writer_;
  std::unique_ptr<StreamAppender> appender_;
  int64_t last_flush_ns_ = 0;
  int64_t idle_ns_ = 0;
  int64_t begun_ns_ = 0;
  bool full_ = false;
  std::atomic<bool> cut_{false};
  char failure_[400] = "";  // written by the writer before it is done
  std::atomic<int> descriptor_{-1};  // of the stream, and which file that is
  uint64_t stream_device_ = 0;
  uint64_t stream_inode_ = 0;
  std::string base_written_;          // of the step base and the facts
  int64_t first_begun_ = -1;          // the first step that the process began
  bool first_is_said_ = false;        // and the first that was wanted has come
  const void* facts_written_ = nullptr;
  std::atomic<bool> ended_{false};
  std::atomic<uint64_t> stalled_at_{UINT64_MAX};  // popped() when a wait was in vain
  std::atomic<int64_t> stop_deadline_ns_{0};
  std::atomic<uint32_t> stop_{0};
  std::atomic<uint32_t> wake_{0};   // futex: the writer sleeps on it
  std::atomic<uint32_t> moved_{0};  // futex: producers and drain() sleep on it
  std::atomic<uint32_t> waiters_{0};
  std::atomic<uint32_t> done_{0};   // futex
  std::atomic<uint32_t> save_asked_{0}, saved_{0};    // counts
  std::atomic<int64_t> young_patience_ns_{0};         // what is left of it
  std::atomic<uint32_t> steps_ended_{0};              // how many were, while patience was left
};

}  // namespace forkpoint
