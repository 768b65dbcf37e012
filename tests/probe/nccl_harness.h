// Records ranks of nccl_client on the fakes, and looks at what they leave.
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "tests/probe/harness.h"
#include "tests/probe/nccl_program.h"

namespace forkpoint::probe_test {

struct NcclRun {
  TempFolder folder;
  Outcome outcome;
  std::string path() const { return folder.run(); }
  std::vector<Row> rows(int rank) const { return all_rows(*open_stream(folder.run(), rank)); }
};

inline std::vector<std::string> ranks_of(const std::string& scenario, int ranks, const std::string& folder,
                                         const std::string& program = "nccl_client", const std::string& cuda = "") {
  return {client_path(program),
          "ranks",
          std::to_string(ranks),
          cuda.empty() ? client_path("libcuda.so.1") : cuda,
          scenario,
          folder};
}

// under: the variables of the probe; without: what the program does by itself.
inline void record_nccl(NcclRun* run, const std::string& scenario, int ranks, const Environment& more = {},
                        const std::string& program = "nccl_client") {
  run->outcome =
      run_program(ranks_of(scenario, ranks, run->folder.path(), program), under_probe(run->folder.run(), more));
  INFO(run->outcome.out << run->outcome.err);
  REQUIRE(run->outcome.status == 0);
}

inline std::vector<Row> rows_of_op(const std::vector<Row>& rows, const std::string& op,
                                   const std::string& tensor = "") {
  std::vector<Row> found;
  for (const Row& row : rows) {
    if (row.site.op == op && (tensor.empty() || row.site.tensor == tensor)) found.push_back(row);
  }
  return found;
}

// How often the word stands in the text.
inline size_t count_of(const std::string& text, const std::string& word) {
  size_t count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

inline Digest digest_of_floats(const std::vector<float>& values) {
  return digest_bytes(values.data(), values.size() * sizeof(float), DType::f32).digest;
}

}  // namespace forkpoint::probe_test
