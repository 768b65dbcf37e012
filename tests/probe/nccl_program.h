// A program that uses NCCL as trainers do, for the tests of the probe: on the fakes of libcuda and libnccl.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/fakes/fake_nccl.h"

namespace nccl_program {

struct Ranks {
  int rank = 0;
  int size = 1;
  std::string folder;  // where rank 0 leaves NCCL's id for the others
};

// Device memory of the fake libcuda that holds `values`, freed never. A null stream is the legacy one.
void load_cuda(const std::string& library);
float* device_floats(const std::vector<float>& values);
std::vector<float> host_floats(const float* device, size_t count);
void* new_stream();
// What comes on `then` comes after what is on `first`.
void order(void* first, void* then);
// A graph of what body gives to `stream`, and to streams ordered behind it. nullptr: the capture fails, which it says.
void* captured(void* stream, const std::function<void()>& body, bool global = false);
void launch_graph(void* graph, void* stream);
void defer_device_work();  // from now on, until the program waits for it
void synchronize();
size_t free_device_bytes();
void reset_context();  // and load_cuda's is another one, under the same address

// An id that all ranks of that name agree on.
forkpoint::NcclUniqueId shared_id(const Ranks& ranks, const std::string& name);
forkpoint::NcclComm world_communicator(const Ranks& ranks);
void check(forkpoint::NcclResult result, const char* what, forkpoint::NcclResult expected = forkpoint::kNcclSuccess);

// What rank `rank` holds at the beginning: known to the tests.
inline std::vector<float> start_values(int rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(rank * 1000) + static_cast<float>(i) * 0.5f;
  return values;
}
inline constexpr size_t kCount = 96;

}  // namespace nccl_program

// nccl_client CUDA_LIBRARY SCENARIO RANK SIZE FOLDER. In the shared library nccl_scenarios as well, which nccl_loader
// loads.
extern "C" int nccl_program_main(int argc, char** argv);
