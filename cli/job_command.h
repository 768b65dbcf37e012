// The command line by which a job resumes from a checkpoint, or saves one: the user's own, with placeholders filled in,
// or with the arguments of a framework added.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace forkpoint {

struct CommandValues {
  std::string checkpoint;      // {checkpoint}: the checkpoint itself; empty: there is none yet
  std::string checkpoint_dir;  // {checkpoint_dir}: the folder that it is in, and that the job saves to
  int64_t step = 0;            // {step}: steps done in the checkpoint; for a job that saves one: to be done
  std::string run;             // {run}: the run folder
  std::string user_directory;  // as the user knows it: arguments that name it get checkpoint_dir; empty: none
};

// Each {checkpoint}, {checkpoint_dir}, {step} and {run} in a word, also within it; other braces stay.
std::vector<std::string> fill_in(const std::vector<std::string>& command, const CommandValues& values);
bool has_placeholder(const std::vector<std::string>& command);  // one of the checkpoint: all but {run}
bool is_shell_line(const std::vector<std::string>& command);  // sh -c LINE: nothing can be added behind it
// "--load {checkpoint_dir} --ckpt-step {step}" into words, as a shell splits and quotes them. Throws UsageError.
std::vector<std::string> split_words(std::string_view text, std::string_view option);

// Names for --preset, in the words of Checkpoint::kind.
const std::vector<std::string_view>& presets();
// The preset that the program in a command belongs to ("minigpt"); empty: not known.
std::string preset_of_program(const std::vector<std::string>& command);

// The command that resumes from values.checkpoint. Without placeholders the arguments of the preset are added (an
// option that is there already gets the new value); every argument that is values.user_directory becomes
// values.checkpoint_dir. Throws UsageError when the job would not learn what to load.
std::vector<std::string> resuming(const std::vector<std::string>& command, const std::string& preset,
                                  const CommandValues& values);
// Every argument (of `NAME=X`, X) for which `is_users` holds becomes `own`. Gives what they were. option: NAME, or the
// option that the argument stands behind; empty: none.
using IsUsers = std::function<bool(const std::string& argument, const std::string& option)>;
std::vector<std::string> redirect(const IsUsers& is_users, const std::string& own, std::vector<std::string>* command);
// By its name an option of where a job saves to: --out, --output_dir, --checkpoint-dir, not --ckpt, not --load-dir.
bool is_saving_option(std::string_view option);
bool is_same_folder(const std::string& path, const std::string& folder);  // false where a path is not there
// The command that saves a checkpoint behind values.step steps into values.checkpoint_dir. Throws UsageError as well.
std::vector<std::string> saving(const std::vector<std::string>& command, const std::string& preset,
                                const CommandValues& values);

}  // namespace forkpoint
