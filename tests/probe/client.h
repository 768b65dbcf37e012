// What the scenarios of probe_client share.
#pragma once

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

using Arguments = std::vector<std::string>;
using Scenarios = std::map<std::string, int (*)(const Arguments&)>;

inline int number(const Arguments& arguments, size_t i, int otherwise) {
  return i < arguments.size() ? atoi(arguments[i].c_str()) : otherwise;
}

void record_steps(int first, int count);

const Scenarios& record_scenarios();   // client.cpp
const Scenarios& process_scenarios();  // client_process.cpp
