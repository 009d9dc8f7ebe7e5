// A module call entered and left, as `rows.RowRecorder` does both, where the call is nothing but the forward of the
// module's class.
#pragma once

#include <torch/csrc/jit/frontend/tracer.h>

#include "extension_modules.h"

namespace {

bool holds_nothing(PyObject* dict) {
  if (PyDict_Check(dict)) return PyDict_GET_SIZE(dict) == 0;
  int found = PyObject_IsTrue(dict);
  check(found);
  return found == 0;
}

// As `plain_calls.calls_forward_only`.
bool calls_forward_only(Way* way, PyObject* module, PyObject* wrapper) {
  Ref own(must(PyObject_GenericGetDict(module, nullptr)));
  for (PyObject* name : {names._forward_hooks, names._forward_pre_hooks, names._backward_hooks,
                         names._backward_pre_hooks}) {
    PyObject* hooks = find(own.get(), name);
    if (hooks == nullptr || !holds_nothing(hooks)) return false;
  }
  if (find(own.get(), names.forward) != nullptr || find(own.get(), names._compiled_call_impl) != nullptr) return false;
  auto* cls = reinterpret_cast<PyObject*>(Py_TYPE(module));
  if (attribute(cls, names.forward).get() != wrapper) return false;
  if (attribute(cls, names._call_impl).get() != way->held.call_impl) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(way->held.hooks); ++i) {
    if (!holds_nothing(PyTuple_GET_ITEM(way->held.hooks, i))) return false;
  }
  return torch::jit::tracer::getTracingState() == nullptr;
}

bool same_text(PyObject* a, PyObject* b) { return a == b || PyUnicode_Compare(a, b) == 0; }

// Takes a number as `Counters.next_of`; none where another thread is about to.
Ref next_call(Way* way, PyObject* calls, PyObject* key) {
  Ref locked(must(PyObject_CallMethodNoArgs(way->held.counting, names.locked)));
  if (locked.get() != Py_False) return Ref();
  PyObject* last = find(calls, key);
  Ref number = integer(last == nullptr ? 0 : PyLong_AsLongLong(last) + 1);
  check(PyDict_SetItem(calls, key, number.get()));
  return number;
}

// (shape, dtype), as `meta.inputs_of` says of one tensor; none where it has to say itself.
Ref shape_and_dtype(Way* way, PyObject* value) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != PyTuple_GET_ITEM(way->held.plain, 0)) return Ref();
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (!is_dense(tensor)) return Ref();
  Ref shape = untracked(attribute(value, names.shape));
  return untracked(tuple_of(shape.get(), reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()))));
}

Ref inputs_of(PyObject* self, Way* way, PyObject* args, PyObject* kwargs) {
  if (!way->values && PyTuple_GET_SIZE(args) == 1 && PyDict_GET_SIZE(kwargs) == 0) {
    Ref made = shape_and_dtype(way, PyTuple_GET_ITEM(args, 0));
    if (made) return made;
  }
  return Ref(must(PyObject_CallMethodObjArgs(self, names.inputs_of, args, kwargs, nullptr)));
}

void mark(Way* way, PyObject* frame) {
  if (!c10::GradMode::is_enabled()) return;
  Ref done(must(PyObject_CallFunctionObjArgs(way->held.mark, way->held.state, frame, nullptr)));
}

// As `RowRecorder.enter`.
Ref enter(PyObject* self, Way* way, PyObject* site, PyObject* module, PyObject* args, PyObject* kwargs) {
  PyObject* here = way->held.here;
  Ref parent = Ref::to(find(here, names.frame)), none = Ref::to(Py_None);
  if (!parent || parent.get() == Py_None || torch::autograd::get_current_node()) return none;
  Ref model = attribute(site, names.model);
  if (!same_text(attribute(parent.get(), names.model).get(), model.get())) return none;
  if (!truth(way->held.tracer, names.active)) return none;
  if (way->values && (PySet_GET_SIZE(way->held.written) != 0 || at::impl::PythonTorchFunctionTLS::stack_len() != 0)) {
    return none;
  }
  if (!calls_forward_only(way, module, attribute(site, names.forward).get())) return none;
  Ref step = attribute(parent.get(), names.step), calls = attribute(parent.get(), names.calls);
  if (calls.get() == Py_None) {
    Ref counters = attribute(way->held.tracer, names.counters);
    calls = Ref(must(PyObject_CallMethodObjArgs(counters.get(), names.calls_of, model.get(), step.get(), nullptr)));
    set(parent.get(), names.calls, calls.get());
  }
  Ref number = next_call(way, calls.get(), attribute(site, names.key).get());
  if (!number) return none;
  Ref returns = attribute(site, names.records_module), frame = instance(way->held.frame);
  set(frame.get(), names.model, model.get());
  set(frame.get(), names.path, attribute(site, names.path).get());
  set(frame.get(), names.call, number.get());
  set(frame.get(), names.phase, names.fwd);
  set(frame.get(), names.step, step.get());
  set(frame.get(), names.module, module);
  set(frame.get(), names.parent, parent.get());
  set(frame.get(), names.records_ops, attribute(site, names.records_ops).get());
  set(frame.get(), names.records_module, returns.get());
  set(frame.get(), names.counts, Ref(must(PyDict_New())).get());
  set(frame.get(), names.calls, calls.get());
  set(frame.get(), names.is_root, Py_False);
  set(frame.get(), names.mode, Py_None);
  set(frame.get(), names.rested, Py_None);
  int64_t opened = std::max(whole(self, names.last) + 1, whole(way->held.tracer, names.upcoming));
  set(frame.get(), names.opened, integer(opened).get());
  set(frame.get(), names.inputs, Ref(must(PyList_New(0))).get());
  if (returns.get() == Py_True && way->wants_inputs) {
    bool goes_on = guarded(way, [&] { set(frame.get(), names.inputs, inputs_of(self, way, args, kwargs).get()); });
    if (!goes_on) throw Raised{};
  }
  mark(way, frame.get());
  check(PyDict_SetItem(here, names.frame, frame.get()));
  return frame;
}

// As `RowRecorder.leave`.
void leave(PyObject* self, Way* way, PyObject* frame, PyObject* out) {
  Ref parent = attribute(frame, names.parent);
  check(PyDict_SetItem(way->held.here, names.frame, parent.get()));
  mark(way, parent.get());
  if (truth(frame, names.records_module)) {
    Ref done(must(PyObject_CallMethodObjArgs(self, names.note_module, frame, out, nullptr)));
  }
  set(frame, names.module, Py_None);
}

// As `MetaRecorder.note_module` of one tensor to another; Unusual where that has to do it.
void note_shapes_of_module(PyObject* self, Way* way, PyObject* frame, PyObject* out, PyObject* note) {
  Ref inputs = attribute(frame, names.inputs);
  Ref outputs = PyTuple_CheckExact(inputs.get()) ? shape_and_dtype(way, out) : Ref();
  if (!outputs) throw Unusual{};
  Ref key = tuple_of(note, inputs.get(), outputs.get());
  Ref body = Ref::to(find(way->held.bodies, key.get()));
  if (!body) throw Unusual{};
  append_module(self, way, frame, body.get(), Py_None);
}

}  // namespace
