#include "lib/hash_stream_format.h"

#include <algorithm>
#include <array>
#include <bit>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

static_assert(std::endian::native == std::endian::little);

template <typename Number>
void put(uint8_t* bytes, Number value) {
  std::memcpy(bytes, &value, sizeof(value));
}

template <typename Number>
Number get(const uint8_t* bytes) {
  Number value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

// Both lanes: one of 64 bits alone would let a change of two words through more easily than need be.
uint64_t header_checksum(const uint8_t* bytes) {
  const Digest plain = digest_only(bytes, kFrameHeaderBytes - 8);
  return mix64(plain.a) ^ plain.b;
}

template <typename Enum>
Enum checked_enum(ByteReader* in, int count) {
  const uint8_t number = in->u8();
  if (number >= count) in->fail();
  return static_cast<Enum>(number);
}

void encode_numbers(const std::vector<int64_t>& numbers, ByteWriter* out) {
  for (int64_t number : numbers) out->signed_number(number);
}

void decode_numbers(size_t count, ByteReader* in, std::vector<int64_t>* numbers) {
  if (!in->ok()) return;
  numbers->resize(count);
  for (int64_t& number : *numbers) number = in->signed_number();
}

void encode(const Site& site, ByteWriter* out) {
  out->u8(static_cast<uint8_t>(site.phase));
  out->u8(static_cast<uint8_t>(site.kind));
  out->u8(static_cast<uint8_t>(site.role));
  for (const auto* text : {&site.layer, &site.op, &site.tensor, &site.communicator}) out->text(*text);
}

void decode_one(ByteReader* in, Site* site) {
  site->phase = checked_enum<Phase>(in, kPhaseCount);
  site->kind = checked_enum<Kind>(in, kKindCount);
  site->role = checked_enum<Role>(in, kRoleCount);
  for (auto* text : {&site->layer, &site->op, &site->tensor, &site->communicator}) *text = in->text();
}

enum LayoutFlags : uint8_t { kHasStrides = 1, kIsShard = 2 };

void encode(const Layout& layout, ByteWriter* out) {
  out->u8(static_cast<uint8_t>(layout.dtype));
  out->u8(static_cast<uint8_t>((layout.strides.empty() ? 0 : kHasStrides) | (layout.is_shard() ? kIsShard : 0)));
  out->number(layout.shape.size());
  for (const auto* numbers : {&layout.shape, &layout.strides, &layout.global_shape, &layout.global_offset}) {
    encode_numbers(*numbers, out);
  }
}

void decode_one(ByteReader* in, Layout* layout) {
  layout->dtype = checked_enum<DType>(in, kDTypeCount);
  const uint8_t flags = in->u8();
  const size_t dims = in->count();
  if (dims > kMaxDims) return in->fail();
  decode_numbers(dims, in, &layout->shape);
  decode_numbers((flags & kHasStrides) ? dims : 0, in, &layout->strides);
  decode_numbers((flags & kIsShard) ? dims : 0, in, &layout->global_shape);
  decode_numbers((flags & kIsShard) ? dims : 0, in, &layout->global_offset);
}

void encode(const Communicator& communicator, ByteWriter* out) {
  out->text(communicator.name);
  out->number(communicator.members.size());
  for (int member : communicator.members) out->signed_number(member);
}

void decode_one(ByteReader* in, Communicator* communicator) {
  communicator->name = in->text();
  communicator->members.resize(in->count());
  for (int& member : communicator->members) member = static_cast<int>(in->signed_number());
}

// Behind the lists, where a communicator has an identity: one for each of them.
void encode_identities(const std::vector<Communicator>& communicators, ByteWriter* out) {
  const auto has_identity = [](const Communicator& one) { return one.size != 0 || !(one.id == Digest{}); };
  if (std::none_of(communicators.begin(), communicators.end(), has_identity)) return;
  out->number(communicators.size());
  for (const Communicator& communicator : communicators) {
    out->digest(communicator.id);
    out->signed_number(communicator.own_rank);
    out->signed_number(communicator.size);
  }
}

bool decode_identities(ByteReader* in, std::vector<Communicator>* communicators) {
  if (!in->ok() || in->left() == 0) return in->ok();  // a stream without them
  if (in->count() != communicators->size()) return false;
  for (Communicator& communicator : *communicators) {
    communicator.id = in->digest();
    communicator.own_rank = static_cast<int>(in->signed_number());
    communicator.size = static_cast<int>(in->signed_number());
  }
  return in->ok();
}

template <typename Item>
void encode_list(uint32_t first, const std::vector<Item>& items, ByteWriter* out) {
  out->number(first);
  out->number(items.size());
  for (const Item& item : items) encode(item, out);
}

template <typename Item>
void decode_list(ByteReader* in, uint32_t* first, std::vector<Item>* items) {
  const uint64_t number = in->number();
  if (number > UINT32_MAX) in->fail();
  *first = static_cast<uint32_t>(number);
  const size_t count = in->count();
  for (size_t i = 0; i < count && in->ok(); ++i) decode_one(in, &items->emplace_back());
}

}  // namespace

