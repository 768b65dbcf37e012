#include "lib/launch_facts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "lib/cause_facts.h"
#include "lib/error.h"
#include "lib/launch_words.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

std::vector<std::string> names_of(const LaunchStep& step, const HashStreamReader& stream,
                                  const std::vector<uint32_t>& rows) {
  std::vector<std::string> names;
  for (const uint32_t row : rows) {
    if (row < step.size() && is_work(step.row(row).kind))
      names.push_back(short_kernel_name(stream.sites()[step.row(row).site].tensor));
  }
  return names;
}

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kMost = 4;
  if (names.size() <= kMost) return fmt::format("{}", fmt::join(names, ", "));
  return fmt::format("{} and {} more", fmt::join(names.begin(), names.begin() + kMost, ", "), names.size() - kMost);
}

class Gatherer {
 public:
  Gatherer(const OriginInput& input, const LaunchOrigin& origin, const FreeWords& free_words)
      : in_(input),
        origin_(origin),
        node_(origin.node),
        pair_(input.alignment.ranks[origin.pair]),
        join_(input.joins.of(origin.pair)),
        step_(pair_.steps[node_.pair_step]),
        free_words_(free_words) {
    try {
      a_.read(*pair_.a, step_.a);
      b_.read(*pair_.b, step_.b);
    } catch (const Error&) {
      a_ = {}, b_ = {};
      a_.index(), b_.index();
    }
  }

  LaunchFacts run(const Divergence& first) {
    facts_.first = first;
    facts_.end = origin_.end.kind;
    facts_.everyone = first.rank < 0;
    facts_.world_size = std::max(1, in_.run_a.world_size());
    facts_.reached = origin_.reached, facts_.through = origin_.through;
    facts_.index = node_.row_b != kNoRow ? node_.row_b : node_.row_a;
    facts_.run_b = shell_words({in_.run_b.directory()});
    facts_.command = shell_words(in_.run_b.manifest().command);
    const auto& versions = in_.run_b.manifest().versions;
    if (const auto options = versions.find("recorded with"); options != versions.end()) {
      facts_.record_options = options->second + " ";
    }
    facts_.pointing = first.pointing;
    facts_.peer_mapped = (node_.flags & kLaunchPeerMapped) != 0;
    for (const std::string& kernel : origin_.opaque) facts_.opaque.push_back(short_kernel_name(kernel));
    if (node_.form == NodeForm::gap)
      look_at_gap();
    else
      look_at_launch();
    look_at_places();
    look_before();
    look_for_races();
    return std::move(facts_);
  }

 private:
  std::string at(bool in_b, const LaunchRef& ref) const { return launch_text(join_.stream(in_b), ref.step, ref.row); }

  // Where something entered, writers of that buffer count, before the launch that saw it first.
  void look_for_races() {
    const SliceEnd& end = origin_.end;
    if (end.kind == EndKind::from_host) return;
    const bool entered = end.kind == EndKind::entered && end.entry_place < origin_.entry.places.size();
    if (!entered) {
      facts_.races = find_races(join_, pair_, node_.pair_step, node_.row_a, node_.row_b);
      return;
    }
    const DataNode& entry = origin_.entry;
    facts_.races =
        find_races(join_, pair_, entry.pair_step, entry.row_a, entry.row_b, entry.places[end.entry_place].place());
  }

  void look_at_gap() {
    facts_.only_a = names_of(a_, *pair_.a, node_.rows_a);
    facts_.only_b = names_of(b_, *pair_.b, node_.rows_b);
    facts_.replaced = node_.row_a != kNoRow && node_.row_b != kNoRow;
    if (node_.row_a == kNoRow)
      facts_.only_a.clear();  // whatever else run A has there, it left nothing that was followed
    if (node_.row_b == kNoRow) facts_.only_b.clear();
    if (facts_.replaced) {
      facts_.configuration.push_back(
          fmt::format("run A launches {}, run B {}", listed(facts_.only_a), listed(facts_.only_b)));
    } else {
      const bool in_a = node_.row_a != kNoRow;
      const LaunchStep& step = in_a ? a_ : b_;
      auto& names = in_a ? facts_.only_a : facts_.only_b;
      const uint32_t row = in_a ? node_.row_a : node_.row_b;
      names = names_of(step, in_a ? *pair_.a : *pair_.b, {row});
      facts_.repeats = repeats_another(step, row);
      facts_.configuration.push_back(
          fmt::format("only run {} launches {}", in_a ? 'A' : 'B', listed(in_a ? facts_.only_a : facts_.only_b)));
    }
  }

