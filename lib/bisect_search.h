// The first step at which two trajectories differ, by halves, asking as seldom as possible. Pure; any thread.
//
// What is asked of a step is whether the state *after* it is the same. That is monotone where a difference does not
// heal: once it is in the weights it stays. A difference that heals is only found in the steps that were asked about;
// so a caller must confirm what comes out here, and never conclude from a search alone that nothing differs.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace forkpoint {

enum class StepAnswer {
  same,  // nothing differs after the step
  differs,
  unknown,  // it cannot be said of this step (git bisect's skip)
};

struct SearchedStep {
  int64_t step = 0;
  StepAnswer answer = StepAnswer::unknown;
};

struct StepSearch {
  int64_t same = 0;                   // nothing differs after it; first - 1 where nothing was found to be the same
  int64_t differs = 0;                // something differs after it; the steps between the two are not decided
  std::vector<SearchedStep> answers;  // in the order of asking
};

// Of the steps first..last, `last` is known to differ, and is not asked about. judge(step, same): what is so of `step`;
// up to `same` all is known to be the same (at first: before the range). Ends when `differs` is at most `enough` steps
// behind `same`, or only steps lie between them that could not be told. REQUIRES: first <= last, enough >= 1.
StepSearch search_first_step(int64_t first, int64_t last, int64_t enough,
                             const std::function<StepAnswer(int64_t step, int64_t same)>& judge);

// How often it asks at most, where every question is answered: ceil(log2(steps / enough)). REQUIRES: steps > 0.
int most_questions(int64_t steps, int64_t enough);

}  // namespace forkpoint
