// Layout: PKWARE's APPNOTE.TXT 6.3, sections 4.3.7 (local header), 4.3.12 (directory), 4.3.14 to 4.3.16 (end records).
#include "lib/zip_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "lib/error.h"

namespace forkpoint {
namespace {

constexpr uint32_t kLocalMark = 0x04034b50, kEntryMark = 0x02014b50, kEndMark = 0x06054b50;
constexpr uint32_t kEnd64Mark = 0x06064b50, kLocator64Mark = 0x07064b50;
constexpr uint64_t kLocalBytes = 30, kEntryBytes = 46, kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56;
constexpr uint64_t kMaxComment = 0xFFFF;
constexpr uint64_t kMaxDirectoryBytes = 1ull << 30;

template <typename T>
T number(std::string_view bytes, size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof(T));  // little-endian, as the hosts that we run on
  return value;
}

[[noreturn]] void damaged(const FileSlice& slice, const std::string& what) {
  throw Error(fmt::format("{}: not a whole zip file: {}.", slice.path(), what),
              "torch.save writes the directory last: it was cut short, or is still being written.");
}

// Sizes and places that do not fit into 32 bits stand in the entry's zip64 extra field, in this order.
void read_zip64_extra(std::string_view extra, uint64_t* unpacked_bytes, ZipFile::Entry* entry) {
  while (extra.size() >= 4) {
    const uint16_t id = number<uint16_t>(extra, 0), size = number<uint16_t>(extra, 2);
    if (size > extra.size() - 4) return;
    std::string_view field = extra.substr(4, size);
    const auto take = [&](uint64_t* value) {
      if (field.size() < 8) return;
      *value = number<uint64_t>(field, 0);
      field.remove_prefix(8);
    };
    if (id == 1) {
      if (*unpacked_bytes == UINT32_MAX) take(unpacked_bytes);
      if (entry->size_bytes == UINT32_MAX) take(&entry->size_bytes);
      if (entry->header_offset == UINT32_MAX) take(&entry->header_offset);
      return;
    }
    extra.remove_prefix(4 + size);
  }
}

}  // namespace

bool ZipFile::begins(const FileSlice& slice) {
  uint32_t mark = 0;
  if (slice.size_bytes() < sizeof(mark)) return false;
  slice.read(0, &mark, sizeof(mark));
  return mark == kLocalMark;
}

ZipFile::ZipFile(const FileSlice& slice) : slice_(slice) { read_directory(find_directory()); }

ZipFile::Directory ZipFile::find_directory() const {
  const uint64_t size = slice_.size_bytes();
  if (size < kEndBytes) damaged(slice_, fmt::format("it has {} bytes", size));
  const uint64_t tail_bytes = std::min(size, kEndBytes + kMaxComment);
  const std::string tail = slice_.text(size - tail_bytes, tail_bytes, "the end record");
  for (uint64_t at = tail_bytes - kEndBytes + 1; at-- > 0;) {
    if (number<uint32_t>(tail, at) != kEndMark) continue;
    if (at + kEndBytes + number<uint16_t>(tail, at + 20) != tail_bytes) continue;  // these bytes of data only look like it
    const uint64_t end_record = size - tail_bytes + at;
    if (end_record >= kLocatorBytes) {
      const std::string before = slice_.text(end_record - kLocatorBytes, kLocatorBytes, "the zip64 locator");
      if (number<uint32_t>(before, 0) == kLocator64Mark) return find_zip64(number<uint64_t>(before, 8));
    }
    return {number<uint32_t>(tail, at + 16), number<uint32_t>(tail, at + 12), number<uint16_t>(tail, at + 10)};
  }
  damaged(slice_, fmt::format("no end record in its last {} bytes", tail_bytes));
}

ZipFile::Directory ZipFile::find_zip64(uint64_t end_record) const {
  const std::string record = slice_.text(end_record, kEnd64Bytes, "the zip64 end record");
  if (number<uint32_t>(record, 0) != kEnd64Mark) damaged(slice_, fmt::format("no zip64 end record at byte {}", end_record));
  return {number<uint64_t>(record, 48), number<uint64_t>(record, 40), number<uint64_t>(record, 32)};
}

void ZipFile::read_directory(const Directory& directory) {
  if (directory.size_bytes > kMaxDirectoryBytes) damaged(slice_, fmt::format("a directory of {} bytes", directory.size_bytes));
  const std::string bytes = slice_.text(directory.offset, directory.size_bytes, "the zip directory");
  uint64_t at = 0;
  for (uint64_t i = 0; i < directory.count; ++i) {
    if (bytes.size() - at < kEntryBytes || number<uint32_t>(bytes, at) != kEntryMark) {
      damaged(slice_, fmt::format("entry {} of {} of its directory is damaged", i, directory.count));
    }
    Entry entry;
    entry.stored = number<uint16_t>(bytes, at + 10) == 0;
    entry.crc32 = number<uint32_t>(bytes, at + 16);
    entry.size_bytes = number<uint32_t>(bytes, at + 20);
    entry.header_offset = number<uint32_t>(bytes, at + 42);
    const uint64_t name_bytes = number<uint16_t>(bytes, at + 28), extra_bytes = number<uint16_t>(bytes, at + 30);
    const uint64_t comment_bytes = number<uint16_t>(bytes, at + 32);
    if (bytes.size() - at - kEntryBytes < name_bytes + extra_bytes + comment_bytes) damaged(slice_, "its directory is cut");
    const std::string name = bytes.substr(at + kEntryBytes, name_bytes);
    uint64_t unpacked_bytes = number<uint32_t>(bytes, at + 24);
    read_zip64_extra(std::string_view(bytes).substr(at + kEntryBytes + name_bytes, extra_bytes), &unpacked_bytes,
                     &entry);
    if (entry.stored && unpacked_bytes != entry.size_bytes) {  // who reads it by the other one gets other bytes
      damaged(slice_,
              fmt::format("`{}` has {} bytes, unpacked {}, and is not packed", name, entry.size_bytes, unpacked_bytes));
    }
    slice_.part(entry.header_offset, entry.size_bytes, fmt::format("the entry `{}`", name));
    if (!entries_.emplace(name, entry).second) damaged(slice_, fmt::format("two entries are called `{}`", name));
    at += kEntryBytes + name_bytes + extra_bytes + comment_bytes;
  }
}

FileSlice ZipFile::open(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw Error(fmt::format("{}: there is no entry `{}` in this zip file.", slice_.path(), name));
  const Entry& entry = found->second;
  if (!entry.stored) throw Error(fmt::format("{}: the entry `{}` is compressed; torch.save stores.", slice_.path(), name));
  const std::string header = slice_.text(entry.header_offset, kLocalBytes, fmt::format("the header of `{}`", name));
  if (number<uint32_t>(header, 0) != kLocalMark) damaged(slice_, fmt::format("no header of `{}`", name));
  const uint64_t skipped = kLocalBytes + number<uint16_t>(header, 26) + number<uint16_t>(header, 28);
  return slice_.part(entry.header_offset + skipped, entry.size_bytes, fmt::format("the entry `{}`", name));
}

}  // namespace forkpoint