  // Another kernel before it in the step was handed all the buffers that this one was handed, two or more: a library
  // that tries several kernels for one operation, say.
  bool repeats_another(const LaunchStep& step, uint32_t row) const {
    const auto handed = [&](size_t i) {
      std::set<uint64_t> out;
      for (const BufferRow& buffer : step.buffers(i)) out.insert(buffer.allocation);
      return out;
    };
    const std::set<uint64_t> own = handed(row);
    for (size_t i = 0; i < std::min<size_t>(row, step.size()) && own.size() > 1; ++i) {
      const bool other = is_work(step.row(i).kind) && step.row(i).site != step.row(row).site;
      if (!other) continue;
      const std::set<uint64_t> there = handed(i);
      const auto shared = [&](const std::set<uint64_t>& small, const std::set<uint64_t>& large) {
        return small.size() > 1 && std::includes(large.begin(), large.end(), small.begin(), small.end());
      };
      if (shared(own, there) || shared(there, own)) return true;
    }
    return false;
  }

  void look_at_launch() {
    if (node_.row_a >= a_.size() || node_.row_b >= b_.size()) return;
    const LaunchRow &a = a_.row(node_.row_a), &b = b_.row(node_.row_b);
    facts_.moves = is_move(a.kind);
    if (node_.resized) {
      facts_.resized =
          fmt::format("it moves {} in run A and {} in run B", counted(a.bytes, "byte"), counted(b.bytes, "byte"));
    }
    const auto say = [&](const std::string& what, const std::string& in_a, const std::string& in_b) {
      if (in_a != in_b) facts_.configuration.push_back(fmt::format("{}: {} in run A, {} in run B", what, in_a, in_b));
    };
    say("grid", fmt::format("{}", fmt::join(a.grid, " x ")), fmt::format("{}", fmt::join(b.grid, " x ")));
    say("block", fmt::format("{}", fmt::join(a.block, " x ")), fmt::format("{}", fmt::join(b.block, " x ")));
    say("shared memory", fmt::format("{} bytes", a.shared_bytes), fmt::format("{} bytes", b.shared_bytes));
    say("size", fmt::format("{} bytes", a.bytes), fmt::format("{} bytes", b.bytes));
    for (const PlaceFact& place : node_.places) {
      const bool exact =
          place.a.there && place.b.there && ((place.a.buffer.flags | place.b.buffer.flags) & kBufferWindow) == 0;
      if (!exact || place.untouched()) continue;
      say(place_name(place.place()), fmt::format("{} bytes", place.a.buffer.bytes),
          fmt::format("{} bytes", place.b.buffer.bytes));
    }
    facts_.parameters =
        compare_parameters(a, a_.buffers(node_.row_a), b, b_.buffers(node_.row_b), true, [&](uint32_t place) {
          return std::any_of(node_.places.begin(), node_.places.end(), [&](const PlaceFact& known) {
            return known.place() == place && origin_.pointer_places.count(place) != 0;
          });
        });
    const std::string& kernel = join_.names.name(node_.kernel);
    facts_.parameters_free = free_words_.explain(kernel, facts_.parameters);
    facts_.parameters_free_launches = free_words_.seen(kernel);
    look_at_numbers();
    facts_.retry_a = retries(a_, node_.row_a, b_, node_.row_b);
    facts_.retry_b = retries(b_, node_.row_b, a_, node_.row_a);
  }

