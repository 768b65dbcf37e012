#include "lib/hash_stream_index.h"

namespace forkpoint {
namespace {

// Strictly ascending offsets as differences: no frame is named twice, so what an index makes a reader allocate is
// bounded by the file.
void encode_offsets(const std::vector<uint64_t>& offsets, ByteWriter* out) {
  out->number(offsets.size());
  uint64_t last = 0;
  for (uint64_t offset : offsets) {
    out->number(offset - last);
    last = offset;
  }
}

void decode_offsets(ByteReader* in, std::vector<uint64_t>* offsets) {
  offsets->resize(in->count());
  uint64_t last = 0;
  for (uint64_t& offset : *offsets) {
    const uint64_t difference = in->number();
    if (difference == 0 || difference > UINT64_MAX - last) return in->fail();
    offset = last += difference;
  }
}

}  // namespace

LaunchIndexPart launch_index_of(const IndexPart& part) {
  LaunchIndexPart launches;
  for (const IndexedStep& step : part.steps) {
    if (step.launch_frames.empty()) continue;
    launches.push_back({step.ordinal, step.summary.launches, step.summary.launch_sum, step.launch_frames});
  }
  return launches;
}

void encode(const IndexPart& part, ByteWriter* out) {
  encode_offsets(part.meta_frames, out);
  out->number(part.steps.size());
  for (const IndexedStep& step : part.steps) {
    out->signed_number(step.summary.step);
    out->digest(step.summary.digest);
    out->number(step.summary.records);
    out->number(step.summary.eval_records);
    out->number(step.summary.bytes_hashed);
    out->u8(step.summary.complete);
    out->number(step.ordinal);
    out->number(step.step_frame);
    encode_offsets(step.record_frames, out);
  }
}

bool decode(ByteReader in, IndexPart* out) {
  decode_offsets(&in, &out->meta_frames);
  const size_t steps = in.count();
  if (steps > kStepsPerIndex) return false;
  for (size_t i = 0; i < steps && in.ok(); ++i) {
    IndexedStep& step = out->steps.emplace_back();
    step.summary.step = in.signed_number();
    step.summary.digest = in.digest();
    step.summary.records = in.number();
    step.summary.eval_records = in.number();
    step.summary.bytes_hashed = in.number();
    step.summary.complete = in.u8() != 0;
    step.ordinal = static_cast<uint32_t>(in.number());
    step.step_frame = in.number();
    decode_offsets(&in, &step.record_frames);
  }
  return in.ok();
}

void encode(const LaunchIndexPart& part, ByteWriter* out) {
  out->number(part.size());
  for (const IndexedLaunches& step : part) {
    out->number(step.ordinal);
    out->number(step.launches);
    out->digest(step.launch_sum);
    encode_offsets(step.frames, out);
  }
}

void encode(const EndPart& part, uint64_t end_offset, ByteWriter* out) {
  out->number(part.frames);
  encode_offsets(part.index_frames, out);
  out->u64(end_offset);
  out->raw(kEndMagic, sizeof(kEndMagic));
}

bool decode(ByteReader in, LaunchIndexPart* out) {
  const size_t steps = in.count();
  if (steps > kStepsPerIndex) return false;
  for (size_t i = 0; i < steps && in.ok(); ++i) {
    IndexedLaunches& step = out->emplace_back();
    step.ordinal = static_cast<uint32_t>(in.number());
    step.launches = in.number();
    step.launch_sum = in.digest();
    decode_offsets(&in, &step.frames);
  }
  return in.ok();
}

bool decode(ByteReader in, EndPart* out) {
  out->frames = in.number();
  decode_offsets(&in, &out->index_frames);
  return in.ok() && in.left() >= kEndTrailerBytes;
}

}  // namespace forkpoint
