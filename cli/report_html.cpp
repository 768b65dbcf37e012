// The HTML report. Text is written here, so that the page can be read without its script; the script draws the map and
// the losses from the embedded JSON.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "cli/report.h"
#include "cli/report_data.h"
#include "cli/report_page.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using Json = nlohmann::ordered_json;

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : printable(text)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// Inside <script>: `</script>` and `<!--` cannot occur without a `<`.
std::string script_safe(const Json& json) {
  std::string out;
  for (const char c : json.dump(-1, ' ', true, Json::error_handler_t::replace)) {
    out += c == '<' ? "\\u003c" : std::string(1, c);
  }
  return out;
}

char cell_letter(Cell cell) {
  switch (cell) {
    case Cell::equal:
      return 'e';
    case Cell::diverged:
      return 'd';
    case Cell::propagated:
      return 'p';
    case Cell::missing:
      return 'm';
  }
  return 'm';
}

// Loading and training never share a step: where neither run has anything, nothing is missing.
bool is_void(const Verdict::MapRow& row, int64_t step) {
  return (step == kPrologueStep) != (row.phase == name(Phase::load));
}

// "e12d1p7": a row of a long run is mostly runs of one kind.
std::string run_lengths(const Verdict::MapRow& row, const std::vector<int64_t>& steps) {
  const auto letter = [&](size_t i) {
    return row.cells[i] == Cell::missing && is_void(row, steps[i]) ? 'n' : cell_letter(row.cells[i]);
  };
  std::string out;
  const size_t size = std::min(row.cells.size(), steps.size());
  for (size_t i = 0; i < size;) {
    size_t end = i + 1;
    while (end < size && letter(end) == letter(i)) ++end;
    out += fmt::format("{}{}", letter(i), end - i);
    i = end;
  }
  return out;
}

Json place_json(const Divergence& divergence) {
  return {{"step", divergence.in_prologue ? kPrologueStep : divergence.step},
          {"rank", divergence.rank},
          {"phase", divergence.phase ? Json(name(*divergence.phase)) : Json(nullptr)},
          {"layer", divergence.layer}};
}

Json losses_json(const Losses& losses) {
  const auto points = [](const std::vector<LossPoint>& curve) {
    Json out = Json::array();
    for (const LossPoint& point : curve) out.push_back(Json::array({point.step, point.value}));
    return out;
  };
  Json out = Json::array();
  for (const LossSeries& series : losses.series) {
    out.push_back({{"name", series.name}, {"rank", series.rank}, {"a", points(series.a)}, {"b", points(series.b)}});
  }
  return out;
}

Json page_data(const Run& a, const Run& b, const Verdict& verdict, const Losses& losses) {
  Json data;
  data["runs"] = {a.directory(), b.directory()};
  data["first"] = verdict.first ? place_json(*verdict.first) : Json(nullptr);
  data["also"] = Json::array();
  for (const Divergence& divergence : verdict.also_first) data["also"].push_back(place_json(divergence));
  data["steps"] = verdict.map_steps;
  data["rows"] = Json::array();
  for (const Verdict::MapRow& row : verdict.map) {
    data["rows"].push_back(Json::array({row.phase, row.layer, run_lengths(row, verdict.map_steps)}));
  }
  data["losses"] = losses_json(losses);
  return data;
}

class Page {
 public:
  Page(const Run& a, const Run& b, const Verdict& verdict)
      : a_(a), b_(b), verdict_(verdict), losses_(read_losses(a, b, verdict)) {
    if (verdict.first) fork_ = records_around_fork(a, b, verdict);
  }

  std::string text() {
    head();
    verdict();
    if (verdict_.first) cause();
    map();
    losses();
    if (verdict_.first) fork_records();
    lists();
    differences();
    tail();
    return std::move(out_);
  }

 private:
  template <typename... Values>
  void put(fmt::format_string<Values...> format, Values&&... values) {
    out_ += fmt::format(format, std::forward<Values>(values)...);
  }

  void head() {
    out_ += "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">";
    out_ += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">";
    out_ += "<meta name=\"color-scheme\" content=\"light dark\">";
    put("<title>{} \xE2\x80\x93 forkpoint</title>\n<style>{}</style></head>\n", escaped(headline(verdict_)),
        kReportStyle);
    put("<body class=\"{}\"><main>\n", name(verdict_.outcome));
  }

  void verdict() {
    // The sentence about runs that cannot be compared is too long for a title.
    const bool is_long = verdict_.outcome == Outcome::incomparable;
    const std::string title = is_long ? std::string(name(verdict_.outcome)) : headline(verdict_);
    put("<header><p class=\"brand\">forkpoint <span>{}</span></p><h1>{}</h1>", name(verdict_.outcome), escaped(title));
    const std::string reason = is_long ? verdict_.reason : remaining_reason(verdict_);
    if (!reason.empty()) put("<p class=\"reason\">{}</p>", escaped(reason));
    put("<dl class=\"runs\"><dt class=\"a\">run A</dt><dd>{}</dd><dt class=\"b\">run B</dt><dd>{}</dd></dl></header>\n",
        run_line(a_), run_line(b_));
    tiles();
  }