  // Of several launches of one kernel, which one is more in the other run cannot always be told.
  void look_at_numbers() {
    const auto count = [&](bool in_b, const LaunchStep& step) {
      uint64_t number = 0;
      for (size_t i = 0; i < step.size(); ++i)
        number += is_work(step.row(i).kind) && join_.kernel(in_b, step.row(i)) == node_.kernel ? 1 : 0;
      return number;
    };
    const uint64_t in_a = count(false, a_), in_b = count(true, b_);
    if (in_a == in_b) return;
    facts_.uneven = fmt::format(
        "this step has {} of {} in run A and {} in run B: one that only one run has may have been taken for "
        "its neighbour",
        counted(in_a, "launch"), short_kernel_name(join_.names.name(node_.kernel)), in_b);
  }

  // Digests of the named output: in the repetitions of a row, in the row, and in the other run.
  RetryFacts retries(const LaunchStep& step, uint32_t row, const LaunchStep& other, uint32_t other_row) const {
    RetryFacts out;
    const PlaceFact* named = named_place(origin_);
    if (named == nullptr) return out;
    const auto result = [&](const LaunchStep& of, size_t i) -> std::optional<Digest> {
      for (const BufferRow& buffer : of.buffers(i)) {
        if (buffer.place == named->place() && !is_before(buffer) && has_digest(buffer)) return buffer.digest;
      }
      return {};
    };
    std::set<std::pair<uint64_t, uint64_t>> outputs;
    for (size_t i = 0; i < step.size(); ++i) {
      if (step.row(i).kind != LaunchKind::retry || step.row(i).retry_of != row) continue;
      const auto digest = result(step, i);
      if (!digest) continue;
      ++out.runs;
      outputs.insert({digest->a, digest->b});
      out.own_output |= result(step, row) == digest;
      out.other_output |= result(other, other_row) == digest;
    }
    out.outputs = outputs.size();
    return out;
  }

  void look_at_places() {
    const PlaceFact* named = named_place(origin_);
    bool all_hashed = true, any_input = false;
    for (size_t k = 0; k < node_.places.size(); ++k) {
      const PlaceFact& place = node_.places[k];
      const std::string name = place_name(place.place());
      if (((place.a.buffer.flags | place.b.buffer.flags) & kBufferWindow) != 0) facts_.windows.push_back(name);
      if (node_.form == NodeForm::gap || place.overwritten || !place.a.there || !place.b.there) continue;
      if (node_.resized && place.a.buffer.bytes != place.b.buffer.bytes) continue;
      if (((place.a.buffer.flags | place.b.buffer.flags) & kBufferAddresses) != 0) continue;
      const bool hashed = place.a.hashed && place.b.hashed;
      const bool scratch = std::count(origin_.end.not_followed.begin(), origin_.end.not_followed.end(), k) != 0;
      if (scratch)
        say_not_followed(place);
      else if (place.before_differs())
        say_differs(k);
      else if (place.before_known())
        facts_.inputs.push_back(name);
      else if (!place.fresh())
        facts_.unknown_inputs.push_back(name);
      all_hashed &= hashed || (place.fresh() && &place == named);
      any_input |= !place.fresh();
    }
    facts_.inputs_hashed = all_hashed && any_input && node_.form == NodeForm::launch;
    if (named == nullptr) return;
    facts_.fresh_output =
        node_.form == NodeForm::launch && named->fresh() && !named->overwritten && named->differing_output();
    facts_.first_seen =
        node_.form == NodeForm::launch && !named->before_known() && !named->fresh() && !named->overwritten;
    if (node_.form == NodeForm::launch && node_.row_a < a_.size()) {
      const LaunchRow& row = a_.row(node_.row_a);
      facts_.beyond_write = is_move(row.kind) && named->place() == kPlaceTarget && named->a.buffer.bytes > row.bytes;
    }
  }

  void say_not_followed(const PlaceFact& place) {
    facts_.not_followed.push_back(fmt::format(
        "its {} differs before it as well{}: scratch, since other launches that it was handed to gave equal results "
        "all the same",
        place_name(place.place()), place.a.writer.known() ? ", last written by " + at(false, place.a.writer) : ""));
  }

