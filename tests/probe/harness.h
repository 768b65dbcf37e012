// Runs programs under the probe and looks at what they leave.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lib/hash_stream.h"
#include "lib/run.h"

namespace forkpoint::probe_test {

// A folder that is gone with the object.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string run() const { return path_ + "/run"; }

 private:
  std::string path_;
};

struct Outcome {
  int status = -1;   // exit status; 128 + n: killed by signal n; -2: did not end in time
  std::string out;
  std::string err;
  double seconds = 0;
};

using Environment = std::map<std::string, std::string>;

// The variables of this process without those of launchers and of the probe, then `environment`.
Outcome run_program(const std::vector<std::string>& command, const Environment& environment = {});
// As run_program, and sends SIGKILL once the program has printed a line.
Outcome run_and_kill(const std::vector<std::string>& command, const Environment& environment);

// LD_PRELOAD of the probe, FORKPOINT_RUN=run, level layer; then `more`.
Environment under_probe(const std::string& run, const Environment& more = {});

std::string probe_path();
std::string preload();  // what LD_PRELOAD must hold
std::string client_path(const std::string& name = "probe_client");
std::vector<std::string> client(std::vector<std::string> arguments);

std::unique_ptr<HashStreamReader> open_stream(const std::string& run, int rank = 0);

// A stream's records with everything looked up, in order of arrival.
struct Row {
  int64_t step = 0;
  Site site;
  Layout layout;
  Record record;
};
std::vector<Row> all_rows(const HashStreamReader& stream);
// Those about `tensor`.
std::vector<Row> rows_of(const std::vector<Row>& rows, const std::string& tensor);
bool has_gap(const HashStreamReader& stream, const std::string& reason);
bool has_limit(const HashStreamReader& stream, const std::string& what);
uint64_t records_lost(const HashStreamReader& stream);
int line_count(const std::string& text);

}  // namespace forkpoint::probe_test
