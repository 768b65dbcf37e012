#include "lib/run.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <thread>
#include <tuple>

#include "lib/error.h"
#include "lib/hash_stream_file.h"

namespace forkpoint {
namespace {

constexpr int kMaxWorldSize = 1 << 20;
constexpr std::string_view kStreamPrefix = "rank-";
constexpr std::string_view kStreamSuffix = ".fkp";
constexpr std::string_view kRefusalPrefix = "refused-";

std::optional<int> rank_of_file(std::string_view file) {
  if (!file.starts_with(kStreamPrefix) || !file.ends_with(kStreamSuffix)) return std::nullopt;
  file.remove_prefix(kStreamPrefix.size());
  file.remove_suffix(std::min(file.size(), kStreamSuffix.size()));
  int rank = 0;
  const auto [end, error] = std::from_chars(file.data(), file.data() + file.size(), rank);
  if (error != std::errc() || end != file.data() + file.size() || rank < 0) return std::nullopt;
  return rank;
}

// Each stream keeps a descriptor open; two runs of some hundred ranks go past the usual soft limit of 1,024.
void allow_descriptors(size_t count) {
  struct rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > 4 * count + 256) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 8 * count + 1024);
  setrlimit(RLIMIT_NOFILE, &limit);
}

struct OpenedStream {
  int rank = 0;
  std::string path;
  std::unique_ptr<HashStreamReader> stream;
  std::string problem;
};

void open_one(OpenedStream* opened) {
  try {
    opened->stream = HashStreamReader::open(opened->path);
    if (opened->stream->header().rank == opened->rank) return;
    opened->problem = fmt::format("{}: the file is named for rank {}, but holds rank {}; it is left out.", opened->path,
                                  opened->rank, opened->stream->header().rank);
    opened->stream.reset();
  } catch (const Error& error) {
    opened->problem = error.what();
  } catch (const std::exception& error) {  // no memory: on a thread of ours it would end the program
    opened->problem = fmt::format("{}: it could not be opened ({}).", opened->path, error.what());
  }
}

// Names and summaries of each stream are decoded here: worth all cores when there are many ranks.
void open_all(std::vector<OpenedStream>* streams) {
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < streams->size(); i = next++) open_one(&(*streams)[i]);
  };
  const size_t most = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < std::min(most, streams->size() / 4); ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
}

std::vector<OpenedStream> find_streams(const std::string& directory) {
  std::vector<OpenedStream> found;
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(directory, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    if (const auto rank = rank_of_file(entry->path().filename().string())) {
      found.push_back({*rank, directory + "/" + entry->path().filename().string(), nullptr, {}});
    }
  }
  if (error) throw Error(fmt::format("{}: the run folder cannot be listed: {}.", directory, error.message()));
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return std::tie(a.rank, a.path) < std::tie(b.rank, b.path); });
  return found;
}

// Sentences of processes that recorded nothing.
std::vector<std::string> read_refusals(const std::string& directory) {
  std::vector<std::string> sentences;
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(directory, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    if (!entry->path().filename().string().starts_with(kRefusalPrefix)) continue;
    std::string sentence;
    std::getline(std::ifstream(entry->path()), sentence);
    sentences.push_back(sentence.empty() ? entry->path().string() + ": a process recorded nothing" : sentence);
  }
  std::sort(sentences.begin(), sentences.end());
  return sentences;
}

bool recorder_is_alive(const RecorderProcess& recorder) {
  StreamHeader header;
  header.pid = recorder.pid;
  header.boot_id = recorder.boot_id;
  header.pid_start_ticks = recorder.pid_start_ticks;
  header.pid_namespace = recorder.pid_namespace;
  return recorder.pid != 0 && process_is_alive(header).value_or(false);
}

[[noreturn]] void throw_no_stream(const std::string& directory, const Manifest& manifest,
                                  const std::vector<std::string>& problems) {
  if (!problems.empty()) {
    throw Error(
        fmt::format("{}: none of the run's {} streams can be read: {}", directory, problems.size(), problems.front()),
        "Record again, or restore the files from a copy.");
  }
  if (manifest.state == RunState::recording && recorder_is_alive(manifest.recorder)) {
    throw Error(fmt::format("{}: the run is being recorded by process {} and no rank has written anything yet.",
                            directory, manifest.recorder.pid),
                "Wait until the first step has ended.");
  }
  throw Error(fmt::format("{}: the run is empty: no rank has written a hash stream.", directory),
              "The command ended before a step, or no rank loaded the probe; see `forkpoint record -h`.");
}

}  // namespace

std::string refusal_file_name(int rank, int64_t pid) { return fmt::format("{}{:05}-{}.txt", kRefusalPrefix, rank, pid); }

std::string stream_file_name(int rank) { return fmt::format("{}{:05}{}", kStreamPrefix, rank, kStreamSuffix); }

