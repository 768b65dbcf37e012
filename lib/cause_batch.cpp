// Where a batch that differs occurs in the other run.
#include <fmt/format.h>

#include "lib/cause_facts.h"
#include "lib/error.h"
#include "lib/verdict_text.h"

namespace forkpoint {

std::string find_batch(const OriginInput& input, const Origin& origin, bool* searched) {
  constexpr uint64_t kMostRecords = 40'000'000;  // a few seconds
  const StreamJoin& own = input.joins.of(origin.pair);
  const Site& site = own.site(origin.difference.site);
  const uint64_t layout = layout_key(own.b().layouts()[origin.difference.layout_b]);
  uint64_t read = 0;
  *searched = true;
  StepColumns columns;
  std::vector<const HashStreamReader*> streams = {input.alignment.ranks[origin.pair].a};
  for (const RankPair& pair : input.alignment.ranks) {
    if (pair.a != streams[0]) streams.push_back(pair.a);
  }
  for (const HashStreamReader* stream : streams) {
    for (size_t s = 0; s < stream->steps().size(); ++s) {
      read += stream->steps()[s].records;
      if (read > kMostRecords) return *searched = false, std::string();
      try {
        stream->read_step(s, &columns);
      } catch (const Error&) {
        *searched = false;
        continue;
      }
      for (size_t row = 0; row < columns.size(); ++row) {
        const Site& other = stream->sites()[columns.site[row]];
        if (!(columns.digest[row] == origin.difference.digest_b) || other.role != Role::batch ||
            other.tensor != site.tensor || stream->layout_keys()[columns.layout[row]] != layout) {
          continue;
        }
        const int64_t step = stream->steps()[s].step, distance = origin.step - step;
        std::string text = fmt::format("is run A's batch of step {}, micro-step {}, rank {}", step,
                                       columns.micro_step[row], stream->header().rank);
        if (distance != 0)
          text += fmt::format(" ({} {})", counted(static_cast<uint64_t>(std::abs(distance)), "step"),
                              distance > 0 ? "before" : "after");
        if (step > 0 && distance > 0 && origin.step % step == 0)
          text += fmt::format(": step {} / {}", origin.step, origin.step / step);
        return text;
      }
    }
  }
  return {};
}

}  // namespace forkpoint
