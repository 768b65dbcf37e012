// Walks through autograd's graph, for the bridge's backward.py: once a call of a module, so in C++.
#pragma once

#include <cstdint>

#include "probes/python_api.h"

namespace forkpoint {

struct GraphWalk {
  PythonObject* starts = nullptr;  // a sequence of nodes
  // Where a module's inputs came from: a sequence of (name, node or None, number of its output, leaf tensor or None).
  PythonObject* edges = nullptr;
  uint64_t oldest = 0;             // nodes with a lower sequence number are older than the module's call
  int64_t most = 0;                // nodes that are walked over
};

// [name, node, place, name, node, place, ...]: the nodes made inside whose place-th next function is such an edge,
// breadth first. None: there are more nodes than `most`. nullptr: a Python error is set. REQUIRES: the GIL.
PythonObject* find_contributions(const Python& python, const GraphWalk& walk);

}  // namespace forkpoint
