#include "probes/settings.h"

#include <climits>
#include <cstdio>
#include <cstring>

#include "lib/probe_contract.h"
#include "probes/step_marks.h"

namespace forkpoint {
namespace {

using Get = const char* (*)(const char* name);

// Digits only, no sign, no blank: nullptr when there is no number in 0 .. maximum, else the first character after it.
const char* read_number(const char* text, uint64_t maximum, uint64_t* number) {
  const char* end = text;
  uint64_t value = 0;
  for (; *end >= '0' && *end <= '9'; ++end) {
    const auto digit = static_cast<uint64_t>(*end - '0');
    if (value > (maximum - digit) / 10) return nullptr;
    value = value * 10 + digit;
  }
  if (end == text) return nullptr;
  *number = value;
  return end;
}

bool is_number(const char* text, uint64_t maximum, uint64_t* number) {
  const char* end = read_number(text, maximum, number);
  return end && *end == '\0';
}

// Calls visit(first, last) for each entry of "0,2,4-7" until it returns true. false: malformed.
template <typename Visit>
bool each_rank_range(const char* text, Visit visit) {
  for (;;) {
    uint64_t first = 0;
    text = read_number(text, INT_MAX, &first);
    if (!text) return false;
    uint64_t last = first;
    if (*text == '-') text = read_number(text + 1, INT_MAX, &last);
    if (!text || last < first || (*text != ',' && *text != '\0')) return false;
    if (visit(static_cast<int>(first), static_cast<int>(last)) || *text++ == '\0') return true;
  }
}

class Reader {
 public:
  Reader(Get get, Settings* settings) : get_(get), settings_(*settings) {}

  void run() {
    const char* directory = get_(contract::kRun);
    if (!directory || !*directory) return read_sleeper();
    settings_.state = Settings::State::ready;
    if (directory[0] != '/') return refuse(contract::kRun, directory, "an absolute path");
    if (strlen(directory) >= sizeof(settings_.run_directory)) return refuse(contract::kRun, directory, "a shorter path");
    strcpy(settings_.run_directory, directory);
    read_choice();
    read_limits();
    read_launch_level();
    read_save();
    read_torch();
    read_rank();
  }

 private:
  const char* value(const char* name) const {
    const char* text = get_(name);
    return text && *text ? text : nullptr;
  }

  void refuse(const char* name, const char* found, const char* expected) {
    if (settings_.state == Settings::State::malformed) return;  // the first one is enough
    settings_.state = Settings::State::malformed;
    snprintf(settings_.problem, sizeof(settings_.problem),
             "%s is \"%.200s\", expected %s; nothing is recorded in process", name, found, expected);
  }

