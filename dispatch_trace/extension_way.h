// One thread's mode of one recording, and what its ways of an op and of a module call have in common.
#pragma once

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/headeronly/version.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "extension_python.h"

// What of torch's inner parts is used where it looks as it does here; elsewhere the same is done in longer ways.
#define TORCH_IS_2_13 (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 13)

namespace {

// What is fixed about an overload: `ops.OpInfo`, of which these are attributes.
struct Info {
  Ref info, call, base;
  bool direct, quick, selected, random;
  int64_t dropout;
};

// A geometry of a dense tensor, with the Python objects that stand for it.
struct Shape {
  c10::ScalarType dtype;
  int64_t offset;
  std::vector<int64_t> sizes, strides;
  Ref g;     // (dtype, offset, shape, strides, 0)
  Ref name;  // of `Storages.name_geometry`
};

// A place in the program, with what a record says of it.
struct Line {
  Ref code;  // kept, so that its address stays its own
  int place;
  Ref source;  // (file, line)
};

constexpr size_t MANY_SHAPES = 1 << 16;
constexpr size_t MANY_LINES = 1 << 16;
constexpr Py_ssize_t MANY_ROWS = 1 << 15;  // as in rows.py

// One thread's mode of one recording.
struct Way {
  PyObject_HEAD
  // Strong references, in one place for the garbage collector.
  struct Held {
    PyObject *here, *infos, *bodies, *rows, *tracer, *state, *next, *thread, *written, *counting, *site,
        *plain, *constants, *frame, *mark, *call_impl, *hooks, *storages, *by_address, *items, *content,
        *entry, *introduce, *no_tensor, *leaves, *finder;
  } held;
  int64_t is_new, is_leaf;
  bool values;  // they are recorded
  bool wants_inputs;  // of module calls
  bool keep;    // the data of each value
  bool shares;  // snapshots may be copy-on-write
  const void* thread;  // as `this_thread`: that of the mode
  std::unordered_map<PyObject*, Info>* known;  // touched by that thread alone
  std::unordered_map<uint64_t, std::vector<Shape>>* shapes;
  size_t num_shapes;
  std::unordered_map<uint64_t, Line>* lines;
};

constexpr size_t NUM_HELD = sizeof(Way::Held) / sizeof(PyObject*);

Way* way_of(PyObject* self, Ref& holds) {
  holds = attribute(self, names._native);
  return reinterpret_cast<Way*>(holds.get());
}

// Something that no other thread has.
const void* this_thread() {
  static thread_local char here;
  return &here;
}

// A program's thread can be given the modes of another (autograd's are): they have no way of an op in common.
bool is_mine(const Way* way) { return way->thread == this_thread(); }

PyObject** held_of(Way* way) { return reinterpret_cast<PyObject**>(&way->held); }

// -- what stands for a value --------------------------------------------------------------------------

bool is_one_of(PyObject* kinds, PyTypeObject* kind) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); ++i) {
    if (PyTuple_GET_ITEM(kinds, i) == reinterpret_cast<PyObject*>(kind)) return true;
  }
  return false;
}

// A tensor of torch's own classes; nothing that takes part in dispatch.
bool is_plain(Way* way, PyTypeObject* kind) { return is_one_of(way->held.plain, kind); }

bool is_constant(Way* way, PyTypeObject* kind) { return is_one_of(way->held.constants, kind); }

// The class that a tensor has in Python, or would have.
PyTypeObject* class_of(const at::Tensor& tensor) {
#if TORCH_IS_2_13
  PyObject* object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object == nullptr ? reinterpret_cast<PyTypeObject*>(THPVariableClass) : Py_TYPE(object);
#else
  return Py_TYPE(Ref(must(THPVariable_Wrap(tensor))).get());
#endif
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.has_storage() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !tensor.is_neg() &&
         !tensor.is_conj() && !tensor.is_quantized();
}

