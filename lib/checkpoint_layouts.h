// How checkpoints are called and what shows that one is whole, layout by layout. Used by lib/checkpoints.cpp.
// Pure functions of the file system, read only.
#pragma once

#include <cstdint>
#include <ctime>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/checkpoints.h"
#include "lib/digest.h"

namespace forkpoint {

struct NamedStep {
  std::string kind;
  int64_t step = 0;
  bool partial = false;  // a name that the framework gives to what it has not finished
};

// "step-100" of "step-100.tmp": the name without what says that it is not finished. Empty: nothing says so.
std::string_view without_partial_ending(std::string_view name);
// What a file or folder of that name is among the known layouts. "dcp" may still turn out to be minigpt (see layout_of).
std::optional<NamedStep> known_name(std::string_view name);
struct NumberedFile {
  std::string stem;
  int64_t number = 0, count = 0;
};
// "model-00001-of-00005", as Hugging Face calls the parts of a model.
std::optional<NumberedFile> numbered_file(std::string_view stem);
// Of a user's pattern. REQUIRES: check_pattern.
std::optional<int64_t> step_by_pattern(std::string_view name, std::string_view pattern);
void check_pattern(std::string_view pattern);  // throws Error

struct ListedFile {
  std::string name;  // relative to the checkpoint
  uint64_t size_bytes = 0;
  timespec changed{};
};

// All files of a checkpoint, sorted; a checkpoint that is one file has one, with an empty name.
// Throws Error when something in it cannot be read or it is absurdly large.
std::vector<ListedFile> list_files(const std::string& path);

// Changes with every change of a file.
Digest fingerprint(const std::vector<ListedFile>& files);

// In one sentence why it is not whole; empty: it is. Files are opened, not read through. Throws Error: cannot be read.
std::string why_not_whole(const Checkpoint& checkpoint, const std::vector<ListedFile>& files);
// As why_not_whole, but only of what is in the checkpoint, not of what the framework writes beside or after it: each file by
// itself, files that an index names, shards that others imply.
std::string why_content_not_whole(const std::string& path, const std::vector<ListedFile>& files);
// Of one file, by its name and its content: a zip file has its end record, a safetensors file its length, and so on.
std::string why_file_not_whole(const std::string& folder, const ListedFile& file);

}  // namespace forkpoint
