// Turns events, in the order of the ring, into the calls of a HashStreamWriter: steps, ids, call numbers, gaps. Writer
// thread only. Throws what the writer throws.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "lib/hash_stream.h"
#include "probes/event.h"
#include "probes/losses.h"
#include "probes/notes.h"
#include "probes/settings.h"

namespace forkpoint {

class StreamAppender {
 public:
  // session: a number that no other appender of this process has. All references must outlive the appender.
  StreamAppender(const Settings& settings, uint32_t session, HashStreamWriter& writer, LossLog& losses, LimitSet& limits,
                 Notes& notes);

  // A step that is not wanted ends the one before all the same. serial: the n-th step that the process began, from 1; one
  // that was told before is passed over.
  // flags: kStepComputed, kStepFinal.
  void begin_step(int64_t step, bool wanted, uint64_t serial, uint8_t flags = 0);
  void end_step();
  // Before the first step: the prologue. Between two steps: kept until the next one begins, to which it then belongs.
  void add(const Event& event);
  // A row of the launch level whose digests are there. Between two steps: kept, as records are.
  void add_launch(const LaunchRow& row, const SiteEntry& site, const BufferRow* buffers);

  void flush();   // gaps, coverage limits and records so far, on disk
  // The stream is whole afterwards. cut_short: recording ends before the job does.
  void finish(bool cut_short);
  // The stream is as large as FORKPOINT_MAX_SIZE_BYTES allows.
  bool is_full() const;
  int64_t step() const { return open_ ? step_ : kPrologueStep; }  // kPrologueStep before the first

 private:
  // A record, a row of the launch level, or both: a record of device memory and the row that says where it lies.
  struct Pending {
    bool has_record = false;
    Event event;
    const SiteEntry* launch_site = nullptr;  // nullptr: no row
    LaunchRow row;
    std::vector<BufferRow> buffers;
  };
  struct Calls {  // of one site in the current step; what an evaluation records counts by itself
    uint64_t step_serial = 0;
    int32_t micro_step = 0;  // the first one in which the site was seen
    uint32_t count = 0;
  };

  void open_step(int64_t step);
  void close_step();
  bool waits_for_step(const Pending& pending) const;
  void append_without_step();
  void settle_candidates(bool training);
  void mark_ahead();
  void keep_evaluation();
  void forget_pending();
  void keep_or_append(Pending&& pending);
  void append_pending();
  void append(const Pending& pending);
  void append_record(const Event& event);
  void append_launch(const Pending& pending, uint64_t object);
  uint32_t site_id(const SiteEntry& entry);
  uint32_t layout_id(const LayoutEntry& entry);
  uint32_t next_call(uint32_t site, int32_t micro_step, bool eval);
  std::string written(const Name* name) const;
  std::string written(const CommunicatorEntry* communicator);
  void add_losses();
  void add_limits();
  void add_notes();

  const Settings& settings_;
  const uint32_t session_;
  HashStreamWriter& writer_;
  LossLog& losses_;
  LimitSet& limits_;
  Notes& notes_;
  uint32_t limits_written_ = 0;
  uint32_t noted_limits_written_ = 0;

  bool open_ = false;            // a step of the writer is open
  bool stepless_ = false;  // more came than waits for a first step
  bool any_step_ = false;        // a step has begun: the prologue is over
  bool any_explicit_end_ = false;
  int64_t step_ = kPrologueStep;
  uint64_t serial_ = 0;
  uint64_t unflushed_ = 0;
  std::vector<Pending> pending_;
  size_t pending_eval_ = 0;  // of them, records of an evaluation
  bool final_ = false;       // the step that is open is the final part of one
  uint64_t records_in_step_ = 0;

  uint64_t step_serial_ = 0;
  std::vector<Calls> calls_;                               // by twice the site id, plus one in an evaluation
  std::unordered_map<uint64_t, uint32_t> further_calls_;   // by place in calls_ and micro-step, where calls_ has another micro-step
  std::unordered_map<const CommunicatorEntry*, std::string> communicator_names_;
  std::map<std::string, const CommunicatorEntry*> communicators_by_name_;
};

}  // namespace forkpoint
