#include "lib/diff_notes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "lib/cause_facts.h"
#include "lib/run_knobs.h"
#include "lib/stream_facts.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using Facts = std::map<std::string, std::string>;

void compare_facts(const Facts& a, const Facts& b, const std::string& what, std::vector<std::string>* out) {
  std::set<std::string> names;
  for (const auto& [name, value] : a) names.insert(name);
  for (const auto& [name, value] : b) names.insert(name);
  for (const std::string& name : names) {
    const auto in_a = a.find(name), in_b = b.find(name);
    const std::string left = in_a == a.end() ? "(not set)" : in_a->second,
                      right = in_b == b.end() ? "(not set)" : in_b->second;
    if (left != right) out->push_back(fmt::format("{}{}: {} in run A, {} in run B", what, name, left, right));
  }
}

// Of one run a rank's variables, of the other those that its launcher was given: what only the rank has, a launcher may
// have set in both.
void compare_environments(const Run& a, const Run& b, std::vector<std::string>* out) {
  Facts left = a.manifest().environment, right = b.manifest().environment;
  const auto drop_unknown = [](Facts* of_rank, const Facts& of_launcher) {
    std::erase_if(*of_rank, [&](const auto& variable) { return !of_launcher.contains(variable.first); });
  };
  if (is_attached(a.manifest()) && !is_attached(b.manifest())) drop_unknown(&left, right);
  if (is_attached(b.manifest()) && !is_attached(a.manifest())) drop_unknown(&right, left);
  compare_facts(left, right, "", out);
}

bool is_coordinate(const std::string& fact) {
  if (fact == kFirstBegunFact) return true;  // of its own run
  return (fact.size() > 5 && (fact.ends_with("_rank") || fact.ends_with("_size"))) || fact.starts_with("process group ");
}

// But for what forkpoint was told and did: variables and knobs say that themselves.
Facts versions_of(const Run& run) {
  Facts versions = run.manifest().versions;
  versions.erase("recorded with");
  versions.erase("set by forkpoint");
  return versions;
}

std::string list_text(const std::vector<std::string>& list) {
  std::map<std::string, int> counts;
  for (const std::string& entry : list) ++counts[entry];
  std::string text;
  for (const auto& [entry, count] : counts) {
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", count > 1 ? fmt::format("{} x ", count) : "", entry);
  }
  return text.empty() ? "none" : text;
}

struct StructureKey {
  OneSided::Side side;
  std::string phase, layer, op, tensor;
  std::string form_a, form_b;  // where the form differs
  auto operator<=>(const StructureKey&) const = default;
};
struct StructureEntry {
  int64_t first_step = 0;
  uint64_t records = 0;
  std::set<int> ranks;
  size_t order = 0;
};

std::vector<std::string> sentences_of(const std::map<StructureKey, StructureEntry>& entries, int world_size) {
  constexpr size_t kMost = 20;
  std::vector<std::pair<const StructureKey*, const StructureEntry*>> sorted;
  for (const auto& [key, entry] : entries) sorted.push_back({&key, &entry});
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& left, const auto& right) { return left.second->order < right.second->order; });
  std::vector<std::string> sentences;
  for (const auto& [key, entry] : sorted) {
    if (sentences.size() == kMost) {
      sentences.push_back(fmt::format("and {} more kinds of records in one run only", sorted.size() - kMost));
      break;
    }
    const std::vector<int> ranks(entry->ranks.begin(), entry->ranks.end());
    const std::string place = place_text(key->phase, key->layer, key->op, key->tensor);
    std::string what = fmt::format("run {} only: {}", key->side == OneSided::only_a ? 'A' : 'B', place);
    if (!key->form_a.empty()) {
      what = fmt::format("{} {} {} in run A and {} in run B", place,
                         key->side == OneSided::relabelled ? "holds the same bytes as" : "is a message of", key->form_a,
                         key->form_b);
    }
    sentences.push_back(fmt::format(
        "structure: {} ({}, from {}{})", what, counted(entry->records, "record"),
        entry->first_step == kPrologueStep ? "before the first step" : fmt::format("step {}", entry->first_step),
        static_cast<int>(ranks.size()) == world_size ? "" : ", " + rank_list(ranks)));
  }
  return sentences;
}

std::string layouts_text(const HashStreamReader& stream, const std::vector<uint32_t>& layouts) {
  constexpr size_t kMost = 4;
  std::vector<std::string> texts;
  for (size_t i = 0; i < std::min(kMost, layouts.size()); ++i) texts.push_back(to_string(stream.layouts()[layouts[i]]));
  if (layouts.size() > kMost) texts.push_back(fmt::format("{} more", layouts.size() - kMost));
  return fmt::format("{}", fmt::join(texts, ", "));
}

}  // namespace

