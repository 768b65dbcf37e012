#include "lib/checkpoints.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <set>
#include <thread>

#include "lib/checkpoint_inside.h"
#include "lib/checkpoint_layouts.h"
#include "lib/error.h"

namespace forkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kRecentSeconds = 10;
constexpr auto kSettling = std::chrono::milliseconds(200);
constexpr int kSearchDepth = 4;
constexpr size_t kMaxFolders = 10'000;

struct Found {
  Checkpoint checkpoint;
  bool names_step = true;
  std::vector<ListedFile> files;
};

// step-100 of torchtitan and step-000100 of minigpt: told apart by what is in them, and by the zeros while there is nothing.
bool is_minigpt(const std::string& path, const std::vector<ListedFile>& files) {
  bool minigpt = false;
  for (const ListedFile& file : files) {
    if (file.name.ends_with(".distcp") || file.name == ".metadata" || file.name == ".metadata.tmp") return false;
    minigpt = minigpt || file.name == "COMPLETE" || file.name == "optimizer.safetensors" || file.name.starts_with("rank-0");
  }
  return minigpt || (files.empty() && fs::path(path).filename().string().starts_with("step-0"));
}

// Lightning's count is asked of what it wrote: "last.ckpt" names none, and with several optimizers the one in the name counts
// each of them.
bool ask_lightning(const std::string& path, bool is_file, Found* found) {
  const auto inside = look_inside_lightning(is_file ? path : path + "/meta.pt");
  if (inside) found->checkpoint.step = inside->steps;
  return inside.has_value();
}

// Which layout it is of, and which step. false: it is no checkpoint.
bool name_it(const std::string& path, const std::string& pattern, Found* found) {
  const std::string name = fs::path(path).filename().string();
  Checkpoint& checkpoint = found->checkpoint;
  std::error_code error;
  if (!pattern.empty()) {
    const auto step = step_by_pattern(name, pattern);
    checkpoint.kind = "pattern";
    checkpoint.step = step.value_or(0);
    return step.has_value();
  }
  const bool is_file = fs::is_regular_file(path, error);
  const auto named = known_name(name);
  if (!named && is_file && name.ends_with(".ckpt")) {
    checkpoint.kind = "lightning";
    found->names_step = false;
    return ask_lightning(path, true, found);
  }
  if (!named || (is_file && named->kind != "lightning")) return false;
  checkpoint.kind = named->kind;
  checkpoint.step = named->step;
  if (named->kind == "lightning") ask_lightning(path, is_file, found);
  return true;
}

std::optional<Found> look_at(const std::string& path, const std::string& pattern) {
  Found found;
  Checkpoint& checkpoint = found.checkpoint;
  checkpoint.path = path;
  if (!name_it(path, pattern, &found)) return {};
  try {
    found.files = list_files(path);
    for (const ListedFile& file : found.files) checkpoint.size_bytes += file.size_bytes;
    if (checkpoint.kind == "dcp" && is_minigpt(path, found.files)) checkpoint.kind = "minigpt";
    checkpoint.why_not = why_not_whole(checkpoint, found.files);
    if (checkpoint.why_not.empty() && pattern.empty() && !without_partial_ending(fs::path(path).filename().string()).empty()) {
      checkpoint.why_not = "its name says that it was not finished";
    }
  } catch (const Error& failed) {
    checkpoint.why_not = failed.what();
    if (checkpoint.why_not.ends_with('.')) checkpoint.why_not.pop_back();
  }
  checkpoint.whole = checkpoint.why_not.empty();
  return found;
}

// "last.ckpt" beside the checkpoint that it is a copy of, or a link to.
void drop_doubles(std::vector<Found>* all) {
  std::set<int64_t> named;
  for (const Found& found : *all) {
    if (found.names_step && found.checkpoint.whole) named.insert(found.checkpoint.step);
  }
  std::erase_if(*all, [&](const Found& found) { return !found.names_step && named.contains(found.checkpoint.step); });
}

std::vector<Found> look_in(const std::string& directory, const std::string& pattern, std::error_code* error) {
  std::vector<Found> all;
  fs::directory_iterator entry(directory, *error);
  for (const fs::directory_iterator end; !*error && entry != end; entry.increment(*error)) {
    if (auto found = look_at(entry->path().string(), pattern)) all.push_back(std::move(*found));
  }
  drop_doubles(&all);
  return all;
}

