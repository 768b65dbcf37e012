// What `check` hands to people and to CI: text, a JUnit file, a Markdown summary. Pure functions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/terminal.h"
#include "lib/reference.h"

namespace forkpoint {

struct CheckReport {
  std::string reference, run;  // the file, the folder
  double seconds = 0;
  std::optional<ReferenceComparison> comparison;
  // Where there is no comparison: what kept it from being made, or (`updated`) what --update did. One sentence.
  std::string sentence;
  bool updated = false;
  std::vector<std::string> changes;  // that --update made
};

// The answer in one sentence: the first line of the text, the heading of the summary.
std::string check_headline(const CheckReport& report);
std::string check_text(const CheckReport& report, const Style& style);
// One testcase a group of records. A failure: it differs from the reference; an error: it cannot be told whether it
// does; skipped: nothing of it was recorded on either side, or the reference was updated.
std::string check_junit(const CheckReport& report);
std::string check_markdown(const CheckReport& report);

}  // namespace forkpoint