  // Something else stands in a buffer before the launch, and no launch before it explains that.
  void say_differs(size_t index) {
    const PlaceFact& place = node_.places[index];
    const std::string name = place_name(place.place());
    const SliceEnd& end = origin_.end;
    if (end.entered_place == index && end.entry_node != end.node && end.entry_place < origin_.entry.places.size()) {
      const PlaceFact& first = origin_.entry.places[end.entry_place];
      if (first.unobserved())
        return say_unobserved(first, name, at(true, {step_of(origin_.entry).b, origin_.entry.row_b}));
    }
    if ((place.a.unwritten || place.b.unwritten) && !place.fresh() && origin_.end.entered_place == index &&
        !place.unobserved()) {
      facts_.uninitialized.push_back(
          fmt::format("what launches have written to the {} since it was allocated agrees, but they have not "
                      "written all of it: it differs in bytes that nobody wrote",
                      name));
      return;
    }
    if (place.fresh()) {
      if (place.a.hashed && place.b.hashed && place.untouched() && !place.reads_only) {
        facts_.uninitialized.push_back(
            fmt::format("the {} is memory that nothing recorded has written since it was allocated; it holds "
                        "something else in each run, and the launch leaves it as it is: it only reads it",
                        name));
      }
      return;
    }
    if (place.unobserved()) return say_unobserved(place, name, "it");
    if (!place.a.writer.known() || !place.b.writer.known()) {
      facts_.entered.push_back(
          fmt::format("the {} differs before it, though no recorded launch was handed it before", name));
      return;
    }
    const bool outside_a = is_outside(false, place.a.writer), outside_b = is_outside(true, place.b.writer);
    (outside_a || outside_b ? facts_.differed_before : facts_.other_data) = true;
    facts_.entered.push_back(
        fmt::format("the {} differs before it: in run A {} had left it{}, in run B {}{}", name,
                    at(false, place.a.writer), outside_a ? ", before the steps that are compared" : "",
                    at(true, place.b.writer), outside_b ? ", before the steps that are compared" : ""));
  }

  void say_unobserved(const PlaceFact& place, const std::string& name, const std::string& before_what) {
    for (const bool in_b : {false, true}) {
      const PlaceSide& side = place.side(in_b);
      if (!side.unobserved) continue;
      facts_.entered.push_back(fmt::format(
          "in run {} the {} holds something else right before {} than {} had left there: something wrote in "
          "between and was not observed",
          in_b ? 'B' : 'A', name, before_what, at(in_b, side.writer)));
    }
  }

  const StepPair& step_of(const DataNode& node) const { return pair_.steps[node.pair_step]; }

  bool is_outside(bool in_b, const LaunchRef& writer) const {
    return std::none_of(pair_.steps.begin(), pair_.steps.end(),
                        [&](const StepPair& step) { return (in_b ? step.b : step.a) == writer.step; });
  }

  void look_before() {
    const uint32_t limit = node_.row_b != kNoRow ? node_.row_b : 0;
    for (uint32_t i = 0; i < std::min<size_t>(limit, b_.size()); ++i) {
      const LaunchRow& row = b_.row(i);
      const bool works = row.kind == LaunchKind::kernel || row.kind == LaunchKind::graph;
      facts_.unread_before += works && (row.flags & kLaunchParamsUnread) != 0 ? 1 : 0;
    }
  }

  const OriginInput& in_;
  const LaunchOrigin& origin_;
  const DataNode& node_;
  const RankPair& pair_;
  const LaunchJoin join_;
  const StepPair& step_;
  const FreeWords& free_words_;
  LaunchStep a_, b_;
  LaunchFacts facts_;
};

}  // namespace

LaunchFacts gather_launch_facts(const OriginInput& input, const LaunchOrigin& origin, const FreeWords& free_words,
                                const Divergence& first) {
  return Gatherer(input, origin, free_words).run(first);
}

}  // namespace forkpoint
