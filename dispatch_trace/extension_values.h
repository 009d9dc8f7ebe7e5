// Ops with their values: what `capture.values` notes of one, by the same rules.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/_lazy_clone.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "extension_call.h"

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
  Key key;
  Ref facts;
  std::vector<New> introduced;
  std::vector<Made> made;
};

Ref entry_of(Way* way, c10::StorageImpl* storage) {
  Ref address(must(PyLong_FromVoidPtr(storage)));
  return Ref::to(find(way->held.by_address, address.get()));
}

// As `ValueRecorder._look` and what is done with it.
void read_tensor(Noting& noting, const at::Tensor& tensor, bool is_argument) {
  Way* way = noting.way;
  PyTypeObject* kind = class_of(tensor);
  if (!is_plain(way, kind) || !is_dense(tensor)) throw Unusual{};
  Ref entry = entry_of(way, tensor.storage().unsafeGetStorageImpl());
  if (!entry) throw Unusual{};
  const Shape& shape = shape_of(way, tensor);
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
  } else if (is_argument && flags == 0 && reinterpret_cast<PyObject*>(kind) == ParameterClass &&
             PyTuple_GET_SIZE(PyTuple_GET_ITEM(fact, 3)) < 2) {
    throw Unusual{};  // given the memory of something else: no record of the parameter shows this
  }
  check(PyList_Append(noting.facts.get(), fact));
  noting.key.geometry(tensor);
}

// As `ValueRecorder._read`.
void read(Noting& noting, const c10::IValue& value) {
  bool is_argument = is_tensor(value);
  describe(noting.key, value, [&](const at::Tensor& each) { read_tensor(noting, each, is_argument); });
}

// Whether a number is what an op has read from a tensor.
bool is_item(Way* way, const c10::IValue& given) {
  const c10::IValue value = plain_value(given);
  Ref number;
  if (value.isInt()) {
    number = integer(value.toInt());
  } else if (value.isDouble()) {
    number = Ref(must(PyFloat_FromDouble(value.toDouble())));
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) {
      if (is_item(way, each)) return true;
    }
  }
  return number && find(way->held.items, number.get()) != nullptr;
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

void look_at_output(Noting& noting, const c10::IValue& value) {
  Way* way = noting.way;
  if (!is_tensor(value)) {
    describe(noting.key, value, [](const at::Tensor&) { throw Unusual{}; });
    noting.made.push_back(Made{});
    return;
  }
  const at::Tensor& tensor = value.toTensor();
  // The class itself: a parameter that an op returns is no new value.
  if (reinterpret_cast<PyObject*>(class_of(tensor)) != PyTuple_GET_ITEM(way->held.plain, 0)) throw Unusual{};
  if (!is_dense(tensor) || !tensor.is_cpu()) throw Unusual{};
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  Ref entry = entry_of(way, storage);
  const Shape& shape = shape_of(way, tensor);
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
  noting.key.geometry(tensor);
  noting.key.word(num_bytes);
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
  set(content.get(), names.tensor, untracked(Ref(must(THPVariable_Wrap(std::move(copy))))).get());
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

// As `OpInfo.draws`.
bool draws(const Call& call) {
  if (!call.info->random || call.info->dropout < 0) return call.info->random;
  const c10::IValue& p = call.args[static_cast<size_t>(call.info->dropout)];
  return !(p.isDouble() && p.toDouble() == 0.0);
}

// As `ValueRecorder._note`. Returns null where a row was noted, else the key to record it by.
Ref note_values(PyObject* self, Way* way, PyObject* frame, const Call& call) {
  if (c10::impl::TorchDispatchModeTLS::stack_len() != 0 || at::impl::PythonTorchFunctionTLS::stack_len() != 0 ||
      draws(call)) {
    return Ref::to(empty_tuple);
  }
  const Info& info = *call.info;
  Noting noting{way, Key(info), untracked(Ref(must(PyList_New(0)))), {}, {}};
  bool has_items = PyDict_GET_SIZE(way->held.items) != 0;
  try {
    for (const c10::IValue& value : call.args) {
      if (has_items && is_item(way, value)) throw Unusual{};
      read(noting, value);
    }
    if (call.outs.size() == 1 && call.outs[0].isList()) {
      for (const c10::IValue& each : call.outs[0].toListRef()) look_at_output(noting, each);
    } else if (call.outs.size() != 1 || !is_none(call.outs[0])) {
      for (const c10::IValue& each : call.outs) look_at_output(noting, each);
    }
  } catch (const Unusual&) {
    return Ref::to(empty_tuple);
  }
  Ref whole_key = noting.key.made();
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
