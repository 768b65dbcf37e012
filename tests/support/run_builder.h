// Writes a run in a few lines, for tests:
//   RunBuilder run(2);
//   run.rank(0).step(3).forward("blocks.0.mlp.fc1").input("input", value(1)).output("output", value(2));
//   const std::string directory = run.write(folder / "a");
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/hash_stream.h"
#include "lib/run.h"

namespace forkpoint {

// A tensor with real content, drawn from its seed, and its digest.
struct Value {
  Layout layout;
  Digest digest;
  TensorStats stats;
};
struct ValueShape {
  std::vector<int64_t> shape = {4, 8};
  DType dtype = DType::f32;
};
Value value(uint64_t seed, const ValueShape& form = {});
Value flipped(uint64_t seed, size_t word, int bit, const ValueShape& form = {});  // of a 32-bit word of value(seed)
Value permuted(uint64_t seed, const ValueShape& form = {});                       // two words of value(seed) exchanged
Value through_bf16(uint64_t seed);  // each element of value(seed) rounded to bf16 (to nearest, ties to even), as f32
Value with_nan(uint64_t seed, const ValueShape& form = {});
Value zeros(const ValueShape& form = {});
Value shard(uint64_t seed, const std::vector<int64_t>& global_shape, const std::vector<int64_t>& offset,
            const std::vector<int64_t>& shape);  // a box of value(seed, {global_shape})

class RankBuilder {
 public:
  // Where the following records belong. step() begins a step (the one before ends); prologue() is a step of its own.
  RankBuilder& step(int64_t number);
  RankBuilder& prologue();
  RankBuilder& micro(int32_t index);
  RankBuilder& at(Phase phase, const std::string& layer = "", const std::string& op = "");
  RankBuilder& forward(const std::string& layer, const std::string& op = "") { return at(Phase::forward, layer, op); }
  RankBuilder& backward(const std::string& layer, const std::string& op = "") { return at(Phase::backward, layer, op); }
  RankBuilder& collective(const std::string& op, const std::string& layer, const std::string& communicator,
                          const std::vector<int>& members);
  RankBuilder& collective(const std::string& op, const Communicator& communicator, const std::string& layer = "");
  RankBuilder& flags(uint8_t flags);  // of the records that follow

  RankBuilder& add(Role role, const std::string& tensor, const Value& value);
  RankBuilder& input(const std::string& tensor, const Value& value) { return add(Role::input, tensor, value); }
  RankBuilder& output(const std::string& tensor, const Value& value) { return add(Role::output, tensor, value); }
  RankBuilder& scalar(const std::string& name, double number, Role role = Role::scalar);
  RankBuilder& state(const std::string& name, Role role, uint64_t seed);

  RankBuilder& gap(int64_t first_step, int64_t last_step, const std::string& reason);
  RankBuilder& limit(const std::string& what);
  RankBuilder& die() { finish_ = false; return *this; }  // the stream ends without its index, in its last step

 private:
  friend class RunBuilder;
  struct Row {
    int64_t step;
    Site site;
    Layout layout;
    Record record;
    bool begins = false;  // its step: one of the same number may come before
  };
  void write(const std::string& path, const StreamHeader& header) const;

  std::vector<Row> rows_;
  std::vector<int64_t> steps_;
  std::vector<Gap> gaps_;
  std::vector<CoverageLimit> limits_;
  std::vector<Communicator> communicators_;
  Phase phase_ = Phase::forward;
  Kind kind_ = Kind::tensor;
  std::string layer_, op_, communicator_;
  int32_t micro_ = 0;
  uint8_t flags_ = 0;
  bool begins_ = false;
  bool finish_ = true;
};

class RunBuilder {
 public:
  explicit RunBuilder(int world_size = 1, Level level = Level::layer);
  RankBuilder& rank(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  Manifest& manifest() { return manifest_; }
  StreamHeader& header() { return header_; }      // of every rank
  RunBuilder& step_base(const std::string& base);
  RunBuilder& every(int64_t n);
  RunBuilder& keep_steps(const std::vector<int64_t>& steps);  // of those planted so far; the prologue stays
  RunBuilder& drop(int64_t step, const std::string& tensor);  // records planted so far
  RunBuilder& collectives_under(const std::string& layer);  // planted so far: in another layer than they are
  RunBuilder& leave_out(int rank);                // no stream of it is written
  RunBuilder& level(int rank, Level level);       // another level than the run's
  // Creates the folder and returns it.
  std::string write(const std::string& directory) const;

 private:
  Manifest manifest_;
  StreamHeader header_;
  std::vector<RankBuilder> ranks_;
  std::vector<char> left_out_;
  std::vector<Level> levels_;
};

}  // namespace forkpoint
