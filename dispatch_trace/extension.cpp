// What is done once for each op and each value, compiled: what `capture.values` and `capture.meta` do, the same
// questions in the same order and the same rows, so that either may go on where the other stopped; and the
// look at a tensor that `store.layouts` hashes. What is not the plain case goes to Python.
//
// Guarantees: the op runs once, on its own arguments, outside everything that can fail here; an exception of
// its own goes on untouched; all that is noted is noted with the interpreter lock held.
#include <string>
#include <unordered_map>
#include <vector>

#include "extension_calls.h"
#include "extension_direct.h"

namespace {

// -- the modes' `__torch_dispatch__` -----------------------------------------------------------------------

c10::OperatorHandle operator_of(PyObject* func) {
  Ref schema = attribute(func, names._schema);
  auto text = [&](PyObject* name) {
    return std::string(must_text(PyUnicode_AsUTF8(attribute(schema.get(), name).get())));
  };
  return c10::Dispatcher::singleton().findSchemaOrThrow(text(names.name).c_str(), text(names.overload_name).c_str());
}

PyObject* dispatch(PyObject*, PyObject* const* given, Py_ssize_t n) {
  if (n < 3 || n > 5) {
    PyErr_SetString(PyExc_TypeError, "expected func, types, args and kwargs");
    return nullptr;
  }
  PyObject *self = given[0], *func = given[1], *types = given[2];
  Ref args = Ref::to(n > 3 ? given[3] : empty_tuple);
  PyObject* kwargs = n > 4 && given[4] != Py_None && PyDict_GET_SIZE(given[4]) != 0 ? given[4] : nullptr;
  try {
    Ref holds;
    Way* way = way_of(self, holds);
    bool is_known = PyObject_Size(types) == 0 && is_mine(way) && find(way->held.here, names.busy) == Py_False;
    const Info* info = is_known ? info_of(way, func) : nullptr;
    if (info == nullptr || !goes_here(way, *info)) return the_long_way(self, func, types, args.get(), kwargs);
    Ref out(PyObject_Call(info->call.get(), args.get(), kwargs));
    if (!out || !is_noted(way, *info)) return out.release();
    bool goes_on = guarded(way, [&] {
      c10::OperatorHandle op = operator_of(func);
      Values arguments = from_python(op.schema(), args.get(), kwargs);
      Values results = from_python(op.schema(), out.get());
      note(self, way, Call{&op.schema(), info, std::move(arguments), results});
    });
    return goes_on ? out.release() : nullptr;
  } catch (const Raised&) {
    return nullptr;
  }
}

// Where the mode has been put on this thread's stack, and where it has been taken off.
PyObject* started(PyObject*, PyObject* const* given, Py_ssize_t) {
  try {
    Ref holds;
    begin_direct(given[0], way_of(given[0], holds));
    Py_RETURN_NONE;
  } catch (const Raised&) {
    return nullptr;
  }
}

PyObject* stopped(PyObject*, PyObject* const* given, Py_ssize_t) {
  end_direct(given[0]);
  Py_RETURN_NONE;
}

PyObject* value_inputs(PyObject*, PyObject* const* given, Py_ssize_t n) {
  if (n != 3) {
    PyErr_SetString(PyExc_TypeError, "expected args and kwargs");
    return nullptr;
  }
  try {
    Ref holds;
    Way* way = way_of(given[0], holds);
    try {
      return leaves_of_inputs(given[0], way, given[1], given[2]).release();
    } catch (const Unusual&) {
      return PyObject_CallMethodObjArgs(given[0], names.plain_inputs_of, given[1], given[2], nullptr);
    }
  } catch (const Raised&) {
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

template <void (*noted)(PyObject*, Way*, PyObject*, PyObject*, PyObject*)>
PyObject* note_call(PyObject*, PyObject* const* given, Py_ssize_t n) {
  if (n != 3 && n != 4) {
    PyErr_SetString(PyExc_TypeError, "expected frame, out and note");
    return nullptr;
  }
  PyObject* note = n == 4 ? given[3] : no_text;
  try {
    Ref holds;
    Way* way = way_of(given[0], holds);
    bool goes_on = guarded(way, [&] {
      try {
        noted(given[0], way, given[1], given[2], note);
      } catch (const Unusual&) {
        Ref done(must(PyObject_CallMethodObjArgs(given[0], names.plain_note_module, given[1], given[2], note,
                                                 nullptr)));
      }
    });
    if (!goes_on) return nullptr;
  } catch (const Raised&) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* enter_call(PyObject*, PyObject* const* given, Py_ssize_t n) {
  if (n != 5) {
    PyErr_SetString(PyExc_TypeError, "expected site, module, args and kwargs");
    return nullptr;
  }
  try {
    Ref holds;
    return enter(given[0], way_of(given[0], holds), given[1], given[2], given[3], given[4]).release();
  } catch (const Raised&) {
    return nullptr;
  }
}

PyObject* leave_call(PyObject*, PyObject* const* given, Py_ssize_t n) {
  if (n != 3) {
    PyErr_SetString(PyExc_TypeError, "expected frame and out");
    return nullptr;
  }
  try {
    Ref holds;
    leave(given[0], way_of(given[0], holds), given[1], given[2]);
  } catch (const Raised&) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

// -- values to be hashed -----------------------------------------------------------------------------------

// What goes before the bytes in a hash (docs/format.md, "Hash").
struct Label {
  c10::ScalarType dtype;
  std::vector<int64_t> sizes;
  Ref text;
};

const Ref& label_of(const at::Tensor& tensor) {
  static auto* known = new std::unordered_map<uint64_t, std::vector<Label>>();
  auto dtype = tensor.scalar_type();
  auto sizes = tensor.sizes();
  uint64_t hash = static_cast<uint64_t>(dtype);
  for (int64_t n : sizes) hash = (hash ^ static_cast<uint64_t>(n)) * 0x9FB21C651E98DF25ull + 1;
  if (known->size() > MANY_SHAPES) known->clear();
  auto& found = (*known)[hash];
  for (const Label& label : found) {
    if (label.dtype == dtype && sizes == c10::IntArrayRef(label.sizes)) return label.text;
  }
  std::string text = std::string(torch::getTHPDtype(dtype)->name) + "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? "," : "") + std::to_string(sizes[i]);
  text += "]";
  found.push_back({dtype, sizes.vec(), Ref(must(PyBytes_FromStringAndSize(text.data(), text.size())))});
  return found.back().text;
}

// (label, memory) of a tensor whose memory is its logical bytes, as `layouts.is_plain` says; else None.
PyObject* plain(PyObject*, PyObject* value) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != THPVariableClass) Py_RETURN_NONE;
  try {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (!tensor.is_cpu() || !is_dense(tensor) || !tensor.is_contiguous()) Py_RETURN_NONE;
    static char nothing;
    auto size = static_cast<Py_ssize_t>(tensor.numel() * tensor.element_size());
    const void* start = tensor.const_data_ptr();  // does not copy what is copy-on-write
    if (size != 0 && start == nullptr) Py_RETURN_NONE;
    char* memory = size == 0 ? &nothing : static_cast<char*>(const_cast<void*>(start));
    const Ref& label = label_of(tensor);
    Ref view(must(PyMemoryView_FromMemory(memory, size, PyBUF_READ)));
    return tuple_of(label.get(), view.get()).release();
  } catch (const Raised&) {
    return nullptr;
  } catch (const std::exception&) {
    Py_RETURN_NONE;
  }
}

// -- the module ------------------------------------------------------------------------------------------

PyObject* new_way(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* held;
  long long is_new, is_leaf;
  int inputs, keep, shares;
  if (!PyArg_ParseTuple(args, "O!LLppp", &PyTuple_Type, &held, &is_new, &is_leaf, &inputs, &keep, &shares)) {
    return nullptr;
  }
  if (PyTuple_GET_SIZE(held) != static_cast<Py_ssize_t>(NUM_HELD)) {
    PyErr_Format(PyExc_TypeError, "expected %zu objects", NUM_HELD);
    return nullptr;
  }
  auto* way = reinterpret_cast<Way*>(type->tp_alloc(type, 0));
  if (way == nullptr) return nullptr;
  for (size_t i = 0; i < NUM_HELD; ++i) {
    held_of(way)[i] = PyTuple_GET_ITEM(held, i);
    Py_INCREF(held_of(way)[i]);
  }
  way->is_new = is_new;
  way->is_leaf = is_leaf;
  way->values = way->held.storages != Py_None;
  way->thread = this_thread();
  way->wants_inputs = inputs != 0;
  way->keep = keep != 0;
  way->shares = shares != 0;
  way->known = new std::unordered_map<PyObject*, Info>();
  way->shapes = new std::unordered_map<uint64_t, std::vector<Shape>>();
  way->num_shapes = 0;
  way->lines = new std::unordered_map<uint64_t, Line>();
  return reinterpret_cast<PyObject*>(way);
}

int traverse_way(PyObject* self, visitproc visit, void* arg) {
  for (size_t i = 0; i < NUM_HELD; ++i) Py_VISIT(held_of(reinterpret_cast<Way*>(self))[i]);
  return 0;
}

void free_way(PyObject* self) {
  PyObject_GC_UnTrack(self);
  auto* way = reinterpret_cast<Way*>(self);
  for (size_t i = 0; i < NUM_HELD; ++i) Py_CLEAR(held_of(way)[i]);
  delete way->known;
  delete way->shapes;
  delete way->lines;
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject WayType = {PyVarObject_HEAD_INIT(nullptr, 0)};

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
bool add_method(PyObject* module, const char* name, const char* text) {
  static PyMethodDef method = {
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, text};
  // Bound like a Python function where it stands in a class.
  Ref plain(PyCFunction_New(&method, nullptr));
  Ref bound(plain ? PyInstanceMethod_New(plain.get()) : nullptr);
  return bound && PyModule_AddObjectRef(module, name, bound.get()) == 0;
}

PyMethodDef functions[] = {
    {"plain", plain, METH_O, "(label, memory) of a tensor whose memory is its bytes; else None."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "dispatch_trace_extension", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_dispatch_trace_extension() {
#define INTERN(name) \
  if ((names.name = PyUnicode_InternFromString(#name)) == nullptr) return nullptr;
  NAMES(INTERN)
#undef INTERN
  true_text = PyUnicode_InternFromString("true");
  false_text = PyUnicode_InternFromString("false");
  empty_text = PyUnicode_InternFromString("empty");
  out_text = PyUnicode_InternFromString("out");
  no_text = PyUnicode_InternFromString("");
  empty_tuple = PyTuple_New(0);
  zero = PyLong_FromLong(0);
  minus_one = PyLong_FromLong(-1);
  WayType.tp_name = "dispatch_trace_extension.Way";
  WayType.tp_basicsize = sizeof(Way);
  WayType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  WayType.tp_new = new_way;
  WayType.tp_dealloc = free_way;
  WayType.tp_traverse = traverse_way;
  WayType.tp_free = PyObject_GC_Del;
  if (PyType_Ready(&WayType) < 0) return nullptr;
  Ref module(PyModule_Create(&definition));
  if (!module || PyModule_AddObjectRef(module.get(), "Way", reinterpret_cast<PyObject*>(&WayType)) < 0 ||
      !add_method<dispatch>(module.get(), "dispatch", "As the mode's __torch_dispatch__.") ||
      !add_method<started>(module.get(), "started", "The mode has been put on this thread's stack.") ||
      !add_method<stopped>(module.get(), "stopped", "The mode has been taken off this thread's stack.") ||
      !add_method<value_inputs>(module.get(), "value_inputs", "As ValueRecorder.inputs_of.") ||
      !add_method<note_call<note_module>>(module.get(), "value_note_module", "As ValueRecorder.note_module.") ||
      !add_method<note_call<note_shapes_of_module>>(module.get(), "meta_note_module",
                                                    "As MetaRecorder.note_module.") ||
      !add_method<enter_call>(module.get(), "enter", "As RowRecorder.enter.") ||
      !add_method<leave_call>(module.get(), "leave", "As RowRecorder.leave.")) {
    return nullptr;
  }
  return module.release();
}
