#include "cli/show_anomalies.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "lib/anomalies.h"

namespace forkpoint {
namespace {

class Lines {
 public:
  explicit Lines(const Style& style, size_t width) : style_(style), width_(width) {}
  void add(std::string_view label, const std::string& text) {
    const std::string padded = fmt::format("{:<{}}", label == last_ ? "" : label, kIndent - 2);
    out_ += "  " + style_.bold(padded) + wrapped(printable(text), kIndent, width_) + "\n";
    last_ = label;
  }
  const std::string& text() const { return out_; }

 private:
  static constexpr size_t kIndent = 14;
  const Style& style_;
  size_t width_;
  std::string out_;
  std::string_view last_;
};

// The first lines, and those of the last step.
void add_chain(const Anomalies& anomalies, Lines* lines) {
  constexpr size_t kFirst = 7, kLast = 3;
  const auto& chain = anomalies.chain;
  const bool all = chain.size() <= kFirst + kLast + 1;
  for (size_t i = 0; i < chain.size(); ++i) {
    if (!all && i == kFirst)
      lines->add("then", fmt::format("... {} more such lines (see --json)", chain.size() - kFirst - kLast));
    if (all || i < kFirst || i >= chain.size() - kLast) lines->add("then", describe(chain[i]));
  }
}

void add_loss(const Anomalies& anomalies, Lines* lines) {
  if (anomalies.loss) {
    lines->add("loss", describe(*anomalies.loss) +
                           (anomalies.loss_before ? fmt::format("; before: {:.6g}", *anomalies.loss_before) : ""));
  } else {
    lines->add("loss",
               anomalies.loss_recorded ? "no loss became non-finite or left its history" : "no loss was recorded");
  }
}

std::string text_of(const Anomalies& anomalies, const Style& style, size_t width) {
  const std::string first = printable(headline(anomalies));
  std::string out = (anomalies.found()        ? style.red(first)
                     : anomalies.lost.empty() ? style.green(first)
                                              : style.yellow(first)) +
                    "\n\n";
  Lines lines(style, width);
  if (anomalies.nonfinite && anomalies.magnitude) lines.add("also", "first " + describe(*anomalies.magnitude));
  if (anomalies.found()) {
    add_chain(anomalies, &lines);
    add_loss(anomalies, &lines);
  }
  if (anomalies.evaluation) lines.add("evaluation", "first " + describe(*anomalies.evaluation));
  for (const std::string& note : anomalies.notes) lines.add("note", note);
  lines.add("looked at",
            fmt::format("{} tensors in {} steps of {} ranks, {} of them with enough history to judge their magnitude",
                        anomalies.looked_at, anomalies.steps, anomalies.ranks, anomalies.judged));
  for (const std::string& lost : anomalies.lost) lines.add("lost", lost);
  for (const std::string& left_out : anomalies.left_out) lines.add("not seen", left_out);
  lines.add("rule", anomaly_rule());
  return out + lines.text();
}

}  // namespace

int show_anomalies(const Run& run, const RecordFilter& filter, bool json) {
  AnomalyOptions options;
  options.window = {filter.steps.first, filter.steps.last, filter.ranks};
  Progress progress(fmt::format("reading {}:", printable(run.directory())));
  options.progress = [&](uint64_t done, uint64_t total) { progress.update(done, total); };
  const Anomalies anomalies = find_anomalies(run, options);
  progress.clear();
  using Json = nlohmann::ordered_json;
  print_answer(json ? to_json(anomalies).dump(2, ' ', false, Json::error_handler_t::replace) + "\n"
                    : text_of(anomalies, Style(stdout), terminal_width(stdout)));
  flush_answer();
  return exit_code(anomalies);
}

}  // namespace forkpoint
