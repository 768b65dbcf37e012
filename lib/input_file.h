// A file that is only read, by position. Reads go through pread and not through a mapping: a file that shrinks or a disk that
// fails while we read is then an Error and not a signal that ends the program. Safe from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace forkpoint {

class ReadOnlyFile {
 public:
  // Throws Error when `path` is not a regular file that can be read.
  explicit ReadOnlyFile(const std::string& path);
  ~ReadOnlyFile();
  ReadOnlyFile(const ReadOnlyFile&) = delete;
  ReadOnlyFile& operator=(const ReadOnlyFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_bytes_; }  // when it was opened
  // Throws Error when the file holds fewer bytes than that, or cannot be read.
  void read(uint64_t offset, void* data, size_t size) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  uint64_t size_bytes_ = 0;
};

// A part of a file, addressed from 0. Cheap to copy; keeps the file open.
class FileSlice {
 public:
  explicit FileSlice(std::shared_ptr<const ReadOnlyFile> file) : file_(std::move(file)), size_bytes_(file_->size_bytes()) {}

  uint64_t size_bytes() const { return size_bytes_; }
  uint64_t file_offset() const { return offset_; }
  const std::string& path() const { return file_->path(); }
  // Throws Error when the part does not lie within this one. `what` is for the message: "the tensor `w`".
  FileSlice part(uint64_t offset, uint64_t size, const std::string& what) const;
  void read(uint64_t offset, void* data, size_t size) const;
  std::string text(uint64_t offset, uint64_t size, const std::string& what) const;

 private:
  std::shared_ptr<const ReadOnlyFile> file_;
  uint64_t offset_ = 0, size_bytes_ = 0;
};

FileSlice open_slice(const std::string& path);

}  // namespace forkpoint
