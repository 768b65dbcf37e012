// forkpoint merge: joins the folders that the nodes of one job wrote.
#include <fmt/format.h>

#include "cli/terminal.h"
#include "cli/verbs.h"
#include "lib/run.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

int merge(const Arguments& arguments) {
  const std::string output = arguments.value("output").value_or("");
  if (output.empty()) throw UsageError("merge: the folder to make is missing.", "Give it with -o OUT.");
  merge_runs(arguments.positional(), output);
  const Run run = Run::open(output);
  print_note(fmt::format("{}: {} from {}, {}", output, counted(run.streams().size(), "rank"),
                         counted(arguments.positional().size(), "folder"), name(run.state())));
  for (const std::string& problem : run.problems()) print_warning(problem);
  return 0;
}

}  // namespace

const Verb& merge_verb() {
  static const Verb verb{.name = "merge",
                         .summary = "join runs of one job that were recorded to a folder a node",
                         .usage = "merge -o OUT RUN...",
                         .about =
                             "Copies the streams of several folders, one a node of the same job, into the new run OUT.\n"
                             "The folders are left alone. They must hold different ranks, and agree in command, world\n"
                             "size and level.",
                         .options = {{"output", 'o', "OUT", "folder to make; never overwritten"}},
                         .examples = {{"forkpoint merge -o runs/good node0/good node1/good", "two nodes"},
                                      {"forkpoint merge -o runs/bad /mnt/*/runs/bad", "as many as there are"}},
                         .min_positional = 1,
                         .max_positional = 1 << 20,
                         .run = merge};
  return verb;
}

}  // namespace forkpoint
