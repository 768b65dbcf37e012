#include "tests/cli/made_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

// Writes one rank's stream. tainted_: something it has read differs from the run without the fault.
class RankWriter {
 public:
  RankWriter(HashStreamWriter* writer, const MadeRun& plan, int rank) : writer_(*writer), plan_(plan), rank_(rank) {}

  void write() {
    Communicator world{"world", {}};
    for (int rank = 0; rank < plan_.ranks; ++rank) world.members.push_back(rank);
    writer_.add_communicator(world);
    writer_.begin_step(kPrologueStep);
    for (int layer = 0; layer < plan_.layers; ++layer)
      tensor(Phase::load, Role::parameter, path(layer), "weight", false);
    writer_.end_step();
    for (step_ = plan_.first_step; step_ < plan_.first_step + plan_.steps; ++step_) write_step();
    if (!plan_.finish)
      writer_.begin_step(step_), tensor(Phase::data, Role::batch, "", "tokens", tainted_), writer_.flush();
  }

 private:
  std::string path(int layer) const { return fmt::format("{}{}.mlp.fc1", plan_.layer_prefix, layer); }
  bool faulty(const char* where, int layer = 0) const {
    const MadeFault& fault = plan_.fault;
    return fault.step == step_ && fault.where == where && fault.layer == layer &&
           (fault.rank == rank_ || fault.rank < 0);
  }

  void write_step() {
    writer_.begin_step(step_);
    tainted_ |= faulty("batch");
    tensor(Phase::data, Role::batch, "", "tokens", faulty("batch"), DType::i64);
    for (int layer = 0; layer < plan_.layers; ++layer) {
      tensor(Phase::forward, Role::input, path(layer), "input", tainted_);
      tainted_ |= faulty("activation", layer);
      for (int i = 0; i < plan_.records_a_layer; ++i) {
        tensor(Phase::forward, Role::output, path(layer), i ? fmt::format("output.{}", i) : "output", tainted_);
      }
    }
    scalar(Phase::forward, Role::loss, "loss",
           4.0 / std::sqrt(1.0 + static_cast<double>(step_)) + (tainted_ ? 1e-3 * rank_ + 2e-3 : 0));
    for (int layer = plan_.layers; layer-- > 0;) {
      tensor(Phase::backward, Role::input, path(layer), "grad_output", tainted_);
      tainted_ |= faulty("grad", layer);
      tensor(Phase::backward, Role::gradient, path(layer), "weight.grad", tainted_);
    }
    collectives();
    scalar(Phase::optimizer, Role::scalar, "lr", faulty("lr") ? 2e-3 : 1e-3);
    tainted_ |= faulty("lr");
    for (int layer = 0; layer < plan_.layers; ++layer)
      tensor(Phase::optimizer, Role::parameter, path(layer), "weight", tainted_);
    writer_.end_step();
  }

  // What one rank brings in reaches all of them.
  void collectives() {
    const MadeFault& fault = plan_.fault;
    const bool reached = fault.step >= 0 && step_ >= fault.step && fault.where != "lr";
    for (int layer = plan_.layers; layer-- > 0;) {
      // The gradients of later layers were reduced before the fault of this step.
      const bool after = reached && (step_ > fault.step || fault.where != "grad" || layer <= fault.layer);
      Site site{Phase::collective, Kind::collective, Role::input, path(layer), "all_reduce", "weight.grad", "world"};
      const bool own = tainted_ && (step_ > fault.step || fault.where != "grad" || layer <= fault.layer);
      append(site, own, DType::f32);
      site.role = Role::output;
      append(site, after, DType::f32, true);
    }
    tainted_ |= reached;
  }

  void tensor(Phase phase, Role role, const std::string& layer, const std::string& name, bool differs,
              DType dtype = DType::f32) {
    append({phase, Kind::tensor, role, layer, "", name, ""}, differs, dtype,
           phase == Phase::load || phase == Phase::optimizer);
  }

  void append(const Site& site, bool differs, DType dtype, bool same_on_all_ranks = false) {
    Record record;
    record.site = writer_.site_id(site);
    record.layout = writer_.layout_id({dtype, {64, 32}, {}, {}, {}});
    const Digest key = site_key(site);
    const uint64_t where =
        key.a ^ mix64(static_cast<uint64_t>(step_ + 2)) ^ (same_on_all_ranks ? 0 : mix64(7919u + rank_));
    record.digest = {mix64(where), mix64(where + 1)};
    // One bit of word 77: what a single changed word looks like.
    if (differs) record.digest += Digest{key_of<1>() << 20, key_of<2>() << 20};
    record.stats = {0.5f + static_cast<float>(where % 1000) / 1000, 0, static_cast<uint32_t>(where % 100000)};
    writer_.append(record, 64 * 32 * static_cast<uint64_t>(size_bytes(dtype)));
  }

  template <int kLane>
  static uint64_t key_of() {
    return key<kLane>(77);
  }

  void scalar(Phase phase, Role role, const std::string& name, double value) {
    Record record;
    record.site = writer_.site_id({phase, Kind::scalar, role, "", "", name, ""});
    record.layout = writer_.layout_id({DType::f64, {}, {}, {}, {}});
    record.digest = scalar_digest(value);
    writer_.append(record, 8);
  }

  HashStreamWriter& writer_;
  const MadeRun& plan_;
  int rank_;
  int64_t step_ = kPrologueStep;
  bool tainted_ = false;
};

}  // namespace

void make_run(const std::string& directory, const MadeRun& plan) {
  Manifest manifest;
  manifest.forkpoint_version = "0.1.0";
  manifest.command = {"./train", "--steps", std::to_string(plan.steps)};
  manifest.world_size = plan.ranks;
  manifest.level = Level::layer;
  manifest.step_base = "step(n)";
  manifest.started_at = "2025-01-31T12:00:00Z";
  manifest.hosts = {"node0"};
  create_run(directory, manifest);
  for (int rank = 0; rank < plan.ranks; ++rank) {
    if (std::find(plan.leave_out.begin(), plan.leave_out.end(), rank) != plan.leave_out.end()) continue;
    StreamHeader header;
    header.rank = rank;
    header.world_size = plan.ranks;
    header.level = Level::layer;
    header.step_base = "step(n)";
    header.device = "cpu";
    auto writer = HashStreamWriter::create(directory + "/" + stream_file_name(rank), header);
    RankWriter(writer.get(), plan, rank).write();
    if (plan.finish) writer->finish();
  }
  manifest.ended_at = "2025-01-31T12:01:00Z";
  manifest.state = plan.finish ? RunState::whole : RunState::died;
  manifest.end_reason = plan.end_reason;
  manifest.exit_status = 0;
  write_manifest(directory, manifest);
}

}  // namespace forkpoint
