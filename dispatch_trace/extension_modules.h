// Module calls with the values that they took and returned: what `capture.values` notes of one.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "extension_values.h"

namespace {

// A snapshot of a value that fills a storage which is copy-on-write already, as `ValueRecorder._snapshot`.
Ref share(PyObject* self, Way* way, const at::Tensor& tensor, PyObject* entry, PyObject* g, PyObject* fact) {
  PyObject* num_bytes = PyTuple_GET_ITEM(fact, 1);
  take_credit(self, PyLong_AsLongLong(num_bytes));
  Ref content;
  {
    c10::AutoGradMode no_grad(false);
    c10::impl::ExcludeDispatchKeyGuard no_modes(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    content = content_of(way, tensor, num_bytes);
  }
  Ref told = attribute(entry, names.told);
  if (told.get() != Py_None) {
    Ref contents = attribute(told.get(), names.contents);
    check(PyDict_SetItem(contents.get(), g, content.get()));
  }
  Ref made = with_item(fact, 4, content.get());
  Ref facts = attribute(entry, names.facts);
  check(PyDict_SetItem(facts.get(), g, made.get()));
  return made;
}

bool is_shared(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  if (!c10::impl::cow::is_cow_data_ptr(storage.data_ptr()) || tensor.storage_offset() != 0) return false;
  for (int64_t stride : tensor.strides()) {
    if (stride == 0) return false;
  }
  return static_cast<size_t>(tensor.numel()) * tensor.element_size() == storage.nbytes();
}

// What is gathered for an instance of `values.Leaves`.
struct Gathered {
  Ref key = list(), facts = list(), values = list();
  static Ref list() { return untracked(Ref(must(PyList_New(0)))); }
};

// One leaf with its name, as in `ValueRecorder._leaves`.
void gather(PyObject* self, Way* way, Gathered& found, PyObject* name, PyObject* value) {
  if (!is_plain(way, Py_TYPE(value))) {
    if (value != Py_None && !PyLong_Check(value) && !PyFloat_CheckExact(value) && !PyUnicode_CheckExact(value)) {
      throw Unusual{};  // structures are taken apart elsewhere
    }
    check(PyList_Append(found.key.get(), untracked(tuple_of(name, exact(way, value).get())).get()));
    check(PyList_Append(found.facts.get(), way->held.no_tensor));
    check(PyList_Append(found.values.get(), value));
    return;
  }
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (!is_dense(tensor)) throw Unusual{};
  Ref entry = entry_of(way, tensor.storage().unsafeGetStorageImpl());
  Ref g = Ref::to(shape_of(way, tensor).g.get());
  Ref fact;
  if (entry && !(truth(entry.get(), names.versions) && !tensor.is_inference() &&
                 static_cast<int64_t>(tensor._version()) > whole(entry.get(), names.version))) {
    Ref facts = attribute(entry.get(), names.facts);
    fact = Ref::to(find(facts.get(), g.get()));
  }
  if (!fact || PyTuple_GET_ITEM(fact.get(), 4) == Py_None) {
    if (fact && is_shared(tensor)) {
      fact = share(self, way, tensor, entry.get(), g.get(), fact.get());
    } else {
      Ref seen = fact ? tuple_of(entry.get(), g.get(), fact.get()) : Ref::to(Py_None);
      Ref made(must(PyObject_CallMethodObjArgs(self, names._snapshot, value, seen.get(), nullptr)));
      if (made.get() == Py_None) throw Unusual{};
      fact = Ref::to(PyTuple_GET_ITEM(made.get(), 2));
    }
  }
  check(PyList_Append(found.key.get(), untracked(tuple_of(name, PyTuple_GET_ITEM(fact.get(), 6))).get()));
  check(PyList_Append(found.facts.get(), fact.get()));
  check(PyList_Append(found.values.get(), g.get()));
}

// `in[0]`, `out[2]`: the names of leaves by their place.
Ref place_name(const char* side, Py_ssize_t place) {
  constexpr Py_ssize_t FEW = 16;
  static PyObject* known[2][FEW];
  bool is_out = side[0] == 'o';
  if (place >= FEW) return Ref(must(PyUnicode_FromFormat("%s[%zd]", side, place)));
  PyObject*& name = known[is_out][place];
  if (name == nullptr) name = must(PyUnicode_FromFormat("%s[%zd]", side, place));
  return Ref::to(name);
}

// As `ValueRecorder.inputs_of`.
Ref leaves_of_inputs(PyObject* self, Way* way, PyObject* args, PyObject* kwargs) {
  Gathered found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    gather(self, way, found, place_name("in", i).get(), PyTuple_GET_ITEM(args, i));
  }
  PyObject *name, *value;
  Py_ssize_t at = 0;
  while (PyDict_Next(kwargs, &at, &name, &value)) {
    gather(self, way, found, Ref(must(PyUnicode_FromFormat("in.%U", name))).get(), value);
  }
  Ref leaves = instance(way->held.leaves);
  set(leaves.get(), names.key, untracked(Ref(must(PyList_AsTuple(found.key.get())))).get());
  set(leaves.get(), names.facts, found.facts.get());
  set(leaves.get(), names.values, found.values.get());
  return leaves;
}

// Appends the row of a module call that has returned.
void append_module(PyObject* self, Way* way, PyObject* frame, PyObject* body, PyObject* facts) {
  Ref seq = next_seq(self, way);
  Ref row = untracked(tuple_of(body, seq.get(), frame, zero, way->held.thread, Py_None, facts));
  check(PyList_Append(way->held.rows, row.get()));
  if (PyList_GET_SIZE(way->held.rows) > MANY_ROWS) {
    Ref writer = attribute(way->held.tracer, names.writer);
    Ref done(must(PyObject_CallMethodOneArg(writer.get(), names.put_rows_of, self)));
  }
}

// As `ValueRecorder.note_module`; Unusual where that has to do it.
void note_module(PyObject* self, Way* way, PyObject* frame, PyObject* out, PyObject* note) {
  Ref inputs = attribute(frame, names.inputs);
  if (reinterpret_cast<PyObject*>(Py_TYPE(inputs.get())) != way->held.leaves ||
      !truth(frame, names.shares_bodies)) {
    throw Unusual{};
  }
  Gathered found;
  if (PyTuple_CheckExact(out) && PyTuple_GET_SIZE(out) != 0) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(out); ++i) {
      gather(self, way, found, place_name("out", i).get(), PyTuple_GET_ITEM(out, i));
    }
  } else {
    gather(self, way, found, out_text, out);
  }
  Ref ins = attribute(inputs.get(), names.key), outs(must(PyList_AsTuple(found.key.get())));
  Ref key = tuple_of(names.module, note, ins.get(), outs.get());
  Ref body = Ref::to(find(way->held.bodies, key.get()));
  if (!body) throw Unusual{};
  Ref given = attribute(inputs.get(), names.facts);
  Ref facts = untracked(Ref(must(PyList_GetSlice(given.get(), 0, PyList_GET_SIZE(given.get())))));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(found.facts.get()); ++i) {
    PyObject* fact = PyList_GET_ITEM(found.facts.get(), i);
    bool has_flags = PyLong_AsLongLong(PyTuple_GET_ITEM(fact, 5)) != 0;
    Ref returned = has_flags ? with_item(fact, 5, zero) : Ref::to(fact);
    check(PyList_Append(facts.get(), returned.get()));
  }
  append_module(self, way, frame, body.get(), facts.get());
}

}  // namespace
