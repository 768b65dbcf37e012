// The stream of a session: how it is opened, and what is added to its header. On the writer's thread.
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "lib/error.h"
#include "lib/run.h"
#include "lib/stream_facts.h"
#include "probes/os.h"
#include "probes/run_folder.h"
#include "probes/session.h"
#include "probes/step_marks.h"

namespace forkpoint {

bool Session::descriptor_is_ours() const {
  struct stat status = {};
  const int descriptor = descriptor_.load();
  return descriptor >= 0 && fstat(descriptor, &status) == 0 && status.st_dev == stream_device_ && status.st_ino == stream_inode_;
}

// A host that becomes a daemon closes every descriptor, and the next file that it opens may get our number.
void Session::check_descriptor() const {
  if (descriptor_.load() < 0 || descriptor_is_ours()) return;
  throw Error(fmt::format("file descriptor {} of the stream was closed by the process.", descriptor_.load()),
              "Let the process close its descriptors before its first record.");
}

void Session::open_stream() {
  prepare_run_folder(*start_.settings, start_.world_size);
  StreamHeader header;
  header.rank = start_.rank;
  header.world_size = start_.world_size;
  header.level = start_.settings->level;
  header.step_base = step_base();
  header.every = start_.settings->every;
  header.device = start_.device;
  // Their values say whose job it is.
  if (!start_.settings->mask_names) header.facts = start_.facts->take_new(&facts_written_);
  base_written_ = header.step_base;
  header.facts.emplace_back("forkpoint", FORKPOINT_VERSION);
  if (start_.driver[0]) header.facts.emplace_back("cuda_driver", start_.driver);
  const std::string path = std::string(start_.settings->run_directory) + "/" + stream_file_name(start_.rank);
  writer_ = HashStreamWriter::create(path, header);
  struct stat status = {};
  const int descriptor = find_descriptor(path);
  if (descriptor >= 0 && fstat(descriptor, &status) == 0) {
    stream_device_ = status.st_dev;
    stream_inode_ = status.st_ino;
    descriptor_.store(descriptor);
  }
  appender_ = std::make_unique<StreamAppender>(*start_.settings, number_, *writer_, *start_.losses, *start_.limits, *start_.notes);
  if (start_.any_step) {
    first_is_said_ = true;  // it is not known, and nothing was recorded before it
    appender_->begin_step(start_.step, start_.in_step && start_.step_wanted, start_.step_serial);
    if (!start_.in_step) appender_->end_step();
  }
  last_flush_ns_ = now_ns();
}

// What is recorded before a step is from before the first one that the process began, recorded or not.
void Session::note_first_step(const Event& event) {
  if (first_is_said_) return;
  if (first_begun_ < 0) first_begun_ = event.step;
  if (!event.wanted) return;
  first_is_said_ = true;
  if (event.step == first_begun_) return;
  HeaderAddition addition;
  addition.facts.emplace_back(kFirstBegunFact, std::to_string(first_begun_));
  check_descriptor();
  writer_->add_to_header(addition);
}

// What the process has learned of itself since.
void Session::add_to_header() {
  HeaderAddition addition;
  if (base_written_ != step_base()) addition.step_base = base_written_ = step_base();
  if (!start_.settings->mask_names) addition.facts = start_.facts->take_new(&facts_written_);
  if (addition.step_base.empty() && addition.facts.empty()) return;
  check_descriptor();
  writer_->add_to_header(addition);
}

}  // namespace forkpoint
