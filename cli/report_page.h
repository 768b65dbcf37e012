// Style and script of the HTML report, embedded from report_page.css and report_page.js.
#pragma once

namespace forkpoint {

extern const char kReportStyle[];
extern const char kReportScript[];

}  // namespace forkpoint
