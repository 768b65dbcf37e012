// The launches of a step, as text and as JSON.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/show.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using Json = nlohmann::ordered_json;

struct FlagName {
  uint8_t flag;
  std::string_view text;
};
constexpr FlagName kLaunchFlagNames[] = {
    {kLaunchInGraph, "in graph"},
    {kLaunchParamsUnread, "parameters unread"},
    {kLaunchToHost, "to host"},
    {kLaunchFromHost, "from host"},
    {kLaunchLegacyStream, "legacy stream"},
    {kLaunchPeerMapped, "peer mapped"},
    {kLaunchNonBlocking, "non-blocking"},
    {kLaunchRecompute, "recompute"},
};
constexpr FlagName kBufferFlagNames[] = {
    {kBufferBefore, "before"},   {kBufferWindow, "window"},       {kBufferNoDigest, "no digest"}, {kBufferRead, "read"},
    {kBufferWritten, "written"}, {kBufferAddresses, "addresses"}, {kBufferFresh, "fresh"},
};

template <size_t kCount>
std::vector<std::string_view> names_of(uint8_t flags, const FlagName (&names)[kCount]) {
  std::vector<std::string_view> found;
  for (const FlagName& name : names) {
    if (flags & name.flag) found.push_back(name.text);
  }
  return found;
}

// Calls visit(index, row, its buffers) for each launch that the filter lets through.
template <typename Visit>
void visit_rows(const StepLaunches& step, const RecordFilter& filter, Visit visit) {
  const auto sites = step.stream->sites();
  std::span<const BufferRow> left(step.launches.buffers);
  for (size_t i = 0; i < step.launches.rows.size(); ++i) {
    const LaunchRow& row = step.launches.rows[i];
    const auto buffers = left.first(row.buffers);
    left = left.subspan(row.buffers);
    if (filter.wants_site(sites[row.site])) visit(i, row, sites[row.site], buffers);
  }
}

std::string place_text(uint32_t place) {
  if (place < kPlaceSpecial) return fmt::format("+{:#x}", place);
  if (place == kPlaceSource) return "source";
  if (place == kPlaceTarget) return "target";
  return place == kPlaceGlobal ? "global" : fmt::format("{:#x}", place);
}

std::string_view object_name(LaunchKind kind) {
  switch (kind) {
    case LaunchKind::graph:
      return "graph";
    case LaunchKind::allocate:
    case LaunchKind::release:
      return "allocation";
    case LaunchKind::event_record:
    case LaunchKind::event_wait:
    case LaunchKind::synchronize:
      return "event";
    case LaunchKind::record:
      return "record";
    default:
      return "object";
  }
}

std::string stream_text(uint32_t stream) { return stream == kEveryStream ? "all" : fmt::format("{}", stream); }

std::string size_text(const uint32_t (&size)[3]) { return fmt::format("{}x{}x{}", size[0], size[1], size[2]); }

std::string row_text(size_t index, const LaunchRow& row, const Site& site) {
  std::string text = fmt::format("  {:>6}  stream {:<3} {}", index, stream_text(row.stream), name(row.kind));
  if (!site.tensor.empty()) text += fmt::format("  {}", printable(short_kernel_name(site.tensor)));
  if (row.grid[0] != 0) text += fmt::format("  grid {} block {}", size_text(row.grid), size_text(row.block));
  if (row.shared_bytes != 0) text += fmt::format(" shared {}", human_size(row.shared_bytes));
  if (row.object != 0 || row.kind == LaunchKind::record)
    text += fmt::format("  {} {}", object_name(row.kind), row.object);
  if (row.bytes != 0) text += fmt::format("  {}", human_size(row.bytes));
  if (row.kind == LaunchKind::retry) text += fmt::format("  of launch {}", row.retry_of);
  const std::string where = site.layer + (site.layer.empty() || site.op.empty() ? "" : ", ") + site.op;
  if (!where.empty()) text += fmt::format("  ({}: {})", name(site.phase), printable(where));
  if (row.micro_step != 0) text += fmt::format(" micro {}", row.micro_step);
  const auto flags = names_of(row.flags, kLaunchFlagNames);
  if (!flags.empty()) text += fmt::format("  [{}]", fmt::join(flags, ", "));
  return text + "\n";
}

