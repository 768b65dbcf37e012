#include "cli/doctor_command.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <string_view>

#include "cli/arguments.h"
#include "cli/job_command.h"
#include "lib/input_file.h"

namespace forkpoint {
namespace {

using Words = std::vector<std::string>;

// Programs that start the command behind their options in a place of their own.
struct Wrapper {
  std::string_view name;
  std::string_view with_value;  // options that take the next word, by blanks
  std::string_view with_two;    // options that take the next two
  int positional = 0;           // words of their own before the command
  bool all_known = true;        // all their options are in this table
};
constexpr Wrapper kWrappers[] = {
    {"nice", "-n --adjustment", "", 0, true},
    {"ionice", "-c -n -p --class --classdata", "", 0, true},
    {"nohup", "", "", 0, true},
    {"setsid", "", "", 0, true},
    {"time", "-f -o --format --output", "", 0, true},
    {"timeout", "-k -s --kill-after --signal", "", 1, true},
    {"stdbuf", "-i -o -e --input --output --error", "", 0, true},
    {"taskset", "", "", 1, true},
    {"numactl", "-N -m -C -p -i -w --cpunodebind --membind --physcpubind --preferred --interleave", "", 0, false},
    {"mpirun",
     "-n -np --np -N -H -host --host -hostfile --hostfile -machinefile --machinefile -x --map-by -map-by --bind-to "
     "-bind-to "
     "--rank-by --prefix --wdir -wdir -wd --path --timeout -ppn --ppn -f -iface",
     "--mca -mca -genv -env", 0, false},
    {"mpiexec",
     "-n -np --np -N -H -host --host -hostfile --hostfile -machinefile --machinefile -x --map-by -map-by --bind-to "
     "-bind-to "
     "--rank-by --prefix --wdir -wdir -wd --path --timeout -ppn --ppn -f -iface",
     "--mca -mca -genv -env", 0, false},
    {"srun",
     "-n -N -c -p -t -G -w -x -J -A -o -e -i -D -q -C --ntasks --nodes --cpus-per-task --partition --time --gpus "
     "--nodelist "
     "--job-name --account --output --error --gres --gpus-per-node --gpus-per-task --ntasks-per-node --mem --qos "
     "--export",
     "", 0, false},
};

// What does not hand LD_PRELOAD on, and how.
struct Dropper {
  std::string_view name, how;
};
constexpr Dropper kDroppers[] = {
    {"sudo", "removes LD_PRELOAD from the environment"},
    {"doas", "removes LD_PRELOAD from the environment"},
    {"su", "is set-uid: the loader drops LD_PRELOAD"},
    {"pkexec", "is set-uid: the loader drops LD_PRELOAD"},
    {"docker", "starts it in a container, without our environment"},
    {"podman", "starts it in a container, without our environment"},
    {"nerdctl", "starts it in a container, without our environment"},
    {"apptainer", "starts it in a container, in which the probe's file need not be"},
    {"singularity", "starts it in a container, in which the probe's file need not be"},
    {"enroot", "starts it in a container, without our environment"},
    {"kubectl", "starts it on another machine, without our environment"},
    {"ssh", "starts it on another machine, without our environment"},
    {"chroot", "starts it where the probe's file need not be"},
};

bool is_one_of(std::string_view list, std::string_view word) {
  for (size_t at = list.find(word); at != list.npos; at = list.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || list[at - 1] == ' ') && (end == list.size() || list[end] == ' ')) return true;
  }
  return false;
}

std::string base_name(const std::string& word) { return std::filesystem::path(word).filename().string(); }

