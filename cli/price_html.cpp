// What forkpoint price found, as one page without a script: a plot of the step times, and the table.
#include <fmt/format.h>

#include <algorithm>

#include "cli/price.h"
#include "cli/report_page.h"
#include "cli/terminal.h"
#include "lib/cause_facts.h"

namespace forkpoint {
namespace {

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : printable(text)) {
    if (c == '&') out += "&amp;";
    else if (c == '<') out += "&lt;";
    else if (c == '>') out += "&gt;";
    else if (c == '"') out += "&quot;";
    else out += c;
  }
  return out;
}

std::vector<const PriceArm*> shown_arms(const PriceResult& result) {
  std::vector<const PriceArm*> arms;
  for (const PriceArm& arm : result.arms) arms.push_back(&arm);
  if (result.cheapest) arms.push_back(&*result.cheapest);
  return arms;
}

std::string title_of(const PriceArm& arm) {
  if (arm.kind == PriceArm::Kind::full) return fmt::format("all {} knobs", arm.knobs.size());
  return arm.kind == PriceArm::Kind::cheapest ? "cheapest: " + knob_names(arm.knobs) : arm.name;
}

// One bar an arm from zero to the median, a line from the lowest run to the highest; a rule at the fast arm's median.
std::string plot(const PriceResult& result) {
  constexpr double kLeft = 240, kWidth = 620, kRow = 26, kTop = 8, kRight = 190;
  const std::vector<const PriceArm*> arms = shown_arms(result);
  double most = 0;
  for (const PriceArm* arm : arms) most = std::max(most, arm->time() ? arm->time()->high_ms : 0);
  if (most == 0) return "";
  const auto x = [&](double ms) { return kLeft + kWidth * ms / most; };
  const double height = kTop * 2 + kRow * static_cast<double>(arms.size());
  std::string svg = fmt::format(
      "<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"time of a step by arm\" "
      "style=\"width:100%;height:auto;font-size:13px;fill:currentColor\">\n",
      kLeft + kWidth + kRight, height);
  for (size_t i = 0; i < arms.size(); ++i) {
    const PriceArm& arm = *arms[i];
    const double y = kTop + kRow * static_cast<double>(i), middle = y + kRow / 2;
    const std::string title = title_of(arm);
    const std::string shortened = title.size() > 34 ? title.substr(0, 31) + "..." : title;
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", kLeft - 10, middle + 4, escaped(shortened));
    const auto time = arm.time();
    if (!time) {
      svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">did not run</text>\n", kLeft + 4, middle + 4);
      continue;
    }
    svg += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" style=\"fill:var(--{})\"><title>{}</title></rect>\n", kLeft,
        y + 5, x(time->median_ms) - kLeft, kRow - 10, arm.repeats() ? "optimizer" : "propagated", escaped(knob_names(arm.knobs)));
    svg += fmt::format("<path d=\"M{:.1f} {:.1f}H{:.1f}\" style=\"stroke:var(--mark);stroke-width:2\"/>\n", x(time->low_ms), middle,
                       std::max(x(time->high_ms), x(time->low_ms) + 1));
    const auto ratio = measured_ratio(arm, result.fast());
    const std::string cost = arm.kind == PriceArm::Kind::fast ? "" : ratio ? fmt::format(", {:.2f}x", *ratio) : ", no difference";
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{:.3f} ms{}</text>\n", x(time->high_ms) + 8, middle + 4, time->median_ms, cost);
  }
  const double rule = x(result.fast().time()->median_ms);
  svg += fmt::format("<path d=\"M{:.1f} {:.1f}V{:.1f}\" style=\"stroke:var(--a);stroke-dasharray:4 3\"/>\n", rule, kTop, height - kTop);
  return svg + "</svg>\n";
}

std::string repeats_cell(const PriceArm& arm) {
  if (!arm.failure.empty()) return "did not run: " + escaped(arm.failure);
  if (!arm.difference.empty()) return (arm.incomparable ? "cannot tell: " : "no: ") + escaped(arm.difference);
  return arm.repeats() ? fmt::format("yes, {} runs", arm.runs.size()) : "one run only";
}

std::string table(const PriceResult& result) {
  std::string rows;
  std::vector<const PriceArm*> arms = shown_arms(result);
  for (const PriceArm& arm : result.candidates) arms.push_back(&arm);
  for (const PriceArm* arm : arms) {
    const auto time = arm->time();
    const auto ratio = measured_ratio(*arm, result.fast());
    rows += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n", escaped(title_of(*arm)),
                        escaped(arm->knobs.empty() ? "none" : knob_names(arm->knobs)),
                        time ? fmt::format("{:.3f} [{:.3f}, {:.3f}]", time->median_ms, time->low_ms, time->high_ms) : "",
                        arm->kind == PriceArm::Kind::fast ? "" : ratio ? fmt::format("{:.2f}x", *ratio) : cost_words(*arm, result.fast()),
                        repeats_cell(*arm));
  }
  return "<div class=\"scroll\"><table class=\"records\"><tr><th>arm</th><th>knobs</th><th>ms a step</th><th>against fast</th>"
         "<th>repeats</th></tr>\n" + rows + "</table></div>\n";
}

std::string knob_table_html(const PriceResult& result) {
  std::string rows;
  for (const Knob* knob : result.full().knobs) {
    rows += fmt::format("<tr><th>{}</th><td>{}: {}. {}</td></tr>\n", knob->name, escaped(std::string(knob->area)),
                        escaped(std::string(knob->does)), escaped(std::string(knob->why)));
  }
  return "<table class=\"manifest\">\n" + rows + "</table>\n";
}

std::string list(const std::vector<std::string>& sentences) {
  std::string items;
  for (const std::string& sentence : sentences) items += "<li>" + escaped(sentence) + "</li>\n";
  return items.empty() ? "" : "<ul>\n" + items + "</ul>\n";
}

}  // namespace

std::string price_html(const PriceRequest& request, const PriceResult& result) {
  const std::string headline = escaped(price_headline(result));
  return fmt::format(
             "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
             "content=\"width=device-width\"><title>forkpoint price: {}</title>\n<style>{}</style></head>\n"
             "<body class=\"{}\"><main><header><p class=\"brand\">forkpoint price</p><h1>{}</h1>\n"
             "<p class=\"reason\"><code>{}</code></p></header>\n",
             headline, kReportStyle, price_status(result) == 0 ? "identical" : "diverged", headline,
             escaped(shell_words(request.command))) +
         fmt::format("<section><h2>Time of a step</h2><p class=\"lead\">Median of steps {} to {} on the slowest rank; of {} runs a "
                     "bar to the median, a line from the lowest to the highest. Green repeats, amber does not.</p>\n{}</section>\n",
                     request.first, request.last - 1, request.rounds, plot(result)) +
         "<section><h2>Arms, and sets that were tried</h2>\n" + table(result) +
         list(result.not_in_force) + list(result.not_deterministic) +
         "<p class=\"lead\">Equal runs are no proof that the next one is equal too.</p></section>\n<section><h2>Knobs</h2>\n" +
         knob_table_html(result) + "</section></main></body></html>\n";
}

}  // namespace forkpoint
