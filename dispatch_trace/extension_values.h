// Ops with their values: what `capture.values` notes of one, by the same rules.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/_lazy_clone.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "extension_way.h"

namespace {

struct Made {
  const at::Tensor* tensor;  // null for what is no tensor
  c10::StorageImpl* storage;
  Ref entry;  // none: of a new storage
  Ref g, name;
  int64_t num_bytes;
};

struct New {
  Ref entry, g;
  Py_ssize_t slot;
};

struct Noting {
  Way* way;
  bool has_items;
  std::vector<Ref> key;
  Ref facts;
  std::vector<New> introduced;
  std::vector<Made> made;
};

Ref entry_of(Way* way, c10::StorageImpl* storage) {
  Ref address(must(PyLong_FromVoidPtr(storage)));
  return Ref::to(find(way->held.by_address, address.get()));
}

// As `ValueRecorder._look` and what is done with it.
Ref read_tensor(Noting& noting, PyObject* value, bool is_argument) {
  Way* way = noting.way;
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (!is_dense(tensor)) throw Unusual{};
  Ref entry = entry_of(way, tensor.storage().unsafeGetStorageImpl());
  if (!entry) throw Unusual{};
  const Shape& shape = shape_of(way, tensor, true);
  Ref facts = attribute(entry.get(), names.facts);
  PyObject* fact = find(facts.get(), shape.g.get());
  if (fact == nullptr) throw Unusual{};
  if (truth(entry.get(), names.versions) && !tensor.is_inference() &&
      static_cast<int64_t>(tensor._version()) > whole(entry.get(), names.version)) {
    throw Unusual{};
  }
  int64_t flags = PyLong_AsLongLong(PyTuple_GET_ITEM(fact, 5));
  if (flags >= way->is_new) {
    noting.introduced.push_back(
        {std::move(entry), Ref::to(shape.g.get()), PyList_GET_SIZE(noting.facts.get())});
  } else if (is_argument && flags == 0 && reinterpret_cast<PyObject*>(Py_TYPE(value)) == ParameterClass &&
             PyTuple_GET_SIZE(PyTuple_GET_ITEM(fact, 3)) < 2) {
    throw Unusual{};  // given the memory of something else: no record of the parameter shows this
  }
  check(PyList_Append(noting.facts.get(), fact));
  return Ref::to(PyTuple_GET_ITEM(fact, 6));
}

// As `ValueRecorder._read`.
Ref read(Noting& noting, PyObject* value) {
  Way* way = noting.way;
  if (value == Py_None) return Ref::to(value);
  if (is_plain(way, Py_TYPE(value))) return read_tensor(noting, value, false);
  if (noting.has_items && (PyLong_CheckExact(value) || PyFloat_CheckExact(value))) {
    if (find(way->held.items, value) != nullptr) throw Unusual{};
  }
  if ((PyList_CheckExact(value) || PyTuple_CheckExact(value)) && PySequence_Fast_GET_SIZE(value) > 0 &&
      (noting.has_items || !starts_with_int(value))) {
    Py_ssize_t n = PySequence_Fast_GET_SIZE(value);
    Ref made(must(PyTuple_New(n)));
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyTuple_SET_ITEM(made.get(), i, read(noting, PySequence_Fast_GET_ITEM(value, i)).release());
    }
    return made;
  }
  return exact(way, value, false);
}

bool is_text(PyObject* value, PyObject* text) {
  return value == text || (PyUnicode_CheckExact(value) && PyUnicode_Compare(value, text) == 0);
}

// As `values._may_alias`.
bool may_alias(PyObject* entry, PyObject* told, PyObject* g) {
  Ref writes = attribute(told, names.writes), parameters = attribute(told, names.parameters);
  Ref origin = attribute(entry, names.origin);
  return PyObject_Size(writes.get()) == 0 && !is_text(origin.get(), empty_text) &&
         find(parameters.get(), g) == nullptr;
}