const Shape& shape_of(Way* way, const at::Tensor& tensor) {
  auto dtype = tensor.scalar_type();
  auto sizes = tensor.sizes();
  auto strides = tensor.strides();
  int64_t offset = tensor.storage_offset();
  uint64_t hash = static_cast<uint64_t>(dtype) * 0x9E3779B97F4A7C15ull ^ static_cast<uint64_t>(offset);
  for (int64_t n : sizes) hash = (hash ^ static_cast<uint64_t>(n)) * 0x9FB21C651E98DF25ull + 1;
  for (int64_t n : strides) hash = (hash ^ static_cast<uint64_t>(n)) * 0xD6E8FEB86659FD93ull + 3;
  hash ^= hash >> 29;
  if (auto known = way->shapes->find(hash); known != way->shapes->end()) {
    for (const Shape& shape : known->second) {
      if (shape.dtype == dtype && shape.offset == offset && sizes == c10::IntArrayRef(shape.sizes) &&
          strides == c10::IntArrayRef(shape.strides)) {
        return shape;
      }
    }
  }
  // Made before the table is touched: what Python does meanwhile may come here as well.
  Ref kind = Ref::to(must(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype))));
  Ref size(must(PyObject_CallOneArg(reinterpret_cast<PyObject*>(&THPSizeType), tuple_of_sizes(sizes).get())));
  Ref g = untracked(tuple_of(kind.get(), integer(offset).get(), size.get(), tuple_of_sizes(strides).get(), zero));
  Ref name(must(PyObject_CallMethodOneArg(way->held.storages, names.name_geometry, g.get())));
  Shape made{dtype, offset, sizes.vec(), strides.vec(), std::move(g), std::move(name)};
  if (way->num_shapes >= MANY_SHAPES) {  // shapes that never come back (a growing cache) must not fill the memory
    way->shapes->clear();
    way->num_shapes = 0;
  }
  ++way->num_shapes;
  auto& among = (*way->shapes)[hash];
  among.push_back(std::move(made));
  return among.back();
}

bool starts_with_int(PyObject* sequence) {
  return PySequence_Fast_GET_SIZE(sequence) > 0 && PyLong_CheckExact(PySequence_Fast_GET_ITEM(sequence, 0));
}

// As `keys.exact`, for what holds no tensors.
Ref exact(Way* way, PyObject* value) {
  if (value == Py_None || PyLong_CheckExact(value) || PyUnicode_CheckExact(value)) return Ref::to(value);
  if (PyBool_Check(value)) return Ref::to(value == Py_True ? true_text : false_text);
  if (PyFloat_CheckExact(value)) return Ref(must(PyObject_CallMethodNoArgs(value, names.hex)));
  if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
    if (starts_with_int(value)) return Ref(must(PySequence_Tuple(value)));
    Py_ssize_t n = PySequence_Fast_GET_SIZE(value);
    Ref made(must(PyTuple_New(n)));
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyTuple_SET_ITEM(made.get(), i, exact(way, PySequence_Fast_GET_ITEM(value, i)).release());
    }
    return made;
  }
  if (is_constant(way, Py_TYPE(value))) return Ref::to(value);
  throw Unusual{};
}

// -- what both modes do ---------------------------------------------------------------------------------

PyObject* the_long_way(PyObject* self, PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  return PyObject_CallMethodObjArgs(
      self, names.dispatch, func, types, args, kwargs == nullptr ? Py_None : kwargs, nullptr);
}

// Null where the overload has not been met. Needs the interpreter lock where it is not known yet.
const Info* info_of(Way* way, PyObject* func) {
  auto found = way->known->find(func);
  if (found != way->known->end()) return &found->second;
  Ref address(must(PyLong_FromVoidPtr(func)));
  PyObject* info = find(way->held.infos, address.get());
  if (info == nullptr) return nullptr;
  Info made{Ref::to(info), attribute(info, names.call), attribute(info, names.base),
            truth(info, names.direct), truth(info, names.quick), truth(info, names.selected),
            truth(info, names.random), whole(info, names.dropout)};
  return &way->known->emplace(func, std::move(made)).first->second;
}

