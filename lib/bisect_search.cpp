#include "lib/bisect_search.h"

#include <optional>
#include <set>

namespace forkpoint {
namespace {

// Of the steps strictly between, the nearest to the middle that can still be asked about; nothing: there is none.
std::optional<int64_t> next_question(int64_t same, int64_t differs, const std::set<int64_t>& skipped) {
  const int64_t middle = same + (differs - same) / 2;
  for (int64_t away = 0; middle - away > same || middle + away < differs; ++away) {
    for (const int64_t step : {middle - away, middle + away}) {
      if (step > same && step < differs && !skipped.contains(step)) return step;
    }
  }
  return std::nullopt;
}

}  // namespace

StepSearch search_first_step(int64_t first, int64_t last, int64_t enough,
                             const std::function<StepAnswer(int64_t step, int64_t same)>& judge) {
  StepSearch search;
  search.same = first - 1;
  search.differs = last;
  std::set<int64_t> skipped;
  while (search.differs - search.same > enough) {
    const auto step = next_question(search.same, search.differs, skipped);
    if (!step) break;
    const StepAnswer answer = judge(*step, search.same);
    search.answers.push_back({*step, answer});
    switch (answer) {
      case StepAnswer::same:
        search.same = *step;
        break;
      case StepAnswer::differs:
        search.differs = *step;
        break;
      case StepAnswer::unknown:
        skipped.insert(*step);
        break;
    }
  }
  return search;
}

int most_questions(int64_t steps, int64_t enough) {
  int questions = 0;
  for (; steps > enough; steps = (steps + 1) / 2) ++questions;
  return questions;
}

}  // namespace forkpoint