void look_at_output(Noting& noting, PyObject* value) {
  Way* way = noting.way;
  // The class itself: a parameter that an op returns is no new value.
  if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != PyTuple_GET_ITEM(way->held.plain, 0)) {
    noting.key.push_back(exact(way, value, false));
    noting.made.push_back(Made{});
    return;
  }
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (!is_dense(tensor) || !tensor.is_cpu()) throw Unusual{};
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  Ref entry = entry_of(way, storage);
  const Shape& shape = shape_of(way, tensor, true);
  Ref g = Ref::to(shape.g.get()), name = Ref::to(shape.name.get());
  if (entry) {
    Ref told = attribute(entry.get(), names.told);
    if (told.get() != Py_None && !may_alias(entry.get(), told.get(), g.get())) throw Unusual{};
  } else {
    for (const Made& other : noting.made) {
      if (other.tensor != nullptr && !other.entry && other.storage == storage) throw Unusual{};
    }
  }
  int64_t num_bytes = entry ? -1 : static_cast<int64_t>(storage->nbytes());
  noting.key.push_back(Ref::to(name.get()));
  noting.key.push_back(integer(num_bytes));
  noting.made.push_back(
      Made{&tensor, storage, std::move(entry), std::move(g), std::move(name), num_bytes});
}

// An instance whose `__init__` is not called: its slots are set here.
Ref instance(PyObject* cls) {
  auto* type = reinterpret_cast<PyTypeObject*>(cls);
  return untracked(Ref(must(type->tp_alloc(type, 0))));
}

void take_credit(PyObject* self, int64_t num_bytes) {
  int64_t credit = whole(self, names._credit);
  if (num_bytes > credit) {
    Ref done(must(PyObject_CallMethodOneArg(self, names._announce, integer(num_bytes).get())));
    credit = whole(self, names._credit);
  }
  set(self, names._credit, integer(credit - num_bytes).get());
}

// As `Storages.add`.
Ref add_entry(Way* way, c10::StorageImpl* storage, PyObject* num_bytes, PyObject* alignment,
              const at::Tensor& tensor) {
  PyObject* storages = way->held.storages;
  Ref entry = instance(way->held.entry);
  set(entry.get(), names.number, Ref(must(PyObject_CallMethodNoArgs(storages, names._next_number))).get());
  set(entry.get(), names.nbytes, num_bytes);
  set(entry.get(), names.alignment, alignment);
  set(entry.get(), names.origin, names.op);
  set(entry.get(), names.facts, Ref(must(PyDict_New())).get());
  set(entry.get(), names.told, Py_None);
  bool counts = !tensor.is_inference();
  set(entry.get(), names.versions, counts ? Py_True : Py_False);
  set(entry.get(), names.version, counts ? integer(tensor._version()).get() : zero);
  Ref address(must(PyLong_FromVoidPtr(storage)));
  Ref weak(must(PyLong_FromVoidPtr(c10::raw::intrusive_ptr::make_weak(storage))));
  set(entry.get(), names.weak, weak.get());
  check(PyDict_SetItem(way->held.by_address, address.get(), entry.get()));
  if (PyDict_GET_SIZE(way->held.by_address) > whole(storages, names._purge_at)) {
    Ref done(must(PyObject_CallMethodNoArgs(storages, names.purge)));
  }
  return entry;
}

Ref content_of(Way* way, const at::Tensor& tensor, PyObject* num_bytes) {
  at::Tensor copy;
  try {
    copy = way->shares ? at::_lazy_clone(tensor) : tensor.clone();
  } catch (const c10::Error&) {  // storage that torch does not own
    copy = tensor.clone();
  }
  Ref content = instance(way->held.content);
  set(content.get(), names.tensor, Ref(must(THPVariable_Wrap(std::move(copy)))).get());
  set(content.get(), names.keep_data, way->keep ? Py_True : Py_False);
  set(content.get(), names.summarise, Py_True);
  set(content.get(), names.num_bytes, num_bytes);
  set(content.get(), names.ready, Py_None);
  set(content.get(), names.id, minus_one);
  return content;
}