// The folders below that hold checkpoints, breadth first.
std::vector<Found> search_below(const std::string& directory, const std::string& pattern) {
  std::vector<std::string> level{directory};
  std::vector<Found> found;
  std::string holder;
  size_t visited = 0;
  for (int depth = 0; depth < kSearchDepth && !level.empty(); ++depth) {
    std::vector<std::string> next;
    for (const std::string& folder : level) {
      std::error_code error;
      fs::directory_iterator entry(folder, error);
      for (const fs::directory_iterator end; !error && entry != end; entry.increment(error)) {
        if (entry->is_symlink(error) || !entry->is_directory(error)) continue;
        if (++visited > kMaxFolders) return found;
        const std::string path = entry->path().string();
        std::error_code unreadable;
        std::vector<Found> here = look_in(path, pattern, &unreadable);
        if (here.empty()) {
          next.push_back(path);
          continue;
        }
        if (!holder.empty()) {
          throw Error(fmt::format("{} holds no checkpoint, but several folders below it do: {} and {}.", directory, holder, path),
                      "Name one of them.");
        }
        holder = path;
        found = std::move(here);
      }
    }
    level = std::move(next);
  }
  return found;
}

bool changed_lately(const ListedFile& file, int64_t now) { return file.changed.tv_sec + kRecentSeconds >= now; }

// Looks a second time at files that were changed lately.
void wait_for_writers(std::vector<Found>& all) {
  const int64_t now = std::time(nullptr);
  const auto fresh = [&](const Found& f) {
    return f.checkpoint.whole && std::any_of(f.files.begin(), f.files.end(), [&](const auto& l) { return changed_lately(l, now); });
  };
  if (std::none_of(all.begin(), all.end(), fresh)) return;
  std::this_thread::sleep_for(kSettling);
  for (Found& found : all) {
    if (!fresh(found)) continue;
    Checkpoint& checkpoint = found.checkpoint;
    try {
      const std::vector<ListedFile> again = list_files(checkpoint.path);
      if (again.size() != found.files.size()) checkpoint.why_not = "files come and go in it: it is still being written";
      for (size_t i = 0; i < again.size() && checkpoint.why_not.empty(); ++i) {
        const ListedFile &was = found.files[i], &is = again[i];
        if (was.name == is.name && was.size_bytes == is.size_bytes && was.changed.tv_sec == is.changed.tv_sec &&
            was.changed.tv_nsec == is.changed.tv_nsec) {
          continue;
        }
        checkpoint.why_not = fmt::format("{} is still being written", is.name.empty() ? checkpoint.path : is.name);
      }
    } catch (const Error& failed) {
      checkpoint.why_not = failed.what();
    }
    checkpoint.whole = checkpoint.why_not.empty();
  }
}

}  // namespace

std::vector<Checkpoint> find_checkpoints(const std::string& directory, const std::string& pattern) {
  if (!pattern.empty()) check_pattern(pattern);
  std::string path = directory;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  std::error_code error;
  std::vector<Found> all;
  // "." and links are called what they lead to.
  const fs::path real = fs::canonical(path, error);
  if (error) throw Error(fmt::format("{} cannot be read: {}.", directory, error.message()), "Name the folder that holds the checkpoints.");
  auto itself = look_at(path, pattern);
  if (!itself) itself = look_at(real.string(), pattern);
  if (itself) {
    all.push_back(std::move(*itself));
  } else {
    all = look_in(path, pattern, &error);
    if (error) throw Error(fmt::format("{} cannot be read: {}.", directory, error.message()), "Name the folder that holds the checkpoints.");
    if (all.empty()) all = search_below(path, pattern);
  }
  wait_for_writers(all);
  std::vector<Checkpoint> result;
  for (Found& found : all) result.push_back(std::move(found.checkpoint));
  std::sort(result.begin(), result.end(), [](const Checkpoint& a, const Checkpoint& b) {
    return a.step != b.step ? a.step < b.step : a.path < b.path;
  });
  return result;
}

bool holds_checkpoints(const std::string& directory, const std::string& pattern) {
  std::error_code error;
  fs::directory_iterator entry(directory, error);
  for (const fs::directory_iterator end; !error && entry != end; entry.increment(error)) {
    Found found;
    if (name_it(entry->path().string(), pattern, &found)) return true;
  }
  return false;
}

std::optional<Checkpoint> newest_checkpoint(const std::vector<Checkpoint>& checkpoints, int64_t at_most) {
  std::optional<Checkpoint> newest;
  for (const Checkpoint& checkpoint : checkpoints) {
    if (checkpoint.whole && checkpoint.step <= at_most && (!newest || checkpoint.step >= newest->step)) newest = checkpoint;
  }
  return newest;
}

}  // namespace forkpoint
