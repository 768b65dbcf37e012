#include "tests/support/temporary_folder.h"

#include <stdlib.h>

#include <filesystem>
#include <stdexcept>

namespace forkpoint {
namespace {

std::string make() {
  const char* parent = getenv("FORKPOINT_TEST_TMP");
  std::string pattern =
      (parent ? std::string(parent) : std::filesystem::temp_directory_path().string()) + "/forkpoint-XXXXXX";
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error(pattern + ": no temporary folder can be made");
  return pattern;
}

}  // namespace

TemporaryFolder::TemporaryFolder() : path_(make()) {}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace forkpoint
