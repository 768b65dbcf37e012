// How a verdict names the launch at which two runs part.
#include <fmt/format.h>

#include <algorithm>

#include "lib/error.h"
#include "lib/launch_facts.h"
#include "lib/launch_words.h"

namespace forkpoint {
namespace {

std::string hex(const Digest& digest) { return fmt::format("{:016x}{:016x}", digest.a, digest.b); }

// What the buffers hold after it in each run; of a gap, what was launched.
void describe_results(const LaunchOrigin& origin, const PlaceFact* place, Divergence* out) {
  if (origin.node.form == NodeForm::gap) {
    out->before = origin.kernel_a.empty() ? "no such launch" : short_kernel_name(origin.kernel_a);
    out->after = origin.kernel_b.empty() ? "no such launch" : short_kernel_name(origin.kernel_b);
    return;
  }
  if (place == nullptr || !place->a.there || !place->b.there) return;
  out->before = hex(place->a.buffer.digest);
  out->after = hex(place->b.buffer.digest);
  constexpr uint64_t kMostWords = 1ull << 30;
  const uint64_t words = (place->a.buffer.bytes + 3) / 4;
  WordChange change;
  if (place->a.buffer.bytes != place->b.buffer.bytes || words > kMostWords ||
      !find_single_word_change(place->a.buffer.digest, place->b.buffer.digest, words, &change)) {
    return;
  }
  out->pointing.emplace();
  out->pointing->word = change.word;
  out->pointing->delta = change.delta;
  const uint64_t size = static_cast<uint64_t>(change.delta < 0 ? -change.delta : change.delta);
  if ((size & (size - 1)) == 0) {
    for (out->pointing->bit = 0; (size >> out->pointing->bit) > 1;) ++out->pointing->bit;
  }
}

}  // namespace

const PlaceFact* named_place(const LaunchOrigin& origin) {
  const auto& places = origin.node.places;
  if (origin.node.form == NodeForm::gap) {  // of the launch that is named
    const bool in_b = origin.node.row_b != kNoRow;
    const std::pair<bool, uint32_t> named{in_b, in_b ? origin.node.row_b : origin.node.row_a};
    for (size_t k = 0; k < places.size(); ++k) {
      if (origin.node.place_rows[k] == named && !places[k].reads_only && places[k].side(in_b).changed != Changed::no)
        return &places[k];
    }
  }
  if (origin.end.place < places.size()) return &places[origin.end.place];
  for (const PlaceFact& place : places) {
    if (place.differing_output()) return &place;
  }
  return places.empty() ? nullptr : &places.back();
}

Divergence to_divergence(const OriginInput& input, const LaunchOrigin& origin, int rank, const Site* record) {
  const RankPair& pair = input.alignment.ranks[origin.pair];
  const StepPair& step = pair.steps[origin.node.pair_step];
  // Run B's launch where there is one: run A is the reference.
  const bool from_b = origin.node.row_b != kNoRow && origin.node.form == NodeForm::gap;
  const HashStreamReader& stream = from_b ? *pair.b : *pair.a;
  Divergence out;
  out.kind = Kind::launch;
  out.rank = rank;
  out.in_prologue = step.step == kPrologueStep;
  out.step = std::max<int64_t>(out.in_prologue ? input.alignment.begin : step.step, 0);
  const std::string& kernel = from_b || origin.kernel_a.empty() ? origin.kernel_b : origin.kernel_a;
  out.kernel = demangled(kernel), out.short_kernel = short_kernel_name(kernel);
  LaunchColumns launches;
  try {
    stream.read_launches(from_b ? step.b : step.a, &launches);
    const LaunchRow& row = launches.rows.at(from_b ? origin.node.row_b : origin.node.row_a);
    const Site& site = stream.sites()[row.site];
    out.micro_step = std::max(0, row.micro_step);
    out.phase = site.phase, out.layer = site.layer, out.op = site.op;
  } catch (const std::exception&) {  // it could be read a moment ago: the file is being changed under us
  }
  if (record != nullptr && out.layer.empty() && out.op.empty())
    out.phase = record->phase, out.layer = record->layer, out.op = record->op;
  if (out.in_prologue && input.alignment.begin >= 0) out.phase = Phase::load;
  const PlaceFact* place = named_place(origin);
  if (place != nullptr) out.tensor = place_name(place->place());
  describe_results(origin, place, &out);
  return out;
}

}  // namespace forkpoint