bool is_attached(const Manifest& manifest) {
  return std::any_of(manifest.notes.begin(), manifest.notes.end(),
                     [](const std::string& note) { return note.starts_with(kAttachedNote); });
}

std::vector<std::string> environment_differences(const Run& a, const Run& b) {
  std::vector<std::string> out;
  compare_environments(a, b, &out);
  compare_facts(versions_of(a), versions_of(b), "version of ", &out);
  const auto knobs = [](const Run& run) {
    const std::string names = knobs_in_force(run.manifest());
    return names.empty() ? std::string("none") : names;
  };
  if (knobs(a) != knobs(b)) out.push_back(fmt::format("knobs of deterministic mode: {} in run A, {} in run B", knobs(a), knobs(b)));
  const std::string gpus_a = list_text(a.manifest().gpus), gpus_b = list_text(b.manifest().gpus);
  if (gpus_a != gpus_b) out.push_back(fmt::format("GPUs: {} in run A, {} in run B", gpus_a, gpus_b));
  std::map<std::string, std::set<int>> by_text;  // the same on many ranks is said once
  for (const auto& stream : a.streams()) {
    const HashStreamReader* other = b.stream_of(stream->header().rank);
    if (other == nullptr) continue;
    Facts left, right;
    for (const auto& [name, value] : stream->header().facts) if (!is_coordinate(name)) left[name] = value;
    for (const auto& [name, value] : other->header().facts) if (!is_coordinate(name)) right[name] = value;
    left["device"] = stream->header().device, right["device"] = other->header().device;
    std::vector<std::string> texts;
    compare_facts(left, right, "", &texts);
    for (const std::string& text : texts) by_text[text].insert(stream->header().rank);
  }
  for (const auto& [text, ranks] : by_text) {
    const std::vector<int> list(ranks.begin(), ranks.end());
    out.push_back(static_cast<int>(list.size()) == a.world_size() ? text
                                                                  : fmt::format("{} ({})", text, rank_list(list)));
  }
  return out;
}

std::vector<std::string> manifest_notes(const Run& a, const Run& b) {
  std::vector<std::string> notes;
  if (a.manifest().command != b.manifest().command) {
    notes.push_back(fmt::format("the commands differ: `{}` in run A, `{}` in run B", shell_words(a.manifest().command),
                                shell_words(b.manifest().command)));
  }
  for (const auto& [run, which] : {std::pair(&a, 'A'), std::pair(&b, 'B')}) {
    if (run->manifest().exit_status > 0)
      notes.push_back(fmt::format("the command of run {} exited with status {}", which, run->manifest().exit_status));
    for (const std::string& note : run->manifest().notes) notes.push_back(fmt::format("run {}: {}", which, note));
  }
  return notes;
}

std::string until_failure(const Run& a, const Run& b) {
  const int in_a = a.manifest().exit_status, in_b = b.manifest().exit_status;
  if (in_a > 0 && in_a == in_b) return fmt::format("up to where both commands failed (exit status {})", in_a);
  if (in_a > 0 && in_b > 0) {
    return fmt::format("up to where both commands failed (exit status {} in run A, {} in run B)", in_a, in_b);
  }
  if (in_a <= 0 && in_b <= 0) return {};
  return fmt::format("up to where the command of run {} failed (exit status {})", in_a > 0 ? 'A' : 'B', std::max(in_a, in_b));
}

StructureNotes structure_notes(const Scan& scan, const Alignment& alignment, Joins* joins) {
  StructureNotes out;
  std::map<StructureKey, StructureEntry> training, evaluation;
  for (size_t i = 0; i < scan.one_sided.size(); ++i) {
    const OneSided& entry = scan.one_sided[i];
    const Site& site = joins->of(entry.pair).site(entry.site);
    auto& entries = entry.eval ? evaluation : training;
    if (!entry.eval && out.first == nullptr) out.first = &entry;
    StructureKey key{entry.side, std::string(name(site.phase)), site.layer, site.op, site.tensor, {}, {}};
    if (entry.has_forms()) {
      key.form_a = to_string(alignment.ranks[entry.pair].a->layouts()[entry.layout_a]);
      key.form_b = to_string(alignment.ranks[entry.pair].b->layouts()[entry.layout_b]);
    }
    const auto [at, fresh] = entries.try_emplace(key, StructureEntry{entry.first_step, 0, {}, i});
    at->second.first_step = std::min(at->second.first_step, entry.first_step);
    at->second.records += entry.records;
    at->second.ranks.insert(alignment.ranks[entry.pair].rank);
  }
  const int world = static_cast<int>(alignment.ranks.size());
  out.sentences = sentences_of(training, world);
  if (!evaluation.empty()) {
    uint64_t records[4] = {0, 0, 0, 0};
    for (const auto& [key, entry] : evaluation) records[key.side] += entry.records;
    out.evaluation.push_back(
        fmt::format("the runs do not evaluate alike: {} of evaluation in run A only, {} in run B only",
                    counted(records[0], "record"), records[1]));
  }
  return out;
}

