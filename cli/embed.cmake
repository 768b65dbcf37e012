# Writes OUTPUT, a C++ source that holds the report's style and script as raw string literals.
file(READ ${SOURCE_DIR}/report_page.css css)
file(READ ${SOURCE_DIR}/report_page.js js)
file(WRITE ${OUTPUT}
"// Generated from cli/report_page.css and cli/report_page.js.
#include \"cli/report_page.h\"

namespace forkpoint {

const char kReportStyle[] = R\"forkpoint_page(${css})forkpoint_page\";
const char kReportScript[] = R\"forkpoint_page(${js})forkpoint_page\";

}  // namespace forkpoint
")
