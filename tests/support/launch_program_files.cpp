// The records, the collectives and the files of the small GPU.
#include <map>

#include "lib/error.h"
#include "tests/support/launch_program.h"

namespace forkpoint {

size_t LaunchProgram::add_record(Kind kind, Role role, const std::string& tensor, const Layout& layout,
                                 const std::string& communicator) {
  if (steps_.empty()) steps_.push_back(step_);
  Entry entry;
  entry.step = step_, entry.is_record = true;
  entry.site = {kind == Kind::collective ? Phase::collective : phase_, kind, role, layer_, op_, tensor, communicator};
  entry.layout = layout;
  ++records_in_step_;
  entries_.push_back(std::move(entry));
  return entries_.size() - 1;
}

void LaunchProgram::record_memory(Kind kind, Role role, const std::string& tensor, const DeviceBuffer& buffer,
                                  uint8_t flags, const std::string& communicator) {
  const uint32_t index = records_in_step_;
  const size_t r =
      add_record(kind, role, tensor, {DType::f32, {static_cast<int64_t>(buffer.words)}, {}, {}, {}}, communicator);
  entries_[r].record.flags = flags;
  const size_t e = add_row(LaunchKind::record, "", index);
  entries_[e].buffers = {row_of(buffer, kPlaceSource, 0)};
  queue([this, r, e, buffer] {
    const Words& words = memory_.at(buffer.allocation).words;
    const DigestResult result = digest_bytes(words.data(), words.size() * 4, DType::f32);
    entries_[r].record.digest = result.digest, entries_[r].record.stats = result.stats;
    entries_[e].buffers[0].digest = result.digest;
  });
}

void LaunchProgram::record(Role role, const std::string& tensor, const DeviceBuffer& buffer, uint8_t flags) {
  record_memory(Kind::tensor, role, tensor, buffer, flags);
}

void LaunchProgram::record_scalar(const std::string& name, double value, Role role) {
  entries_[add_record(Kind::scalar, role, name, {DType::f64, {}, {}, {}, {}}, "")].record.digest = scalar_digest(value);
}

void all_reduce(const std::vector<LaunchProgram*>& ranks, const std::vector<DeviceBuffer>& buffers,
                const std::string& kernel, const std::function<void(int rank, Words*)>& alter) {
  std::vector<std::pair<std::string, std::string>> scopes;
  for (size_t k = 0; k < ranks.size(); ++k) {
    ranks[k]->op_.swap(scopes.emplace_back(ranks[k]->op_, "all_reduce").second);
    ranks[k]->record_memory(Kind::collective, Role::input, "grad", buffers[k], 0, "world");
    ranks[k]->kernel(kernel, {word(7)}, [](KernelCall&) {});
    ranks[k]->run_all();
  }
  Words sum(buffers[0].words, 0);
  for (size_t k = 0; k < ranks.size(); ++k) {
    const Words own = ranks[k]->read(buffers[k]);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += own[i];
  }
  for (size_t k = 0; k < ranks.size(); ++k) {
    Words left = sum;
    if (alter) alter(static_cast<int>(k), &left);
    ranks[k]->memory_.at(buffers[k].allocation).words = left;
    ranks[k]->record_memory(Kind::collective, Role::output, "grad", buffers[k], 0, "world");
    ranks[k]->run_all();
    ranks[k]->op_ = scopes[k].first;
  }
}

void LaunchProgram::write(const std::string& path, const StreamHeader& header) const {
  const auto writer = HashStreamWriter::create(path, header);
  std::vector<int> members;
  for (int rank = 0; rank < header.world_size; ++rank) members.push_back(rank);
  Communicator world;
  world.name = "world", world.members = members;
  writer->add_communicator(world);
  for (const CoverageLimit& limit : limits_) writer->add_coverage_limit(limit);
  size_t at = 0;
  for (size_t s = 0; s < steps_.size(); ++s) {
    writer->begin_step(steps_[s]);
    size_t end = at;
    while (end < entries_.size() && entries_[end].step == steps_[s]) ++end;
    std::map<uint32_t, uint32_t> calls;
    for (size_t i = at; i < end; ++i) {
      if (!entries_[i].is_record) continue;
      Record record = entries_[i].record;
      record.site = writer->site_id(entries_[i].site);
      record.layout = writer->layout_id(entries_[i].layout);
      record.call = calls[record.site]++;
      writer->append(record, 0);
    }
    for (size_t i = at; i < end; ++i) {
      if (entries_[i].is_record) continue;
      LaunchRow row = entries_[i].row;
      row.site = writer->site_id(entries_[i].site);
      row.buffers = static_cast<uint32_t>(entries_[i].buffers.size());
      writer->append_launch(row, entries_[i].buffers.data());
    }
    at = end;
    if (s + 1 < steps_.size() || finish_)
      writer->end_step();
    else
      writer->flush();
  }
  if (finish_) writer->finish();
}

std::string LaunchRun::write(const std::string& directory) {
  manifest_.state = RunState::whole;
  manifest_.world_size = static_cast<int>(ranks_.size());
  manifest_.level = level_;
  if (manifest_.command.empty()) manifest_.command = {"train"};
  manifest_.exit_status = 0;
  manifest_.end_reason = "exited with status 0";
  manifest_.step_base = "step(n)";
  create_run(directory, manifest_);
  for (size_t k = 0; k < ranks_.size(); ++k) {
    ranks_[k]->run_all();
    StreamHeader header;
    header.rank = static_cast<int>(k), header.world_size = manifest_.world_size;
    header.level = level_, header.step_base = "step(n)", header.device = "simulated";
    ranks_[k]->write(directory + "/" + stream_file_name(header.rank), header);
  }
  write_manifest(directory, manifest_);
  return directory;
}

}  // namespace forkpoint