// Whether what an op is told by leads here; else it is for Python to say.
bool goes_here(const Way* way, const Info& info) {
  return way->values ? info.quick : info.direct || !info.selected;
}

bool is_noted(const Way* way, const Info& info) { return way->values || info.direct; }

// Tells the tracer of the Python error that is set; false where it has to go on.
bool tell(Way* way) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  Ref holds_type(type), holds_value(value), holds_trace(trace);
  return static_cast<bool>(Ref(PyObject_CallMethodOneArg(way->held.tracer, names.fault, value)));
}

// Counts the op in its body and appends its row.
void append(Way* way, const Info& info, PyObject* frame, PyObject* body, PyObject* seq,
            PyObject* source, PyObject* facts) {
  Ref counts = attribute(frame, names.counts);
  PyObject* last = find(counts.get(), info.base.get());
  Ref n = integer(last == nullptr ? 0 : PyLong_AsLongLong(last) + 1);
  check(PyDict_SetItem(counts.get(), info.base.get(), n.get()));
  Ref row = untracked(tuple_of(body, seq, frame, n.get(), way->held.thread, source, facts));
  check(PyList_Append(way->held.rows, row.get()));
}

Ref next_seq(PyObject* self, Way* way) {
  Ref seq(must(PyObject_CallNoArgs(way->held.next)));
  set(self, names.last, seq.get());
  return seq;
}

// As `sources.SourceFinder`, from the innermost frame of Python on.
Ref source_of(Way* way) {
  Ref finder = attribute(way->held.tracer, names.find_source);
  if (reinterpret_cast<PyObject*>(Py_TYPE(finder.get())) != way->held.finder) {
    return Ref(must(PyObject_CallOneArg(finder.get(), integer(1).get())));
  }
  Ref internal = attribute(finder.get(), names._internal);
  Ref frame = Ref::to(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* at = reinterpret_cast<PyFrameObject*>(frame.get());
    Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(at)));
    PyObject* file = reinterpret_cast<PyCodeObject*>(code.get())->co_filename;
    PyObject* is_internal = find(internal.get(), file);
    if (is_internal == nullptr) return Ref(must(PyObject_CallOneArg(finder.get(), integer(1).get())));
    if (is_internal == Py_False) {
      int place = PyFrame_GetLasti(at);
      uint64_t key = reinterpret_cast<uintptr_t>(code.get()) * 31 + static_cast<uint64_t>(place);
      auto known = way->lines->find(key);
      if (known != way->lines->end() && known->second.code.get() == code.get() && known->second.place == place) {
        return Ref::to(known->second.source.get());
      }
      Ref source = tuple_of(file, integer(PyFrame_GetLineNumber(at)).get());
      if (way->lines->size() >= MANY_LINES) way->lines->clear();
      (*way->lines)[key] = Line{std::move(code), place, Ref::to(source.get())};
      return source;
    }
    frame = Ref(reinterpret_cast<PyObject*>(PyFrame_GetBack(at)));
  }
  return Ref::to(Py_None);
}

// Does what may fail; false where the error has to go on.
template <typename Work>
bool guarded(Way* way, const Work& work) {
  try {
    work();
    return true;
  } catch (const Raised&) {
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return tell(way);
}

// The frame that wants the op; none where nobody does.
Ref frame_of(Way* way, const Info& info, bool ask) {
  Ref frame = Ref::to(find(way->held.here, names.frame));
  if (!ask && frame && frame.get() != Py_None && !torch::autograd::get_current_node()) return frame;
  return Ref(must(
      PyObject_CallFunctionObjArgs(way->held.site, way->held.tracer, way->held.state, info.info.get(), nullptr)));
}

}  // namespace