bool is_assignment(const std::string& word) {
  const size_t equals = word.find('=');
  if (equals == word.npos || equals == 0 || std::isdigit(static_cast<unsigned char>(word[0]))) return false;
  return std::all_of(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(equals),
                     [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

class Reader {
 public:
  explicit Reader(const Words& command) : words_(command) {}

  JobLine read() {
    while (at_ < words_.size() && next()) {
    }
    return std::move(line_);
  }

 private:
  // false: nothing more can be told.
  bool next() {
    const std::string word = words_[at_], name = base_name(word);
    line_.look.programs.push_back(word);
    if (!guessing_) line_.certain = line_.look.programs.size();
    ++at_;
    if (is_shell_line({word, at_ < words_.size() ? words_[at_] : ""})) return enter_shell_line();
    if (name == "env") return pass_env();
    for (const Dropper& dropper : kDroppers) {
      if (name == dropper.name) return drop(name, std::string(dropper.how)), false;
    }
    for (const Wrapper& wrapper : kWrappers) {
      if (name == wrapper.name) return pass_wrapper(wrapper);
    }
    if (name.starts_with("python") || name.starts_with("pypy")) return pass_python();
    if (name == "torchrun") return pass_torchrun();
    return false;
  }

  void drop(const std::string& who, std::string how) {
    if (!line_.look.drops_preload.empty()) return;
    line_.look.drops_preload = who;
    line_.look.how = std::move(how);
  }

  void assign(const std::string& word) {
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    if (name == "LD_PRELOAD") drop("LD_PRELOAD=", "before the command sets LD_PRELOAD anew");
    line_.look.environment[name] = word.substr(equals + 1);
  }

  void unset(const std::string& name) {
    if (name == "LD_PRELOAD") drop("env -u LD_PRELOAD", "removes LD_PRELOAD from the environment");
    line_.look.environment[name] = std::nullopt;
  }

  bool pass_env() {
    for (; at_ < words_.size(); ++at_) {
      const std::string& word = words_[at_];
      if (word == "-i" || word == "-" || word == "--ignore-environment") {
        drop("env " + word, "starts it with an empty environment");
      } else if ((word == "-u" || word == "--unset") && at_ + 1 < words_.size()) {
        unset(words_[++at_]);
      } else if (word.starts_with("--unset=")) {
        unset(word.substr(8));
      } else if (word == "-C" || word == "--chdir") {
        ++at_;
      } else if (word == "-S" || word == "--split-string") {
        return follow_line(at_ + 1 < words_.size() ? words_[at_ + 1] : "");
      } else if (word.starts_with("-S")) {  // of a script's first line, which is one word
        return follow_line(word.substr(2));
      } else if (is_assignment(word)) {
        assign(word);
      } else if (!word.starts_with('-')) {
        return true;
      }
    }
    return false;
  }

  bool pass_wrapper(const Wrapper& wrapper) {
    if (!wrapper.all_known) guessing_ = true;
    for (; at_ < words_.size() && words_[at_].starts_with('-'); ++at_) {
      const std::string& word = words_[at_];
      if (wrapper.name == "srun" &&
          (word == "--export=NONE" || (word == "--export" && at_ + 1 < words_.size() && words_[at_ + 1] == "NONE")))
        drop("srun --export=NONE", "starts it without our environment");
      if (is_one_of(wrapper.with_value, word)) ++at_;
      if (is_one_of(wrapper.with_two, word)) at_ += 2;
    }
    at_ += static_cast<size_t>(wrapper.positional);
    return true;
  }

  bool pass_python() {
    for (; at_ < words_.size() && words_[at_].starts_with('-'); ++at_) {
      const std::string& word = words_[at_];
      if (word == "-m" && at_ + 1 < words_.size()) {
        const std::string module = words_[at_ + 1];
        at_ += 2;
        return (module == "torch.distributed.run" || module == "torch.distributed.launch") && pass_torchrun();
      }
      if (word == "-c" || word.starts_with("--")) return false;
      // Letters in one word, as in -uE.
      if (word.find_first_of("EI") != word.npos && word[1] != 'X' && word[1] != 'W')
        line_.look.ignores_python_variables = true;
      if (word == "-X" || word == "-W") ++at_;
    }
    return false;
  }

  // Its ranks are the same python, unless it is told otherwise.
  bool pass_torchrun() {
    for (size_t i = at_; i < words_.size() && words_[i].starts_with('-'); ++i) {
      if (words_[i] != "--no-python" && words_[i] != "--no_python") {
        if (words_[i].find('=') == std::string::npos &&
            !is_one_of("--standalone --run-path --run_path -m --module", words_[i]))
          ++i;
        continue;
      }
      guessing_ = true;
      for (at_ = i + 1; at_ < words_.size() && words_[at_].starts_with('-'); ++at_) {
        if (words_[at_].find('=') == std::string::npos && words_[at_] != "--standalone") ++at_;
      }
      return at_ < words_.size();
    }
    return false;
  }

  bool enter_shell_line() {
    if (at_ + 1 < words_.size()) return follow_line(words_[at_ + 1]);
    return false;
  }

  // A line that a shell would only split: then its words are the command.
  bool follow_line(const std::string& text) {
    if (text.find_first_of("|&;<>()$`*?\n{}[]~") != text.npos) return line_.look.not_followed = "a shell's line", false;
    Words words;
    try {
      words = split_words(text, "-c");
    } catch (const UsageError&) {
      return line_.look.not_followed = "a shell's line", false;
    }
    words_ = std::move(words);
    at_ = 0;
    for (; at_ < words_.size() && is_assignment(words_[at_]); ++at_) assign(words_[at_]);
    if (at_ < words_.size() && words_[at_] == "exec") ++at_;
    static constexpr std::array<std::string_view, 12> kBuiltins = {"cd",    "export", "source", ".",   "eval",  "set",
                                                                   "unset", "ulimit", "if",     "for", "while", "test"};
    if (at_ < words_.size() && std::find(kBuiltins.begin(), kBuiltins.end(), words_[at_]) != kBuiltins.end())
      return line_.look.not_followed = "a shell's line", false;
    return true;
  }

  Words words_;
  size_t at_ = 0;
  bool guessing_ = false;
  JobLine line_;
};

}  // namespace

JobLine read_job_line(const Words& command) { return Reader(command).read(); }

Words interpreter_words(const std::string& path) {
  const FileSlice file = open_slice(path);
  std::string text = file.text(0, std::min<uint64_t>(file.size_bytes(), 256), "its first line");
  if (!text.starts_with("#!")) return {};
  text = text.substr(2, text.find('\n') - 2);
  // The kernel takes the rest of the line as one argument.
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == text.npos) return {};
  const size_t end = std::min(text.find_first_of(" \t", begin), text.size());
  Words words{text.substr(begin, end - begin)};
  const size_t argument = text.find_first_not_of(" \t", end);
  const size_t last = text.find_last_not_of(" \t\r");
  if (argument != text.npos && last != text.npos && last >= argument)
    words.push_back(text.substr(argument, last - argument + 1));
  return words;
}

}  // namespace forkpoint