bool is_numeric_environment(std::string_view variable) {
  constexpr std::array<std::string_view, 30> kPrefixes = {
      "NCCL_",   "RCCL_",    "CUDA_",  "CUDNN_",         "CUBLAS_", "CUBLASLT_", "NVIDIA_TF32_OVERRIDE",
      "NVTE_",   "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "XLA_",    "JAX_",      "TF_",
      "TRITON_", "OMP_",     "MKL_",   "OPENBLAS_",      "ONEDNN_", "DNNL_",     "GOTO_",
      "BLIS_",   "KMP_",     "GOMP_",  "NUMEXPR_",       "HIP_",    "ROCBLAS_",  "MIOPEN_",
      "VECLIB_", "NVSHMEM_"};
  constexpr std::array<std::string_view, 6> kNames = {
      "PYTHONHASHSEED",  "GLIBC_TUNABLES", "FLASH_ATTENTION_DETERMINISTIC", "ACCELERATE_MIXED_PRECISION",
      "MALLOC_PERTURB_", "MAMBA_DETERMINISTIC"};
  // A run may be passed on: nothing that looks like a secret goes in. (TF_ is also Terraform's prefix.)
  for (std::string_view secret : {"TOKEN", "SECRET", "PASSWORD", "API_KEY", "CREDENTIAL", "TF_VAR_"}) {
    if (variable.find(secret) != std::string_view::npos) return false;
  }
  if (variable.find("INJECTION64_PATH") != std::string_view::npos) return false;  // says who watches
  const auto begins = [&](std::string_view prefix) { return variable.starts_with(prefix); };
  return std::any_of(kPrefixes.begin(), kPrefixes.end(), begins) ||
         std::find(kNames.begin(), kNames.end(), variable) != kNames.end();
}

Run Run::open(const std::string& run_directory) {
  Run run;
  run.directory_ = run_directory;
  run.manifest_ = read_manifest(run_directory);
  std::vector<OpenedStream> found = find_streams(run_directory);
  allow_descriptors(found.size());
  open_all(&found);
  for (OpenedStream& opened : found) {
    if (!opened.problem.empty()) run.problems_.push_back(opened.problem);
    if (!opened.stream) continue;
    if (run.stream_of(opened.rank) != nullptr) {
      run.problems_.push_back(fmt::format("{}: a second stream of rank {}; it is left out.", opened.path, opened.rank));
      continue;
    }
    run.streams_.push_back(std::move(opened.stream));
  }
  for (std::string& refusal : read_refusals(run_directory)) run.problems_.push_back(std::move(refusal));
  if (run.streams_.empty()) throw_no_stream(run_directory, run.manifest_, run.problems_);
  run.communicators_ = Communicators(run.streams_);
  for (const auto& stream : run.streams_) {
    const int size = stream->header().world_size;
    if (size != run.world_size() || stream->header().rank >= run.world_size()) {
      run.problems_.push_back(fmt::format("{}: rank {} of a world of {}; the run has a world of {}.", stream->path(),
                                          stream->header().rank, size, run.world_size()));
    }
  }
  const auto any = [&](StreamState state) {
    return std::any_of(run.streams_.begin(), run.streams_.end(),
                       [&](const auto& stream) { return stream->state() == state; });
  };
  const bool all_whole = !any(StreamState::recording) && !any(StreamState::died) && run.problems_.empty();
  if (run.manifest_.state == RunState::whole && all_whole && run.missing_ranks().empty()) {
    run.state_ = RunState::whole;
  } else if (any(StreamState::recording) ||
             (run.manifest_.state == RunState::recording && recorder_is_alive(run.manifest_.recorder))) {
    run.state_ = RunState::recording;
  }
  return run;
}

Run Run::of(std::string run_directory, Manifest manifest, std::vector<std::unique_ptr<HashStreamReader>> streams) {
  Run run;
  run.directory_ = std::move(run_directory);
  run.manifest_ = std::move(manifest);
  run.streams_ = std::move(streams);
  run.communicators_ = Communicators(run.streams_);
  run.state_ = RunState::recording;
  return run;
}

const HashStreamReader* Run::stream_of(int rank) const {
  for (const auto& stream : streams_) {
    if (stream->header().rank == rank) return stream.get();
  }
  return nullptr;
}

int Run::world_size() const {
  if (manifest_.world_size != 0) return manifest_.world_size;
  int largest = 0;
  for (const auto& stream : streams_) largest = std::max(largest, stream->header().world_size);
  return std::min(largest, kMaxWorldSize);
}

std::vector<int> Run::missing_ranks() const {
  std::vector<int> expected = manifest_.ranks;
  for (int rank = 0; manifest_.ranks.empty() && rank < world_size(); ++rank) expected.push_back(rank);
  std::set<int> there;
  for (const auto& stream : streams_) there.insert(stream->header().rank);
  std::erase_if(expected, [&](int rank) { return there.contains(rank); });
  return expected;
}

}  // namespace forkpoint
