// A verdict for people: as text, and as one self-contained HTML page.
#pragma once

#include <string>
#include <vector>

#include "cli/terminal.h"
#include "lib/run.h"
#include "lib/verdict.h"

namespace forkpoint {

// Ends with a newline. The first line is headline(verdict). Lines are wrapped at `width` columns; 0: not at all.
std::string text_report(const Verdict& verdict, const Style& style, size_t width);

// Needs Verdict::map. Reads the records around the fork and the losses from the runs; what cannot be read is left out
// and said. No network, no other file: everything is in the string.
std::string html_report(const Run& a, const Run& b, const Verdict& verdict);

// Sentences and phrases that both reports use.
std::string describe(const Pointing& pointing);  // "word 17, element [0, 17], changed by +64 (+2^6): ..."
std::string describe(const Coverage& coverage);  // "12,800 records on 4 ranks, 20 steps, 1.2 GiB hashed, level layer"
std::string remaining_reason(const Verdict& verdict);  // what the reason says beyond the headline; may be empty
std::vector<std::string> remaining_notes(const Verdict& verdict);  // what evidence and gaps do not say already
// "rng_state" and "", "nondeterministic_op" and "not excluded: a, b", "not decided" and "a or b".
std::pair<std::string, std::string> cause_parts(const Verdict& verdict);
std::string ranks_phrase(const Verdict& verdict);  // "2 of 4 differ: ranks 0, 3"

}  // namespace forkpoint
