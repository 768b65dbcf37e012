#include "probes/torch_graph.h"

#include <algorithm>
#include <vector>

namespace forkpoint {
namespace {

constexpr uint64_t kLeaf = ~uint64_t{0};  // the number of each AccumulateGrad

struct GraphNames {
  PythonObject *next_functions, *sequence_number, *variable;
};

// References are kept for ever.
const GraphNames& graph_names(const Python& python) {
  static const GraphNames names = {python.PyUnicode_InternFromString("next_functions"),
                                   python.PyUnicode_InternFromString("_sequence_nr"),
                                   python.PyUnicode_InternFromString("variable")};
  return names;
}

// A node is one Python object for as long as that is referred to: what is compared by its address is held to the end.
class Walk {
 public:
  Walk(const Python& python, const GraphWalk& walk)
      : python_(python), names_(graph_names(python)), walk_(walk), edges_(python, python.PySequence_Tuple(walk.edges)),
        starts_(python, python.PySequence_Tuple(walk.starts)), found_(python, python.PyList_New(0)) {}
  ~Walk() {
    for (PythonObject* node : seen_) python_.Py_DecRef(node);
  }
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  PythonObject* run() {
    if (!edges_ || !starts_ || !found_ || !read_edges()) return nullptr;
    read_starts();
    for (size_t at = 0; at < queue_.size(); ++at) {
      if (!visit(queue_[at])) return nullptr;
      if (too_many_) return python_.new_reference(python_.none);
    }
    return found_.release();
  }

 private:
  struct Edge {
    PythonObject *name, *node, *leaf;  // borrowed from edges_
    int64_t number;
  };

  // false: a Python error is set.
  bool read_edges() {
    const ptrdiff_t count = python_.PyTuple_Size(edges_.get());
    for (ptrdiff_t i = 0; i < count; ++i) {
      PythonObject* edge = python_.PyTuple_GetItem(edges_.get(), i);
      const auto part = [&](ptrdiff_t at) { return python_.PyTuple_GetItem(edge, at); };
      PythonObject *name = part(0), *node = part(1), *number = part(2), *leaf = part(3);
      if (!name || !node || !number || !leaf) return false;
      edges_read_.push_back({name, node != python_.none ? node : nullptr, leaf != python_.none ? leaf : nullptr,
                             python_.PyLong_AsLongLong(number)});
      has_leaves_ = has_leaves_ || edges_read_.back().leaf;
    }
    return !python_.PyErr_Occurred();
  }

  void read_starts() {
    const ptrdiff_t count = python_.PyTuple_Size(starts_.get());
    for (ptrdiff_t i = 0; i < count; ++i) {
      PythonObject* node = python_.PyTuple_GetItem(starts_.get(), i);
      see(node);
      if (!is_origin(node)) queue_.push_back(node);
    }
  }

  // false: a Python error is set.
  bool visit(PythonObject* node) {
    const PythonRef following(python_, python_.PyObject_GetAttr(node, names_.next_functions));
    const ptrdiff_t count = following ? python_.PyTuple_Size(following.get()) : -1;
    for (ptrdiff_t k = 0; k < count && !too_many_; ++k) {
      PythonObject* pair = python_.PyTuple_GetItem(following.get(), k);
      PythonObject* next = python_.PyTuple_GetItem(pair, 0);
      if (next == python_.none) continue;
      const int64_t number = next ? python_.PyLong_AsLongLong(python_.PyTuple_GetItem(pair, 1)) : 0;
      if (python_.PyErr_Occurred() || !follow(node, k, next, number)) return false;
    }
    return count >= 0;
  }

  bool follow(PythonObject* node, ptrdiff_t place, PythonObject* next, int64_t number) {
    for (const Edge& edge : edges_read_) {
      if (edge.node == next && edge.number == number) return note(edge.name, node, place);
    }
    uint64_t made = 0;
    if (!sequence_number(next, &made)) return false;
    if (made == kLeaf) {
      PythonObject* name = nullptr;
      if (has_leaves_ && !name_of_leaf(next, &name)) return false;
      return !name || note(name, node, place);
    }
    const bool seen = std::find(seen_.begin(), seen_.end(), next) != seen_.end();
    if (seen || made < walk_.oldest || is_origin(next)) return true;
    see(next);
    queue_.push_back(next);
    too_many_ = static_cast<int64_t>(queue_.size()) > walk_.most;
    return true;
  }

  bool sequence_number(PythonObject* node, uint64_t* made) {
    const PythonRef number(python_, python_.PyObject_CallMethodObjArgs(node, names_.sequence_number, nullptr));
    if (number) *made = python_.PyLong_AsUnsignedLongLong(number.get());
    return number && !python_.PyErr_Occurred();
  }

  bool name_of_leaf(PythonObject* accumulation, PythonObject** name) {
    const PythonRef variable(python_, python_.PyObject_GetAttr(accumulation, names_.variable));
    if (!variable) return false;
    for (const Edge& edge : edges_read_) {
      if (edge.leaf == variable.get()) *name = edge.name;
    }
    return true;
  }

  bool note(PythonObject* name, PythonObject* node, ptrdiff_t place) {
    const PythonRef number(python_, python_.PyLong_FromLongLong(place));
    const auto add = [&](PythonObject* item) { return item && python_.PyList_Append(found_.get(), item) == 0; };
    return add(name) && add(node) && add(number.get());
  }

  bool is_origin(PythonObject* node) const {
    return std::any_of(edges_read_.begin(), edges_read_.end(), [&](const Edge& edge) { return edge.node == node; });
  }
  void see(PythonObject* node) {
    seen_.push_back(node);
    python_.Py_IncRef(node);
  }

  const Python& python_;
  const GraphNames& names_;
  const GraphWalk& walk_;
  const PythonRef edges_, starts_;
  PythonRef found_;
  std::vector<Edge> edges_read_;
  std::vector<PythonObject*> seen_;   // owned
  std::vector<PythonObject*> queue_;  // of those in seen_
  bool has_leaves_ = false;
  bool too_many_ = false;
};

}  // namespace

PythonObject* find_contributions(const Python& python, const GraphWalk& walk) { return Walk(python, walk).run(); }

}  // namespace forkpoint
