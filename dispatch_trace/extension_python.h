// Python objects in C++: references that are given back, attributes, whole numbers and tuples.
#pragma once

#include <Python.h>

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace {

// A reference that is given back.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref to(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Ref(borrowed);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// A Python error is set.
struct Raised {};
// The op has to be recorded the long way.
struct Unusual {};

PyObject* must(PyObject* found) {
  if (found == nullptr) throw Raised{};
  return found;
}

const char* must_text(const char* found) {
  if (found == nullptr) throw Raised{};
  return found;
}

void check(int code) {
  if (code < 0) throw Raised{};
}

// Interned names, made once.
#define NAMES(X) X(_announce) X(_backward_hooks) X(_backward_pre_hooks) X(_call_impl) \
  X(_compiled_call_impl) X(_credit) X(_forward_hooks) X(_forward_pre_hooks) X(_internal) X(_native) \
  X(_new_body) X(_next_number) X(_note) X(_purge_at) X(_record) X(_schema) X(_snapshot) X(active) \
  X(alignment) X(base) X(busy) X(call) X(calls) X(calls_of) X(contents) X(counters) X(counts) \
  X(definitions) X(direct) X(dispatch) X(dropout) X(facts) X(fault) X(find_source) X(forward) \
  X(frame) X(fwd) X(hex) X(id) X(inputs) X(inputs_of) X(is_root) X(keep_data) X(key) X(last) X(leaf) \
  X(leaves) X(locked) X(mode) X(model) X(module) X(name) X(name_geometry) X(nbytes) X(note_module) \
  X(num_bytes) X(number) X(op) X(opened) X(origin) X(overload_name) X(parameters) X(parent) X(path) \
  X(phase) X(plain_inputs_of) X(plain_note_module) X(purge) X(put_rows_of) X(quick) X(random) \
  X(ready) X(records_module) X(records_ops) X(rested) X(selected) X(shape) X(shares_bodies) X(step) \
  X(summarise) X(tensor) X(told) X(upcoming) X(values) X(version) X(versions) X(weak) X(writer) \
  X(writes)
#define DECLARE(name) PyObject* name;
struct Names {
  NAMES(DECLARE)
} names;
#undef DECLARE

PyObject *true_text, *false_text, *empty_text, *out_text, *no_text;  // as the Python side writes them
PyObject *empty_tuple, *zero, *minus_one;

Ref attribute(PyObject* object, PyObject* name) { return Ref(must(PyObject_GetAttr(object, name))); }

bool truth(PyObject* object, PyObject* name) {
  Ref value = attribute(object, name);
  if (value.get() == Py_True) return true;
  if (value.get() == Py_False) return false;
  int found = PyObject_IsTrue(value.get());
  check(found);
  return found != 0;
}

int64_t whole(PyObject* object, PyObject* name) {
  Ref value = attribute(object, name);
  int64_t found = PyLong_AsLongLong(value.get());
  if (found == -1 && PyErr_Occurred()) throw Raised{};
  return found;
}

void set(PyObject* object, PyObject* name, PyObject* value) { check(PyObject_SetAttr(object, name, value)); }

// Borrowed, null where it is not there.
PyObject* find(PyObject* dict, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr && PyErr_Occurred()) throw Raised{};
  return found;
}

Ref integer(int64_t value) { return Ref(must(PyLong_FromLongLong(value))); }

template <typename... Parts>
Ref tuple_of(Parts*... parts) {
  return Ref(must(PyTuple_Pack(sizeof...(parts), parts...)));
}

// What is in no cycle, of which there are many: the garbage collector need not walk through them. (A row holds
// a frame, and by it the mode that holds the row, until the writer takes it.)
Ref untracked(Ref made) {
  PyObject_GC_UnTrack(made.get());
  return made;
}

Ref tuple_from(std::vector<Ref>& parts) {
  Ref made(must(PyTuple_New(parts.size())));
  for (size_t i = 0; i < parts.size(); ++i) PyTuple_SET_ITEM(made.get(), i, parts[i].release());
  return made;
}

// A tuple with another object in one place.
Ref with_item(PyObject* tuple, Py_ssize_t place, PyObject* item) {
  Ref made = untracked(Ref(must(PyTuple_New(PyTuple_GET_SIZE(tuple)))));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    PyTuple_SET_ITEM(made.get(), i, Ref::to(i == place ? item : PyTuple_GET_ITEM(tuple, i)).release());
  }
  return made;
}

// Keyword arguments as the Python methods want them: a dict where there are none too.
Ref dict_of(PyObject* kwargs) { return kwargs == nullptr ? Ref(must(PyDict_New())) : Ref::to(kwargs); }

Ref tuple_of_sizes(c10::IntArrayRef sizes) {
  Ref made(must(PyTuple_New(sizes.size())));
  for (size_t i = 0; i < sizes.size(); ++i) PyTuple_SET_ITEM(made.get(), i, integer(sizes[i]).release());
  return made;
}

}  // namespace