  // Only `forkpoint attach` will ask for anything: nothing here is worth a refusal.
  void read_sleeper() {
    const char* torch = value(contract::kTorch);
    settings_.torch = !torch || strcmp(torch, "0") != 0;
    for (const char* name : {contract::kJob, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"}) {
      const char* text = value(name);
      if (!text || strcmp(text, "none") == 0) continue;
      snprintf(settings_.job, sizeof(settings_.job), "%s", text);
      break;
    }
    const char* chosen = value(contract::kSockets);
    const char* runtime = value("XDG_RUNTIME_DIR");
    if (chosen) snprintf(settings_.sockets, sizeof(settings_.sockets), "%s", chosen);
    else if (runtime && *runtime == '/') snprintf(settings_.sockets, sizeof(settings_.sockets), "%s/forkpoint", runtime);
    read_rank();
  }

  void read_choice() {
    if (const char* text = value(contract::kLevel)) {
      if (const auto level = level_from_name(text)) settings_.level = *level;
      else refuse(contract::kLevel, text, "step, layer or launch");
    }
    if (const char* text = value(contract::kSteps)) read_steps(text);
    if (const char* text = value(contract::kRanks)) {
      const bool fits = strlen(text) < sizeof(settings_.ranks);
      if (fits && each_rank_range(text, [](int, int) { return false; })) strcpy(settings_.ranks, text);
      else refuse(contract::kRanks, text, "a list such as 0,2,4-7");
    }
    if (const char* text = value(contract::kStepOn)) read_step_mark(text);
    if (const char* text = value(contract::kMaskNames)) {
      settings_.mask_names = strcmp(text, "1") == 0;
      if (!settings_.mask_names && strcmp(text, "0") != 0) refuse(contract::kMaskNames, text, "0 or 1");
    }
  }

  void read_step_mark(const char* text) {
    char expected[160] = "a POSIX extended regular expression: ";
    const size_t length = strlen(expected);
    if (!set_step_mark(text, expected + length, sizeof(expected) - length)) refuse(contract::kStepOn, text, expected);
  }

  void read_steps(const char* text) {
    uint64_t first = 0, last = 0;
    const char* rest = read_number(text, INT64_MAX, &first);
    if (!rest || *rest != ':' || !is_number(rest + 1, INT64_MAX, &last) || last < first) {
      return refuse(contract::kSteps, text, "A:B with A <= B");
    }
    settings_.first_wanted_step = static_cast<int64_t>(first);
    settings_.last_wanted_step = static_cast<int64_t>(last);
  }

  uint64_t read_limit(const char* name, uint64_t minimum, uint64_t maximum, uint64_t otherwise, const char* expected) {
    const char* text = value(name);
    if (!text) return otherwise;
    uint64_t number = 0;
    if (is_number(text, maximum, &number) && number >= minimum) return number;
    refuse(name, text, expected);
    return otherwise;
  }

  void read_limits() {
    settings_.every = static_cast<int64_t>(read_limit(contract::kEvery, 1, INT64_MAX, 1, "a number from 1"));
    settings_.max_size_bytes =
        read_limit(contract::kMaxSizeBytes, 1, INT64_MAX, 0, "a number of bytes from 1, without a unit");
    if (value(contract::kFirstStep)) {
      settings_.first_step = static_cast<int64_t>(
          read_limit(contract::kFirstStep, 0, INT64_MAX, 0, "the number of the first step, from 0"));
    }
    if (value(contract::kStopAfter)) {
      settings_.stop_after = static_cast<int64_t>(
          read_limit(contract::kStopAfter, 0, INT64_MAX - 1, 0, "the number of the last step, from 0"));
    }
    const char* power_of_two = "a power of two from 2 to 16777216";
    settings_.ring_slots =
        static_cast<uint32_t>(read_limit(contract::kRingSlots, 2, 1u << 24, settings_.ring_slots, power_of_two));
    if (settings_.ring_slots & (settings_.ring_slots - 1)) {
      refuse(contract::kRingSlots, value(contract::kRingSlots), power_of_two);
    }
    settings_.ring_wait_ms = static_cast<uint32_t>(
        read_limit(contract::kRingWaitMs, 0, 3'600'000, settings_.ring_wait_ms, "milliseconds from 0 to 3600000"));
  }

  bool read_switch(const char* name, bool otherwise = false) {
    const char* text = value(name);
    if (!text) return otherwise;
    if (strcmp(text, "0") == 0) return false;
    if (strcmp(text, "1") != 0) refuse(name, text, "0 or 1");
    return true;
  }

  void read_launch_level() {
    settings_.inputs = read_switch(contract::kInputs);
    settings_.sequence = read_switch(contract::kSequence);
    if (const char* text = value(contract::kCupti)) {
      if (strlen(text) >= sizeof(settings_.cupti)) refuse(contract::kCupti, text, "a shorter path");
      else strcpy(settings_.cupti, text);
    }
    settings_.retry = static_cast<uint32_t>(read_limit(contract::kRetry, 1, 100'000, 0, "a number from 1 to 100000"));
    if (const char* text = value(contract::kLaunch)) {
      // -1: before the first step, or in a program without steps.
      uint64_t step = 0, index = 0;
      const bool before = strncmp(text, "-1:", 3) == 0;
      const char* rest = before ? text + 2 : read_number(text, INT64_MAX, &step);
      if (!rest || *rest != ':' || !is_number(rest + 1, INT64_MAX, &index)) {
        return refuse(contract::kLaunch, text, "STEP:INDEX");
      }
      settings_.retry_step = before ? kPrologueStep : static_cast<int64_t>(step);
      settings_.retry_index = index;
    }
  }

  void read_save() {
    const char* text = value(contract::kSave);
    if (!text) return;
    SaveRequest& save = settings_.save;
    const char* expected = "step=N;launch=INDEX, or step=N;phase=P;layer=L;op=O";
    for (const char* rest = text;;) {
      const std::string_view part(rest, strcspn(rest, ";"));
      if (!take_save_part(part)) return refuse(contract::kSave, text, expected);
      if (rest[part.size()] == '\0') break;
      rest += part.size() + 1;
    }
    const bool names_records = save.phase >= 0 || save.layer[0] || save.op[0];
    save.wanted = true;
    if (save.step < 0 || save.is_launch == names_records) return refuse(contract::kSave, text, expected);
    if (settings_.mask_names) refuse(contract::kSave, text, "nothing with FORKPOINT_MASK_NAMES: values and names would be in the run");
  }

  bool take_save_part(std::string_view part) {
    SaveRequest& save = settings_.save;
    const size_t equals = part.find('=');
    if (equals == std::string_view::npos) return false;
    const std::string_view name = part.substr(0, equals), value = part.substr(equals + 1);
    char number_text[24] = "";
    uint64_t number = 0;
    const bool is_number_text = !value.empty() && value.size() < sizeof(number_text);
    if (is_number_text) memcpy(number_text, value.data(), value.size());
    const bool is_count = is_number_text && is_number(number_text, INT64_MAX, &number);
    if (name == "step") return save.step = static_cast<int64_t>(number), is_count;
    if (name == "launch") return save.launch = number, save.is_launch = is_count;
    if (name == "phase") {
      const auto phase = phase_from_name(value);
      save.phase = phase ? static_cast<int>(*phase) : -1;
      return phase.has_value();
    }
    return (name == "layer" && copy_text(value, save.layer)) || (name == "op" && copy_text(value, save.op));
  }

  template <size_t size>
  static bool copy_text(std::string_view text, char (&target)[size]) {
    if (text.empty() || text.size() >= size) return false;
    memcpy(target, text.data(), text.size());
    target[text.size()] = '\0';
    return true;
  }

  void read_torch() {
    settings_.torch = read_switch(contract::kTorch, true);
    if (const char* text = value(contract::kOps)) {
      if (strlen(text) >= sizeof(settings_.ops)) refuse(contract::kOps, text, "a shorter list");
      else strcpy(settings_.ops, text);
    }
    if (const char* text = value(contract::kDeterministic)) {
      if (strlen(text) >= sizeof(settings_.knobs)) refuse(contract::kDeterministic, text, "a shorter list");
      else strcpy(settings_.knobs, text);
    }
    if (const char* text = value(contract::kWatch)) read_watch(text);
    if (const char* text = value(contract::kOnTrigger)) {
      static constexpr const char* kNames[] = {"warn", "stop", "deepen"};  // in the order of OnTrigger
      int found = 0;
      while (found < 3 && strcmp(text, kNames[found]) != 0) ++found;
      if (found < 3) settings_.on_trigger = static_cast<OnTrigger>(found);
      else refuse(contract::kOnTrigger, text, "warn, stop or deepen");
    }
  }

  void read_watch(const char* text) {
    for (const char* rest = text;;) {
      const size_t length = strcspn(rest, ",");
      const std::string_view word(rest, length);
      if (word == "nan") settings_.watch_nan = true;
      else if (word == "replicas") settings_.watch_replicas = true;
      else return refuse(contract::kWatch, text, "nan, replicas, or both with a comma between them");
      if (rest[length] == '\0') return;
      rest += length + 1;
    }
  }

  // Foreign variables: one that makes no sense is passed over and said, not refused. Of global ranks only: MPI_LOCALRANKID, PALS_LOCAL_RANKID
  // and their like count within a node. MPI launchers that start their daemons with srun leave the daemon's SLURM_PROCID to
  // the ranks, so theirs come first.
  void read_rank() {
    static constexpr const char* kLaunchers[][2] = {
        {"RANK", "WORLD_SIZE"},
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},   // Open MPI
        {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},     // MVAPICH2
        {"PMI_RANK", "PMI_SIZE"},                           // MPICH, Intel MPI, srun --mpi=pmi2
        {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"},       // jsrun
        {"FLUX_TASK_RANK", "FLUX_JOB_SIZE"},
        {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},           // srun: of the step, which may be smaller than the job
        {"SLURM_PROCID", "SLURM_NTASKS"},
        {"PALS_RANKID", nullptr},                           // HPE Cray
        {"ALPS_APP_PE", nullptr},
        {"PMIX_RANK", nullptr},
    };
    for (const auto& [rank_name, size_name] : kLaunchers) {
      if (strcmp(rank_name, "SLURM_PROCID") == 0 && is_slurm_batch_script()) continue;
      uint64_t rank = 0, size = 0;
      const char* rank_text = value(rank_name);
      const char* size_text = size_name ? value(size_name) : nullptr;
      if (!rank_text) continue;
      if (!is_number(rank_text, INT_MAX - 1, &rank)) {
        note_rank_problem("%s is \"%.60s\", which is no rank", rank_name, rank_text);
        continue;
      }
      const bool size_known = size_text && is_number(size_text, INT_MAX, &size);
      if (size_text && !size_known) {
        note_rank_problem("%s is \"%.60s\", which is no number of ranks", size_name, size_text);
      }
      // Of two variables for the size the second gets its turn.
      if (!size_known && size_name && strcmp(size_name, "SLURM_STEP_NUM_TASKS") == 0) continue;
      if (!size_known) size = rank + 1;  // what this rank proves
      if (rank >= size) {
        note_rank_problem("%s is %.20s and %s is %.20s: ranks count from 0, so there is no such rank", rank_name, rank_text, size_name,
                          size_text);
        continue;
      }
      settings_.world_size_known = size_known;
      settings_.rank = static_cast<int>(rank);
      settings_.world_size = static_cast<int>(size);
      return;
    }
  }

  template <typename... Texts>
  void note_rank_problem(const char* format, Texts... texts) {
    char* text = settings_.rank_problem;
    if (!text[0]) snprintf(text, sizeof(settings_.rank_problem), format, texts...);  // the first one is enough
  }

  // Its SLURM_PROCID is 0 whatever it goes on to start; only srun makes a step.
  bool is_slurm_batch_script() const {
    return value("SLURM_JOB_ID") && !value("SLURM_STEP_ID") && !value("SLURM_STEPID");
  }

  Get get_;
  Settings& settings_;
};

}  // namespace

bool Settings::has_knob(std::string_view name) const {
  for (const char* rest = knobs;;) {
    const size_t length = strcspn(rest, ",");
    if (std::string_view(rest, length) == name) return true;
    if (rest[length] == '\0') return false;
    rest += length + 1;
  }
}

bool Settings::wants_rank(int rank) const {
  if (!ranks[0]) return true;
  bool found = false;
  each_rank_range(ranks, [&](int first, int last) { return found = rank >= first && rank <= last; });
  return found;
}

void read_settings(const char* (*get)(const char* name), Settings* settings) { Reader(get, settings).run(); }

}  // namespace forkpoint