std::string buffer_text(const BufferRow& buffer) {
  const std::string what =
      buffer.allocation == 0 ? std::string("host memory") : fmt::format("#{}+{}", buffer.allocation, buffer.offset);
  const auto flags = names_of(buffer.flags, kBufferFlagNames);
  return fmt::format("          {:<8} {:<16} {:>10}  {}{}\n", place_text(buffer.place), what, human_size(buffer.bytes),
                     (buffer.flags & kBufferNoDigest) ? std::string(32, '-') : hex(buffer.digest),
                     flags.empty() ? "" : fmt::format("  [{}]", fmt::join(flags, ", ")));
}

Json text_or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

Json buffer_json(const BufferRow& buffer) {
  const bool has_digest = !(buffer.flags & kBufferNoDigest);
  return {{"place", buffer.place < kPlaceSpecial ? Json(buffer.place) : Json(place_text(buffer.place))},
          {"allocation", buffer.allocation == 0 ? Json(nullptr) : Json(buffer.allocation)},
          {"offset", buffer.offset},
          {"address", fmt::format("{:#x}", buffer.address)},
          {"start", buffer.start},
          {"bytes", buffer.bytes},
          {"digest", has_digest ? Json(hex(buffer.digest)) : Json(nullptr)},
          {"flags", names_of(buffer.flags, kBufferFlagNames)}};
}

Json row_json(size_t index, const LaunchRow& row, const Site& site, std::span<const BufferRow> buffers) {
  Json json{{"index", index},
            {"kind", name(row.kind)},
            {"name", text_or_null(site.tensor)},
            {"demangled", text_or_null(demangled(site.tensor))},
            {"short_name", text_or_null(short_kernel_name(site.tensor))},
            {"phase", name(site.phase)},
            {"layer", text_or_null(site.layer)},
            {"op", text_or_null(site.op)},
            {"micro_step", row.micro_step},
            {"stream", row.stream == kEveryStream ? Json("all") : Json(row.stream)},
            {"grid", row.grid},
            {"block", row.block},
            {"shared_bytes", row.shared_bytes},
            {"param_bytes", row.param_bytes},
            {"params", hex(row.params)},
            {"object", row.object},
            {"bytes", row.bytes},
            {"retry_of", row.kind == LaunchKind::retry ? Json(row.retry_of) : Json(nullptr)},
            {"flags", names_of(row.flags, kLaunchFlagNames)},
            {"buffers", Json::array()}};
  for (const BufferRow& buffer : buffers) json["buffers"].push_back(buffer_json(buffer));
  return json;
}

}  // namespace

std::string launch_text(const StepLaunches& step, const RecordFilter& filter, const Style& style) {
  std::string out;
  visit_rows(step, filter, [&](size_t index, const LaunchRow& row, const Site& site, auto buffers) {
    out += row_text(index, row, site);
    for (const BufferRow& buffer : buffers) out += buffer_text(buffer);
  });
  if (out.empty()) return out;
  const uint64_t count = step.summary->launches;
  const std::string heading =
      fmt::format("rank {}, {}: {}", step.stream->header().rank, step_title(step.summary->step), counted(count, "launch"));
  return style.bold(heading) + (step.summary->complete ? "\n" : " (incomplete)\n") + out;
}

std::vector<std::string> launch_json(const StepLaunches& step, const RecordFilter& filter) {
  std::vector<std::string> launches;
  visit_rows(step, filter, [&](size_t index, const LaunchRow& row, const Site& site, auto buffers) {
    Json json{{"step", step.summary->step}, {"rank", step.stream->header().rank}};
    json.update(row_json(index, row, site, buffers));
    launches.push_back(json.dump(-1, ' ', false, Json::error_handler_t::replace));
  });
  return launches;
}

}  // namespace forkpoint