  static std::string run_line(const Run& run) {
    const std::string command = fmt::format("{}", fmt::join(run.manifest().command, " "));
    return fmt::format("<b>{}</b> <span>{}{}</span> <code>{}</code>", escaped(run.directory()), name(run.state()),
                       run.manifest().started_at.empty() ? "" : ", " + escaped(run.manifest().started_at),
                       escaped(command));
  }

  void tile(std::string_view label, const std::string& value) {
    put("<div><dt>{}</dt><dd>{}</dd></div>", label, escaped(value));
  }

  void tiles() {
    out_ += "<dl class=\"tiles\">";
    if (const auto& first = verdict_.first) {
      tile("step", first->in_prologue ? "before the first" : std::to_string(first->step));
      tile("rank", first->rank < 0 ? "all alike" : std::to_string(first->rank));
      if (first->phase) tile("phase", std::string(name(*first->phase)));
      tile("ranks that differ",
           fmt::format("{} of {}", verdict_.ranks_diverged.size(), verdict_.coverage.ranks_compared));
      tile("records that follow", grouped(verdict_.propagated));
    } else {
      tile("ranks compared", std::to_string(verdict_.coverage.ranks_compared));
      tile("steps compared", grouped(verdict_.coverage.steps_compared));
    }
    tile("records compared", grouped(verdict_.coverage.records_compared));
    if (verdict_.coverage.launches_compared > 0) tile("launches compared", grouped(verdict_.coverage.launches_compared));
    tile("bytes hashed", human_size(verdict_.coverage.bytes_hashed));
    out_ += "</dl>\n";
  }

  void cause() {
    const Divergence& first = *verdict_.first;
    out_ += "<section class=\"two\"><div><h2>Why</h2>";
    const auto [cls, others] = cause_parts(verdict_);
    put("<p class=\"class\">{}</p>", escaped(cls));
    if (!others.empty()) put("<p class=\"lead\">{}</p>", escaped(others));
    list(verdict_.cause.evidence);
    if (!verdict_.cause.next.empty()) put("<p class=\"next\">Next: <code>{}</code></p>", escaped(verdict_.cause.next));
    out_ += "</div><div><h2>What</h2><table class=\"values\">";
    for (const ForkRow& row : fork_.rows) {
      if (row.is_fork) value("form", both(row, &ForkRow::Side::form), "");
    }
    value("run A", first.before, "a");
    value("run B", first.after, "b");
    if (first.pointing) value("points at", describe(*first.pointing), "");
    if (!first.kernel.empty()) value("kernel", first.kernel, "");
    for (const Divergence& divergence : verdict_.also_first) value("also first", place_text(divergence), "");
    out_ += "</table></div></section>\n";
  }

  void value(std::string_view label, const std::string& text, std::string_view side) {
    if (!text.empty()) put("<tr><th class=\"{}\">{}</th><td>{}</td></tr>", side, label, escaped(text));
  }

  void list(const std::vector<std::string>& entries) {
    if (entries.empty()) return;
    out_ += "<ul>";
    for (const std::string& entry : entries) put("<li>{}</li>", escaped(entry));
    out_ += "</ul>";
  }

  void map() {
    if (verdict_.map.empty() || verdict_.map_steps.empty()) return;
    put("<section><h2>Where</h2><p class=\"lead\">{} (a layer in a phase) by {}; a cell is the worst over all "
        "ranks.</p>",
        counted(verdict_.map.size(), "row"), counted(verdict_.map_steps.size(), "step"));
    out_ +=
        "<div class=\"bar\"><ul class=\"legend\"><li class=\"equal\">equal</li><li class=\"diverged\">diverged</li>"
        "<li class=\"propagated\">propagated</li><li class=\"missing\">nothing to compare</li></ul>"
        "<span class=\"tools\"><label><input type=\"checkbox\" id=\"differing\"> only rows that differ</label>"
        "<label>row height <input type=\"range\" id=\"height\" min=\"0\" max=\"100\"></label></span></div>"
        "<div id=\"map\" tabindex=\"0\" aria-label=\"map of steps by layers\"><div "
        "id=\"spacer\"><canvas></canvas></div></div>"
        "</section>\n";
  }

  void losses() {
    put("<section><h2>Loss</h2>{}",
        losses_.series.empty()
            ? ""
            : "<div class=\"bar\"><ul class=\"legend\"><li class=\"a\">run A</li><li class=\"b\">run B</li></ul>"
              "<span class=\"tools\"><select id=\"curve\" aria-label=\"which loss\"></select></span></div><div "
              "id=\"loss\"></div>");
    if (!losses_.note.empty()) put("<p class=\"lead\">{}</p>", escaped(losses_.note));
    out_ += "</section>\n";
  }

  static std::string_view state_word(const ForkRow& row) {
    switch (row.state) {
      case ForkRow::State::equal:
        return "equal";
      case ForkRow::State::differs:
        return "differs";
      case ForkRow::State::only_first:
        return "only in A";
      case ForkRow::State::only_second:
        return "only in B";
    }
    return "";
  }

