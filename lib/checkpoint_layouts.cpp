#include "lib/checkpoint_layouts.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>

#include "lib/error.h"

namespace forkpoint {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxFiles = 1'000'000;
constexpr int kMaxDepth = 8;

// A whole string of digits, zeros in front or not.
std::optional<int64_t> number_of(std::string_view digits) {
  int64_t number = 0;
  if (digits.empty() || !std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; })) return {};
  const auto [end, wrong] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (wrong != std::errc() || end != digits.data() + digits.size()) return {};
  return number;
}

std::optional<int64_t> number_after(std::string_view name, std::string_view prefix) {
  return name.starts_with(prefix) ? number_of(name.substr(prefix.size())) : std::nullopt;
}

// "epoch=1-step=100.ckpt", "step=100.ckpt", "mine-step=100-v1.ckpt" (a second one of that name), "x-step=100-loss=0.5.ckpt":
// ModelCheckpoint writes NAME=VALUE joined by '-'.
std::optional<int64_t> lightning_step(std::string_view name) {
  constexpr std::string_view kMark = "step=", kEnd = ".ckpt";
  if (!name.ends_with(kEnd)) return {};
  name.remove_suffix(kEnd.size());
  for (size_t at = name.rfind(kMark); at != name.npos; at = at == 0 ? name.npos : name.rfind(kMark, at - 1)) {
    if (at > 0 && name[at - 1] != '-' && name[at - 1] != '_') continue;  // "global_step=" is a name that users give
    std::string_view rest = name.substr(at + kMark.size());
    const size_t end = std::min(rest.find_first_not_of("0123456789"), rest.size());
    if (end == rest.size() || rest[end] == '-' || rest[end] == '_') return number_of(rest.substr(0, end));
  }
  return {};
}

bool match(std::string_view name, std::string_view pattern, std::string* digits) {
  constexpr std::string_view kStep = "{step}";
  if (pattern.empty()) return name.empty();
  if (pattern.starts_with(kStep)) {
    size_t length = std::min(name.find_first_not_of("0123456789"), name.size());
    for (; length > 0; --length) {
      if (!match(name.substr(length), pattern.substr(kStep.size()), digits)) continue;
      *digits = name.substr(0, length);
      return true;
    }
    return false;
  }
  if (pattern.front() == '*') {
    for (size_t skipped = 0; skipped <= name.size(); ++skipped) {
      // The number is taken whole: `*` does not eat its first digits.
      const bool cuts_number = pattern.substr(1).starts_with(kStep) && skipped > 0 && skipped < name.size() &&
                               std::isdigit(static_cast<unsigned char>(name[skipped - 1]));
      if (!cuts_number && match(name.substr(skipped), pattern.substr(1), digits)) return true;
    }
    return false;
  }
  return !name.empty() && name.front() == pattern.front() && match(name.substr(1), pattern.substr(1), digits);
}

void list_into(const std::string& root, const std::string& below, int depth, std::vector<ListedFile>* files) {
  const std::string folder = below.empty() ? root : root + "/" + below;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  for (const fs::directory_iterator end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const std::string relative = below.empty() ? name : below + "/" + name;
    struct stat status {};
    if (stat((root + "/" + relative).c_str(), &status) != 0) {
      if (errno != ENOENT || !fs::is_symlink(entry->symlink_status())) {
        if (errno == ENOENT) continue;  // removed since it was listed
        throw Error(fmt::format("{}/{} cannot be read: {}.", root, relative, std::strerror(errno)));
      }
      throw Error(fmt::format("{}/{} is a link to something that is not there.", root, relative));
    }
    if (S_ISDIR(status.st_mode)) {
      if (depth >= kMaxDepth) throw Error(fmt::format("{}/{}: folders more than {} deep.", root, relative, kMaxDepth));
      list_into(root, relative, depth + 1, files);
    } else if (S_ISREG(status.st_mode)) {
      files->push_back({relative, static_cast<uint64_t>(status.st_size), status.st_mtim});
      if (files->size() > kMaxFiles) throw Error(fmt::format("{} holds more than {} files.", root, kMaxFiles));
    }
  }
  if (error) throw Error(fmt::format("{} cannot be read: {}.", folder, error.message()));
}

}  // namespace

std::string_view without_partial_ending(std::string_view name) {
  for (const std::string_view end : {".tmp", "_tmp", "-tmp", ".partial", ".incomplete", ".part"}) {
    if (name.size() > end.size() && name.ends_with(end)) return name.substr(0, name.size() - end.size());
  }
  return {};
}

std::optional<NamedStep> known_name(std::string_view name) {
  if (const std::string_view unfinished = without_partial_ending(name); !unfinished.empty()) {
    auto named = known_name(unfinished);
    if (named) named->partial = true;
    return named;
  }
  if (const auto step = number_after(name, "iter_")) return NamedStep{"megatron", *step};
  if (const auto step = number_after(name, "global_step")) return NamedStep{"deepspeed", *step};
  if (const auto step = number_after(name, "checkpoint-")) return NamedStep{"hf-trainer", *step};
  if (const auto step = number_after(name, "tmp-checkpoint-")) return NamedStep{"hf-trainer", *step, true};
  if (const auto step = number_after(name, "step-")) return NamedStep{"dcp", *step};
  if (const auto step = lightning_step(name)) return NamedStep{"lightning", *step};
  return {};
}

std::optional<NumberedFile> numbered_file(std::string_view stem) {
  const size_t of = stem.rfind("-of-");
  if (of == stem.npos || of == 0) return {};
  const size_t dash = stem.rfind('-', of - 1);
  if (dash == stem.npos) return {};
  const auto number = number_of(stem.substr(dash + 1, of - dash - 1)), count = number_of(stem.substr(of + 4));
  if (!number || !count) return {};
  return NumberedFile{std::string(stem.substr(0, dash)), *number, *count};
}

void check_pattern(std::string_view pattern) {
  const size_t at = pattern.find("{step}");
  if (at == pattern.npos || pattern.find("{step}", at + 1) != pattern.npos || pattern.find('/') != pattern.npos) {
    throw Error(fmt::format("the pattern `{}` is no file name with one {{step}} in it.", pattern),
                "Such as `ckpt_{step}.pt` or `*-{step}`; the folder is given apart from it.");
  }
}

std::optional<int64_t> step_by_pattern(std::string_view name, std::string_view pattern) {
  std::string digits;
  return match(name, pattern, &digits) ? number_of(digits) : std::nullopt;
}

std::vector<ListedFile> list_files(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) {
    std::error_code error;
    if (fs::is_symlink(path, error)) throw Error(fmt::format("{} is a link to something that is not there.", path));
    throw Error(fmt::format("{} cannot be read: {}.", path, std::strerror(errno)));
  }
  if (S_ISREG(status.st_mode)) return {{"", static_cast<uint64_t>(status.st_size), status.st_mtim}};
  std::vector<ListedFile> files;
  list_into(path, "", 0, &files);
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return files;
}

Digest fingerprint(const std::vector<ListedFile>& files) {
  std::string text;
  for (const ListedFile& file : files) {
    text += fmt::format("{}\n{} {}.{}\n", file.name, file.size_bytes, file.changed.tv_sec, file.changed.tv_nsec);
  }
  return digest_only(text.data(), text.size());
}

}  // namespace forkpoint
