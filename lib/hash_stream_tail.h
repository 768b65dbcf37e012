// Follows a hash stream while it is being written: reads each frame once, when it is whole, and keeps the last steps in
// memory until they are given up. The memory does not grow with the stream. Not thread-safe.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "lib/hash_stream.h"

namespace forkpoint {

// As a HashStreamReader it shows what it holds: steps() are the steps kept, the open one last and not complete. Spans
// that were handed out are valid until the next advance() or give_up().
class StreamTail : public HashStreamReader {
 public:
  // nullptr: there is nothing yet that could be followed (no whole header). Throws Error when the file is no stream.
  static std::unique_ptr<StreamTail> open(const std::string& path);

  // What happened since the last call, in order. rows: new records of the step, [first_row, its size).
  struct Advance {
    enum class Kind : uint8_t { rows, step_end, stream_end } kind = Kind::rows;
    size_t step_index = 0;  // into steps(); as they are after the call
    size_t first_row = 0, end_row = 0;
  };
  // Reads what is there, at most about 64 MiB at once: more_follows() then.
  virtual std::vector<Advance> advance() = 0;
  virtual bool more_follows() const = 0;
  virtual bool ended() const = 0;  // the end frame was read: nothing comes any more
  // A frame that is wrong although others follow it, a sentence; nothing behind it is read. Empty: all is well.
  virtual const std::string& damage() const = 0;

  // Gives up the complete step at this index of steps(). Those behind it move up.
  virtual void give_up(size_t step_index) = 0;
  // As read_step, without a copy. Valid as spans are.
  virtual const StepColumns& columns(size_t step_index) const = 0;
  // How many names, layouts and communicators are known: what was derived from them is out of date when it changes.
  virtual size_t dictionary_size() const = 0;
};

}  // namespace forkpoint