  void fork_records() {
    out_ += "<section><h2>Around the fork</h2>";
    if (!fork_.problem.empty()) {
      put("<p class=\"lead\">{}</p></section>\n", escaped(fork_.problem));
      return;
    }
    const std::string step = fork_.step == kPrologueStep ? "before the first step" : fmt::format("step {}", fork_.step);
    put("<p class=\"lead\">Records of rank {}, {}, in the order of run A; {} before and {} after these.</p>",
        fork_.rank, step, grouped(fork_.rows_before), grouped(fork_.rows_after));
    out_ +=
        "<div class=\"scroll\"><table "
        "class=\"records\"><thead><tr><th>phase</th><th>layer</th><th>tensor</th><th>form</th>"
        "<th class=\"a\">run A</th><th class=\"b\">run B</th><th>largest</th><th></th></tr></thead><tbody>";
    for (const ForkRow& row : fork_.rows) record_row(row);
    out_ += "</tbody></table></div></section>\n";
  }

  void record_row(const ForkRow& row) {
    const bool equal = row.state == ForkRow::State::equal;
    const Site& site = *row.site;
    std::string tensor = site.tensor;
    // A collective's input and output have one name.
    if (site.kind == Kind::collective) tensor += fmt::format(" ({})", name(site.role));
    if (row.micro_step) tensor += fmt::format(" micro {}", row.micro_step);
    if (row.call) tensor += fmt::format(" #{}", row.call);
    put("<tr class=\"{}{}\"><td><i class=\"phase "
        "{}\"></i>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>"
        "<td>{}</td><td>{}</td></tr>",
        equal ? "equal" : "differs", row.is_fork ? " fork" : "", name(site.phase), name(site.phase),
        escaped(site.op.empty()      ? site.layer
                : site.layer.empty() ? site.op
                                     : site.layer + ", " + site.op),
        escaped(tensor), escaped(both(row, &ForkRow::Side::form)), cell(row.first), cell(row.second),
        escaped(both(row, &ForkRow::Side::absmax)), row.is_fork ? "fork" : state_word(row));
  }

  // Said once where both runs agree.
  static std::string both(const ForkRow& row, std::string ForkRow::Side::*member) {
    const std::string a = row.first ? (*row.first).*member : "", b = row.second ? (*row.second).*member : "";
    if (a == b || b.empty()) return a;
    return a.empty() ? b : a + " / " + b;
  }

  static std::string cell(const std::optional<ForkRow::Side>& side) {
    if (!side) return "\xE2\x80\x93";
    constexpr size_t kShort = 12;
    const bool is_digest = side->value.size() == 32;
    const std::string shown = is_digest ? side->value.substr(0, kShort) + "\xE2\x80\xA6" : side->value;
    const std::string bad = side->nonfinite ? fmt::format(" <em>{} non-finite</em>", grouped(side->nonfinite)) : "";
    return fmt::format("<code title=\"{}\">{}</code>{}", escaped(side->value), escaped(shown), bad);
  }

  void lists() {
    const auto section = [&](std::string_view title, const std::vector<std::string>& entries) {
      if (entries.empty()) return;
      put("<section><h2>{}</h2>", title);
      list(entries);
      out_ += "</section>\n";
    };
    section("Gaps", verdict_.gaps);
    section("Notes", remaining_notes(verdict_));
    put("<section><h2>Coverage</h2><p class=\"lead\">{}.</p>", escaped(describe(verdict_.coverage)));
    list(verdict_.coverage.limits);
    out_ += "</section>\n";
  }

  void differences() {
    const auto found = manifest_differences(a_.manifest(), b_.manifest());
    out_ += "<section><h2>How the runs were made</h2>";
    if (found.empty()) {
      out_ += "<p class=\"lead\">Command, environment, versions, GPUs and world size are the same.</p></section>\n";
      return;
    }
    out_ +=
        "<div class=\"scroll\"><table class=\"manifest\"><thead><tr><th></th><th class=\"a\">run A</th><th "
        "class=\"b\">run B</th></tr></thead><tbody>";
    for (const ManifestDifference& entry : found) {
      put("<tr><th>{}</th><td>{}</td><td>{}</td></tr>", escaped(entry.field), escaped(entry.a), escaped(entry.b));
    }
    out_ += "</tbody></table></div></section>\n";
  }

  void tail() {
    put("<footer>forkpoint {}</footer></main>\n<div id=\"tip\" role=\"status\"></div>\n", FORKPOINT_VERSION);
    put("<script type=\"application/json\" id=\"data\">{}</script>\n",
        script_safe(page_data(a_, b_, verdict_, losses_)));
    put("<script>{}</script>\n</body></html>\n", kReportScript);
  }

  const Run& a_;
  const Run& b_;
  const Verdict& verdict_;
  const Losses losses_;
  ForkRecords fork_;
  std::string out_;
};

}  // namespace

std::string html_report(const Run& a, const Run& b, const Verdict& verdict) { return Page(a, b, verdict).text(); }

}  // namespace forkpoint