std::string_view name(FrameType type) {
  constexpr std::array<std::string_view, 12> kNames = {"unknown", "header",   "dictionary",     "records",
                                                       "step",    "gap",      "coverage limit", "index",
                                                       "end",     "launches", "launch index",   "header addition"};
  const auto number = static_cast<size_t>(type);
  return number < kNames.size() ? kNames[number] : kNames[0];
}

void encode(const FrameHeader& header, uint8_t bytes[kFrameHeaderBytes]) {
  std::memset(bytes, 0, kFrameHeaderBytes);
  std::memcpy(bytes, kFrameMark, sizeof(kFrameMark));
  bytes[4] = static_cast<uint8_t>(header.type);
  bytes[5] = header.flags;
  put(bytes + 8, header.stored_bytes);
  put(bytes + 12, header.raw_bytes);
  put(bytes + 16, header.step);
  put(bytes + 24, header.step_ordinal);
  put(bytes + 28, header.records);
  put(bytes + 32, header.sequence);
  put(bytes + 40, header.checksum.a);
  put(bytes + 48, header.checksum.b);
  put(bytes + 56, header_checksum(bytes));
}

std::optional<FrameHeader> decode_frame_header(const uint8_t bytes[kFrameHeaderBytes]) {
  if (std::memcmp(bytes, kFrameMark, sizeof(kFrameMark)) != 0) return std::nullopt;
  if (get<uint64_t>(bytes + 56) != header_checksum(bytes)) return std::nullopt;
  FrameHeader header;
  header.type = static_cast<FrameType>(bytes[4]);
  header.flags = bytes[5];
  header.stored_bytes = get<uint32_t>(bytes + 8);
  header.raw_bytes = get<uint32_t>(bytes + 12);
  header.step = get<int64_t>(bytes + 16);
  header.step_ordinal = get<uint32_t>(bytes + 24);
  header.records = get<uint32_t>(bytes + 28);
  header.sequence = get<uint64_t>(bytes + 32);
  header.checksum = {get<uint64_t>(bytes + 40), get<uint64_t>(bytes + 48)};
  return header;
}

void ByteWriter::number(uint64_t value) {
  for (; value >= 0x80; value >>= 7) u8(static_cast<uint8_t>(value | 0x80));
  u8(static_cast<uint8_t>(value));
}

uint64_t ByteReader::number() {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const uint8_t byte = u8();
    if (shift == 63 && byte > 1) break;
    value |= static_cast<uint64_t>(byte & 0x7F) << shift;
    if (byte < 0x80) return ok_ ? value : 0;
  }
  fail();
  return 0;
}

std::string_view ByteReader::text() {
  const size_t size = count();
  const std::string_view text(reinterpret_cast<const char*>(bytes_.data()) + at_, size);
  at_ += size;
  return text;
}

size_t ByteReader::count() {
  const uint64_t value = number();
  if (value > left()) {
    fail();
    return 0;
  }
  return value;
}

void ByteReader::raw(void* data, size_t size_bytes) {
  if (size_bytes > left()) return fail();
  std::memcpy(data, bytes_.data() + at_, size_bytes);
  at_ += size_bytes;
}

Digest StepSums::root() const {
  Digest sum;
  for (const Digest& part : phase) sum += part;
  return sum;
}

uint64_t StepSums::total_records() const {
  uint64_t sum = 0;
  for (uint64_t count : records) sum += count;
  return sum;
}

StepSummary summarize(int64_t step, const StepSums& sums, bool complete) {
  StepSummary summary;
  summary.step = step;
  summary.digest = sums.root();
  summary.records = sums.total_records();
  summary.eval_records = sums.eval_records;
  summary.bytes_hashed = sums.bytes_hashed;
  summary.complete = complete;
  summary.launches = sums.launches;
  summary.launch_sum = sums.launch_sum;
  return summary;
}