// As `ValueRecorder._define`.
Ref define(PyObject* self, Way* way, Made& made, PyObject* seq, Py_ssize_t slot) {
  Ref index = integer(slot), flags = integer(0), num_bytes, alignment;
  Ref content = Ref::to(Py_None), known = Ref::to(Py_None);
  if (!made.entry) {
    take_credit(self, made.num_bytes);
    num_bytes = integer(made.num_bytes);
    // Looked at without asking for it to write, which would copy what is shared.
    alignment = integer(static_cast<int64_t>(reinterpret_cast<uintptr_t>(made.storage->data()) % 64));
    content = content_of(way, *made.tensor, num_bytes.get());
    known = Ref::to(content.get());
    made.entry = add_entry(way, made.storage, num_bytes.get(), alignment.get(), *made.tensor);
  } else {
    PyObject* entry = made.entry.get();
    num_bytes = attribute(entry, names.nbytes);
    alignment = attribute(entry, names.alignment);
    Ref told = attribute(entry, names.told);
    if (told.get() == Py_None) {
      Ref facts = attribute(entry, names.facts);
      PyObject* fact = find(facts.get(), made.g.get());
      if (fact != nullptr) known = Ref::to(PyTuple_GET_ITEM(fact, 4));
    } else {
      Ref definitions = attribute(told.get(), names.definitions);
      check(PyDict_SetItem(definitions.get(), made.g.get(), untracked(tuple_of(seq, index.get(), zero)).get()));
      Ref contents = attribute(told.get(), names.contents);
      PyObject* held = find(contents.get(), made.g.get());
      if (held != nullptr) known = Ref::to(held);
      Ref origin = attribute(entry, names.origin), leaves = attribute(told.get(), names.leaves);
      if (is_text(origin.get(), names.leaf)) {
        int inside = PySet_Contains(leaves.get(), made.g.get());
        check(inside);
        if (inside) flags = integer(way->is_leaf);
      }
    }
  }
  PyObject* entry = made.entry.get();
  Ref number = attribute(entry, names.number);
  Ref producers = untracked(tuple_of(untracked(tuple_of(seq, index.get())).get()));
  Ref facts = attribute(entry, names.facts);
  Ref fact = untracked(tuple_of(number.get(), num_bytes.get(), alignment.get(), producers.get(), known.get(),
                                flags.get(), made.name.get()));
  check(PyDict_SetItem(facts.get(), made.g.get(), fact.get()));
  return untracked(tuple_of(number.get(), num_bytes.get(), alignment.get(), empty_tuple, content.get(),
                            zero, made.name.get()));
}

// As `ValueRecorder._note`. Returns null where a row was noted, else the key to record it by.
Ref note_values(PyObject* self, Way* way, const Info& info, PyObject* frame, PyObject* args, PyObject* kwargs,
                PyObject* out) {
  if (c10::impl::TorchDispatchModeTLS::stack_len() != 0 || at::impl::PythonTorchFunctionTLS::stack_len() != 0) {
    return Ref::to(empty_tuple);
  }
  if (info.random) {
    Ref draws(must(PyObject_CallMethodObjArgs(info.info.get(), names.draws, args, dict_of(kwargs).get(), nullptr)));
    if (draws.get() != Py_False) return Ref::to(empty_tuple);
  }
  Noting noting;
  noting.way = way;
  noting.has_items = PyDict_GET_SIZE(way->held.items) != 0;
  noting.facts = untracked(Ref(must(PyList_New(0))));
  noting.key.reserve(16);
  try {
    noting.key.push_back(Ref::to(info.info.get()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
      PyObject* value = PyTuple_GET_ITEM(args, i);
      bool is_tensor = is_plain(way, Py_TYPE(value));
      noting.key.push_back(is_tensor ? read_tensor(noting, value, true) : read(noting, value));
    }
    if (kwargs != nullptr) {
      noting.key.push_back(Ref::to(way->held.keywords));
      PyObject *name, *value;
      Py_ssize_t at = 0;
      while (PyDict_Next(kwargs, &at, &name, &value)) {
        noting.key.push_back(Ref::to(name));
        noting.key.push_back(read(noting, value));
      }
    }
    if (PyTuple_CheckExact(out) || PyList_CheckExact(out)) {
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(out); ++i) {
        look_at_output(noting, PySequence_Fast_GET_ITEM(out, i));
      }
    } else if (out != Py_None) {
      look_at_output(noting, out);
    }
  } catch (const Unusual&) {
    return Ref::to(empty_tuple);
  }
  Ref whole_key = tuple_from(noting.key);
  Ref body = Ref::to(find(way->held.bodies, whole_key.get()));
  if (!body || !truth(frame, names.shares_bodies)) return whole_key;

  Ref seq = next_seq(self, way);
  PyObject* facts = noting.facts.get();
  for (New& each : noting.introduced) {
    Ref fact(must(PyObject_CallFunctionObjArgs(way->held.introduce, each.entry.get(), each.g.get(), seq.get(),
                                               integer(each.slot).get(), nullptr)));
    check(PyList_SetItem(facts, each.slot, fact.release()));
  }
  for (Made& each : noting.made) {
    Py_ssize_t slot = PyList_GET_SIZE(facts);
    Ref fact = each.tensor == nullptr ? Ref::to(way->held.no_tensor) : define(self, way, each, seq.get(), slot);
    check(PyList_Append(facts, fact.get()));
  }
  Ref source = source_of(way);
  append(way, info, frame, body.get(), seq.get(), source.get(), facts);
  return Ref();
}

}  // namespace