SetUpNotes set_up_notes(const Scan& scan, const Alignment& alignment, Joins* joins) {
  SetUpRecords all;
  std::map<std::string, std::pair<uint64_t, std::vector<int>>> unsure;  // by one of its calls
  for (size_t p = 0; p < scan.steps.size(); ++p) {
    for (const StepCounts& counts : scan.steps[p]) {
      all.ahead += counts.set_up.ahead;
      all.used_map += counts.set_up.used_map;
      if (counts.set_up.unsure == 0) continue;
      const Site& site = joins->of(p).site(counts.set_up.unsure_site);
      auto& [records, ranks] = unsure[fmt::format("{}: {}", site.op, site.tensor)];
      records += counts.set_up.unsure;
      ranks.push_back(alignment.ranks[p].rank);
    }
  }
  SetUpNotes out;
  if (all.ahead > 0) {
    out.sentences.push_back(
        fmt::format("{} of collectives that one run alone called ahead of step {} were compared with nothing: only one "
                    "of them set itself up there, or came from the step before",
                    counted(all.ahead, "record"), alignment.begin));
  }
  if (all.used_map > 0) {
    out.sentences.push_back(fmt::format(
        "{} of all-reduces of int32, 0 or 1 on each rank, that one run alone called in step {}, in which it "
        "begins, were compared with nothing: so does DistributedDataParallel with a static graph tell the "
        "ranks which parameters are used",
        counted(all.used_map, "record"), alignment.begin));
  }
  for (const auto& [name, found] : unsure) {
    out.unsure.push_back(
        fmt::format("{} of collectives called ahead of step {}, in which one run begins, hold other values in each run "
                    "(first {}, {}): they may be other calls, such as those that set a job up, or the same ones with "
                    "another result",
                    counted(found.first, "record"), alignment.begin, name, rank_list(found.second)));
  }
  return out;
}

RelaidNotes relaid_notes(const Scan& scan, const Alignment& alignment, Joins* joins) {
  constexpr size_t kMost = 8;
  struct Entry {
    std::string place;
    std::set<int> ranks, not_shown;
  };
  std::map<std::pair<int64_t, std::string>, Entry> entries;  // the same on many ranks is said once
  RelaidNotes out;
  uint64_t collectives = 0;
  for (const RelaidCalls& calls : scan.relaid) {
    if (!calls.inputs_same || !calls.outputs_same) continue;
    const RankPair& pair = alignment.ranks[calls.pair];
    const Site& site = joins->of(calls.pair).site(calls.site);
    const size_t count = std::max(calls.layouts_a.size(), calls.layouts_b.size());
    const std::string left = layouts_text(*pair.a, calls.layouts_a), right = layouts_text(*pair.b, calls.layouts_b);
    const std::string text =
        fmt::format("{} of step {} {} the same elements in another {}: {} of {}", counted(count, "collective"),
                    calls.step, count == 1 ? "carries" : "carry", left == right ? "order" : "layout",
                    site.layer.empty() ? site.op : fmt::format("{} in {}", site.op, site.layer),
                    left == right ? left : fmt::format("{} in run A and of {} in run B", left, right));
    Entry& entry = entries[{calls.step, text}];
    entry.place = fmt::format("{} of step {}", site.op, calls.step);
    entry.ranks.insert(pair.rank);
    if (!calls.witnessed) entry.not_shown.insert(pair.rank);
    collectives += count;
  }
  for (const auto& [key, entry] : entries) {
    const std::vector<int> ranks(entry.ranks.begin(), entry.ranks.end()),
        not_shown(entry.not_shown.begin(), entry.not_shown.end());
    const bool all = ranks.size() == alignment.ranks.size();
    if (out.sentences.size() < kMost) out.sentences.push_back(all ? key.second : fmt::format("{} ({})", key.second, rank_list(ranks)));
    if (not_shown.empty()) continue;
    out.not_shown.push_back(
        fmt::format("{} is laid out in another way in each run; the sums of its elements agree, but too few gradients "
                    "were recorded behind it to show that the same came out ({})",
                    entry.place, rank_list(not_shown)));
  }
  if (entries.size() > kMost) out.sentences.push_back(fmt::format("and so do those of {} more places", entries.size() - kMost));
  if (collectives > 0) {
    out.limit = fmt::format("the bits of {} that {} laid out in another way in each run: the sums of their elements were compared",
                            counted(collectives, "collective"), collectives == 1 ? "is" : "are");
  }
  return out;
}

}  // namespace forkpoint