static void encode_facts(const HeaderFacts& facts, ByteWriter* out) {
  out->number(facts.size());
  for (const auto& [key, value] : facts) {
    out->text(key);
    out->text(value);
  }
}

static void decode_facts(ByteReader* in, HeaderFacts* out) {
  const size_t facts = in->count();
  for (size_t i = 0; i < facts && in->ok(); ++i) {
    const std::string_view key = in->text();
    out->emplace_back(key, in->text());
  }
}

void encode(const StreamHeader& header, ByteWriter* out) {
  out->signed_number(header.rank);
  out->signed_number(header.world_size);
  out->text(header.host);
  out->signed_number(header.pid);
  out->text(header.boot_id);
  out->number(header.pid_start_ticks);
  out->number(header.pid_namespace);
  out->u8(static_cast<uint8_t>(header.level));
  out->text(header.step_base);
  out->signed_number(header.every);
  out->text(header.device);
  encode_facts(header.facts, out);
}

bool decode(ByteReader in, StreamHeader* out) {
  out->rank = static_cast<int>(in.signed_number());
  out->world_size = static_cast<int>(in.signed_number());
  out->host = in.text();
  out->pid = in.signed_number();
  out->boot_id = in.text();
  out->pid_start_ticks = in.number();
  out->pid_namespace = in.number();
  out->level = checked_enum<Level>(&in, 3);
  out->step_base = in.text();
  out->every = in.signed_number();
  out->device = in.text();
  decode_facts(&in, &out->facts);
  return in.ok() && out->rank >= 0 && out->world_size >= 0;
}

void encode(const DictionaryPart& part, ByteWriter* out) {
  encode_list(part.first_site, part.sites, out);
  encode_list(part.first_layout, part.layouts, out);
  encode_list(part.first_communicator, part.communicators, out);
  encode_identities(part.communicators, out);
}

bool decode(ByteReader in, DictionaryPart* out) {
  decode_list(&in, &out->first_site, &out->sites);
  decode_list(&in, &out->first_layout, &out->layouts);
  decode_list(&in, &out->first_communicator, &out->communicators);
  return decode_identities(&in, &out->communicators);
}

void encode(const StepSums& sums, ByteWriter* out) {
  out->number(sums.eval_records);
  out->number(sums.bytes_hashed);
  out->number(sums.frames);
  size_t phases = 0;
  for (uint64_t count : sums.records) phases += count != 0;
  out->number(phases);
  for (int phase = 0; phase < kPhaseCount; ++phase) {
    if (sums.records[phase] == 0) continue;
    out->u8(static_cast<uint8_t>(phase));
    out->digest(sums.phase[phase]);
    out->number(sums.records[phase]);
  }
  if (sums.launches == 0) return;  // as before there were launches
  out->number(sums.launches);
  out->number(sums.launch_frames);
  out->digest(sums.launch_sum);
}

bool decode(ByteReader in, StepSums* out) {
  out->eval_records = in.number();
  out->bytes_hashed = in.number();
  out->frames = in.number();
  const size_t phases = in.count();
  for (size_t i = 0; i < phases && in.ok(); ++i) {
    const auto phase = static_cast<size_t>(checked_enum<Phase>(&in, kPhaseCount));
    if (!in.ok()) return false;
    out->phase[phase] = in.digest();
    out->records[phase] = in.number();
  }
  if (in.left() == 0) return in.ok();
  out->launches = in.number();
  out->launch_frames = in.number();
  out->launch_sum = in.digest();
  return in.ok();
}

void encode(const Gap& gap, ByteWriter* out) {
  out->signed_number(gap.first_step);
  out->signed_number(gap.last_step);
  out->number(gap.records_lost);
  out->text(gap.reason);
}

bool decode(ByteReader in, Gap* out) {
  out->first_step = in.signed_number();
  out->last_step = in.signed_number();
  out->records_lost = in.number();
  out->reason = in.text();
  return in.ok();
}

void encode(const CoverageLimit& limit, ByteWriter* out) {
  out->text(limit.what);
  out->text(limit.detail);
}

bool decode(ByteReader in, CoverageLimit* out) {
  out->what = in.text();
  out->detail = in.text();
  return in.ok();
}

void encode(const HeaderAddition& addition, ByteWriter* out) {
  out->text(addition.step_base);
  encode_facts(addition.facts, out);
}

bool decode(ByteReader in, HeaderAddition* out) {
  out->step_base = in.text();
  decode_facts(&in, &out->facts);
  return in.ok();
}

}  // namespace forkpoint
