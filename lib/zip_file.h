// The directory of a zip file whose entries are stored, as torch.save writes it (zip64 included). Entries are found, not
// unpacked: a compressed one is listed and cannot be opened. A value, safe from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "lib/input_file.h"

namespace forkpoint {

class ZipFile {
 public:
  // Throws Error when the slice is no whole zip file: no end record, or a directory that is damaged.
  explicit ZipFile(const FileSlice& slice);

  // First bytes of a zip file with at least one entry.
  static bool begins(const FileSlice& slice);

  struct Entry {
    uint64_t header_offset = 0, size_bytes = 0;  // size as stored
    uint32_t crc32 = 0;
    bool stored = true;
  };
  const std::map<std::string, Entry, std::less<>>& entries() const { return entries_; }
  // The bytes of an entry. Throws Error when there is none of that name, or it is compressed.
  FileSlice open(const std::string& name) const;

 private:
  struct Directory {
    uint64_t offset = 0, size_bytes = 0, count = 0;
  };
  Directory find_directory() const;
  Directory find_zip64(uint64_t end_record) const;
  void read_directory(const Directory& directory);

  FileSlice slice_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace forkpoint
