// What is done once for each op and each value, compiled: what `capture.values` and `capture.meta` do, the same
// questions in the same order, the same rows and the same keys, so that either may go on where the other
// stopped; and the look at a tensor that `store.layouts` hashes. What is not the plain case goes to Python.
//
// Guarantees: the op runs once, on its own arguments, outside everything that can fail here; an exception of
// its own goes on untouched; the interpreter lock is held throughout, but for what the op itself lets go of.
#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/_lazy_clone.h>
#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <unordered_map>
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

void check(int code) {
  if (code < 0) throw Raised{};
}

// Interned names, made once.
#define NAMES(X) X(_announce) X(_credit) X(_internal) X(_native) X(_new_body) X(_next_number)           \
  X(_note) X(_purge_at) X(_record) X(_snapshot) X(active) X(alignment) X(base) X(busy) X(call)          \
  X(contents) X(counts) X(definitions) X(direct) X(dispatch) X(draws) X(facts) X(fault)                 \
  X(find_source) X(frame) X(hex) X(id) X(inputs) X(keep_data) X(key) X(last) X(leaf) X(leaves)          \
  X(module) X(nbytes) X(num_bytes) X(number) X(number_geometry) X(op) X(origin) X(parameters)           \
  X(plain_inputs_of) X(plain_note_module) X(purge) X(put_rows_of) X(quick) X(random) X(ready)           \
  X(records_ops) X(selected) X(shares_bodies) X(summarise) X(tensor) X(told) X(values) X(version)       \
  X(versions) X(weak) X(writer) X(writes)
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

Ref tuple_of_sizes(c10::IntArrayRef sizes) {
  Ref made(must(PyTuple_New(sizes.size())));
  for (size_t i = 0; i < sizes.size(); ++i) PyTuple_SET_ITEM(made.get(), i, integer(sizes[i]).release());
  return made;
}

// What is fixed about an overload: `ops.OpInfo`, of which these are attributes.
struct Info {
  Ref info, call, base;
  bool direct, quick, selected, random;
};

// A geometry of a dense tensor, with the Python objects that stand for it.
struct Shape {
  c10::ScalarType dtype;
  int64_t offset;
  std::vector<int64_t> sizes, strides;
  Ref g;       // (dtype, offset, shape, strides, 0)
  Ref number;  // of `Storages.number_geometry`; none with `save="meta"`
  Ref brief;   // (shape, dtype)
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
    PyObject *here, *infos, *bodies, *rows, *tracer, *state, *next, *thread, *site, *keywords, *plain,
        *constants, *storages, *by_address, *items, *content, *entry, *introduce, *no_tensor,
        *leaves, *finder;
  } held;
  int64_t is_new, is_leaf;
  bool keep;
  std::unordered_map<PyObject*, Info>* known;
  std::unordered_map<uint64_t, std::vector<Shape>>* shapes;
  size_t num_shapes;
  std::unordered_map<uint64_t, Line>* lines;
};

constexpr size_t NUM_HELD = sizeof(Way::Held) / sizeof(PyObject*);

PyObject** held_of(Way* way) { return reinterpret_cast<PyObject**>(&way->held); }

// -- what stands for a value --------------------------------------------------------------------------

// A tensor of torch's own classes; nothing that takes part in dispatch.
bool is_plain(Way* way, PyTypeObject* kind) {
  PyObject* plain = way->held.plain;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plain); ++i) {
    if (PyTuple_GET_ITEM(plain, i) == reinterpret_cast<PyObject*>(kind)) return true;
  }
  return false;
}

bool is_constant(Way* way, PyTypeObject* kind) {
  PyObject* constants = way->held.constants;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(constants); ++i) {
    if (PyTuple_GET_ITEM(constants, i) == reinterpret_cast<PyObject*>(kind)) return true;
  }
  return false;
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.has_storage() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !tensor.is_neg() &&
         !tensor.is_conj() && !tensor.is_quantized();
}

const Shape& shape_of(Way* way, const at::Tensor& tensor, bool numbered) {
  auto dtype = tensor.scalar_type();
  auto sizes = tensor.sizes();
  auto strides = numbered ? tensor.strides() : c10::IntArrayRef();
  int64_t offset = numbered ? tensor.storage_offset() : 0;
  uint64_t hash = static_cast<uint64_t>(dtype) * 0x9E3779B97F4A7C15ull ^ static_cast<uint64_t>(offset);
  for (int64_t n : sizes) hash = (hash ^ static_cast<uint64_t>(n)) * 0x9FB21C651E98DF25ull + 1;
  for (int64_t n : strides) hash = (hash ^ static_cast<uint64_t>(n)) * 0xD6E8FEB86659FD93ull + 3;
  hash ^= hash >> 29;
  auto& found = (*way->shapes)[hash];
  for (const Shape& shape : found) {
    if (shape.dtype == dtype && shape.offset == offset && sizes == c10::IntArrayRef(shape.sizes) &&
        strides == c10::IntArrayRef(shape.strides)) {
      return shape;
    }
  }
  Shape made{dtype, offset, sizes.vec(), strides.vec(), Ref(), Ref(), Ref()};
  Ref kind = Ref::to(must(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype))));
  Ref size(must(PyObject_CallOneArg(reinterpret_cast<PyObject*>(&THPSizeType), tuple_of_sizes(sizes).get())));
  if (numbered) {
    made.g = tuple_of(kind.get(), integer(offset).get(), size.get(), tuple_of_sizes(strides).get(), zero);
    made.number = Ref(must(PyObject_CallMethodOneArg(way->held.storages, names.number_geometry, made.g.get())));
  } else {
    made.brief = tuple_of(size.get(), kind.get());
  }
  if (++way->num_shapes > MANY_SHAPES) {
    // Shapes that never come back (a growing cache) must not fill the memory.
    way->shapes->clear();
    way->num_shapes = 1;
    auto& anew = (*way->shapes)[hash];
    anew.push_back(std::move(made));
    return anew.back();
  }
  found.push_back(std::move(made));
  return found.back();
}

bool starts_with_int(PyObject* sequence) {
  return PySequence_Fast_GET_SIZE(sequence) > 0 && PyLong_CheckExact(PySequence_Fast_GET_ITEM(sequence, 0));
}

// As `keys.exact`; tensors as (shape, dtype) where they may stand there.
Ref exact(Way* way, PyObject* value, bool tensors) {
  if (value == Py_None || PyLong_CheckExact(value) || PyUnicode_CheckExact(value)) return Ref::to(value);
  if (PyBool_Check(value)) return Ref::to(value == Py_True ? true_text : false_text);
  if (PyFloat_CheckExact(value)) return Ref(must(PyObject_CallMethodNoArgs(value, names.hex)));
  if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
    if (starts_with_int(value)) return Ref(must(PySequence_Tuple(value)));
    Py_ssize_t n = PySequence_Fast_GET_SIZE(value);
    Ref made(must(PyTuple_New(n)));
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyTuple_SET_ITEM(made.get(), i, exact(way, PySequence_Fast_GET_ITEM(value, i), tensors).release());
    }
    return made;
  }
  if (tensors && is_plain(way, Py_TYPE(value))) {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (tensor.is_nested() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) throw Unusual{};
    return Ref::to(shape_of(way, tensor, false).brief.get());
  }
  if (is_constant(way, Py_TYPE(value))) return Ref::to(value);
  throw Unusual{};
}

// -- what both modes do ---------------------------------------------------------------------------------

PyObject* the_long_way(PyObject* self, PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  return PyObject_CallMethodObjArgs(
      self, names.dispatch, func, types, args, kwargs == nullptr ? Py_None : kwargs, nullptr);
}

// Null where the overload has not been met.
const Info* info_of(Way* way, PyObject* func) {
  auto found = way->known->find(func);
  if (found != way->known->end()) return &found->second;
  Ref address(must(PyLong_FromVoidPtr(func)));
  PyObject* info = find(way->held.infos, address.get());
  if (info == nullptr) return nullptr;
  Info made{Ref::to(info), attribute(info, names.call), attribute(info, names.base),
            truth(info, names.direct), truth(info, names.quick), truth(info, names.selected),
            truth(info, names.random)};
  return &way->known->emplace(func, std::move(made)).first->second;
}

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

// As `tracer.SourceFinder`, from the innermost frame of Python on.
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

// -- with values ----------------------------------------------------------------------------------------

struct Made {
  const at::Tensor* tensor;  // null for what is no tensor
  c10::StorageImpl* storage;
  Ref entry;  // none: of a new storage
  Ref g, number;
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
Ref read_tensor(Noting& noting, PyObject* value) {
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
  }
  check(PyList_Append(noting.facts.get(), fact));
  return Ref::to(PyTuple_GET_ITEM(fact, 6));
}

// As `ValueRecorder._read`.
Ref read(Noting& noting, PyObject* value) {
  Way* way = noting.way;
  if (value == Py_None) return Ref::to(value);
  if (is_plain(way, Py_TYPE(value))) return read_tensor(noting, value);
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
  Ref g = Ref::to(shape.g.get()), number = Ref::to(shape.number.get());
  if (entry) {
    Ref told = attribute(entry.get(), names.told);
    if (told.get() != Py_None && !may_alias(entry.get(), told.get(), g.get())) throw Unusual{};
  } else {
    for (const Made& other : noting.made) {
      if (other.tensor != nullptr && !other.entry && other.storage == storage) throw Unusual{};
    }
  }
  int64_t num_bytes = entry ? -1 : static_cast<int64_t>(storage->nbytes());
  noting.key.push_back(Ref::to(number.get()));
  noting.key.push_back(integer(num_bytes));
  noting.made.push_back(
      Made{&tensor, storage, std::move(entry), std::move(g), std::move(number), num_bytes});
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
    copy = at::_lazy_clone(tensor);
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
  Ref index = integer(slot), content, known, flags = integer(0), number, num_bytes, alignment;
  Ref content_or_none = Ref::to(Py_None);
  known = Ref::to(Py_None);
  if (!made.entry) {
    take_credit(self, made.num_bytes);
    num_bytes = integer(made.num_bytes);
    // Looked at without asking for it to write, which would copy what is shared.
    alignment = integer(static_cast<int64_t>(reinterpret_cast<uintptr_t>(made.storage->data()) % 64));
    content_or_none = content_of(way, *made.tensor, num_bytes.get());
    known = Ref::to(content_or_none.get());
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
  number = attribute(entry, names.number);
  Ref producers = untracked(tuple_of(untracked(tuple_of(seq, index.get())).get()));
  Ref facts = attribute(entry, names.facts);
  Ref fact = untracked(tuple_of(number.get(), num_bytes.get(), alignment.get(), producers.get(), known.get(),
                                flags.get(), made.number.get()));
  check(PyDict_SetItem(facts.get(), made.g.get(), fact.get()));
  return untracked(tuple_of(number.get(), num_bytes.get(), alignment.get(), empty_tuple, content_or_none.get(),
                            zero, made.number.get()));
}

// As `ValueRecorder._note`. Returns null where a row was noted, else the key to record it by.
Ref note_values(PyObject* self, Way* way, const Info& info, PyObject* frame, PyObject* args, PyObject* kwargs,
                PyObject* out) {
  if (c10::impl::TorchDispatchModeTLS::stack_len() != 0 || at::impl::PythonTorchFunctionTLS::stack_len() != 0) {
    return Ref::to(empty_tuple);
  }
  if (info.random) {
    Ref none(kwargs == nullptr ? must(PyDict_New()) : nullptr);
    Ref draws(must(PyObject_CallMethodObjArgs(
        info.info.get(), names.draws, args, kwargs == nullptr ? none.get() : kwargs, nullptr)));
    if (draws.get() != Py_False) return Ref::to(empty_tuple);
  }
  Noting noting;
  noting.way = way;
  noting.has_items = PyDict_GET_SIZE(way->held.items) != 0;
  noting.facts = untracked(Ref(must(PyList_New(0))));
  noting.key.reserve(16);
  Ref whole_key;
  try {
    noting.key.push_back(Ref::to(info.info.get()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
      noting.key.push_back(read(noting, PyTuple_GET_ITEM(args, i)));
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
  whole_key = Ref(must(PyTuple_New(noting.key.size())));
  for (size_t i = 0; i < noting.key.size(); ++i) {
    PyTuple_SET_ITEM(whole_key.get(), i, noting.key[i].release());
  }
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

// -- module calls with values ------------------------------------------------------------------------------

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
  Ref made = untracked(Ref(must(PyTuple_New(PyTuple_GET_SIZE(fact)))));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fact); ++i) {
    PyTuple_SET_ITEM(made.get(), i, Ref::to(i == 4 ? content.get() : PyTuple_GET_ITEM(fact, i)).release());
  }
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
    check(PyList_Append(found.key.get(), untracked(tuple_of(name, exact(way, value, false).get())).get()));
    check(PyList_Append(found.facts.get(), way->held.no_tensor));
    check(PyList_Append(found.values.get(), value));
    return;
  }
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (!is_dense(tensor)) throw Unusual{};
  Ref entry = entry_of(way, tensor.storage().unsafeGetStorageImpl());
  Ref g = Ref::to(shape_of(way, tensor, true).g.get());
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
  set(leaves.get(), names.key, Ref(must(PyList_AsTuple(found.key.get()))).get());
  set(leaves.get(), names.facts, found.facts.get());
  set(leaves.get(), names.values, found.values.get());
  return leaves;
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
    Ref returned = Ref::to(fact);
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(fact, 5)) != 0) {
      returned = untracked(Ref(must(PyTuple_New(PyTuple_GET_SIZE(fact)))));
      for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(fact); ++at) {
        PyTuple_SET_ITEM(returned.get(), at, Ref::to(at == 5 ? zero : PyTuple_GET_ITEM(fact, at)).release());
      }
    }
    check(PyList_Append(facts.get(), returned.get()));
  }
  Ref seq = next_seq(self, way);
  Ref row =
      untracked(tuple_of(body.get(), seq.get(), frame, zero, way->held.thread, Py_None, facts.get()));
  check(PyList_Append(way->held.rows, row.get()));
  if (PyList_GET_SIZE(way->held.rows) > MANY_ROWS) {
    Ref writer = attribute(way->held.tracer, names.writer);
    Ref done(must(PyObject_CallMethodOneArg(writer.get(), names.put_rows_of, self)));
  }
}

// -- without values --------------------------------------------------------------------------------------

// As the body of `MetaRecorder.__torch_dispatch__`, with the keys of `keys.call_key`.
void note_shapes(PyObject* self, Way* way, const Info& info, PyObject* frame, PyObject* args,
                 PyObject* kwargs, PyObject* out) {
  Ref key(must(PyList_New(0)));
  auto add = [&key](const Ref& part) { check(PyList_Append(key.get(), part.get())); };
  add(Ref::to(info.info.get()));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) add(exact(way, PyTuple_GET_ITEM(args, i), true));
  if (kwargs != nullptr) {
    add(Ref::to(way->held.keywords));
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(kwargs, &at, &name, &value)) {
      add(Ref::to(name));
      add(exact(way, value, true));
    }
  }
  add(exact(way, out, true));
  Ref whole_key(must(PyList_AsTuple(key.get())));
  Ref body = Ref::to(find(way->held.bodies, whole_key.get()));
  if (!body || !truth(frame, names.shares_bodies)) {
    body = Ref(must(PyObject_CallMethodObjArgs(self, names._new_body, whole_key.get(), frame, info.info.get(), args,
                                               kwargs == nullptr ? Py_None : kwargs, out, nullptr)));
  }
  Ref seq = next_seq(self, way);
  append(way, info, frame, body.get(), seq.get(), Py_None, Py_None);
}

// -- the modes' `__torch_dispatch__` -----------------------------------------------------------------------

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

PyObject* dispatch(PyObject* const* given, Py_ssize_t n, bool values) {
  if (n < 3 || n > 5) {
    PyErr_SetString(PyExc_TypeError, "expected func, types, args and kwargs");
    return nullptr;
  }
  PyObject *self = given[0], *func = given[1], *types = given[2];
  Ref args = Ref::to(n > 3 ? given[3] : empty_tuple);
  PyObject* kwargs = n > 4 && given[4] != Py_None && PyDict_GET_SIZE(given[4]) != 0 ? given[4] : nullptr;
  try {
    Ref holds = attribute(self, names._native);
    Way* way = reinterpret_cast<Way*>(holds.get());
    const Info* info = info_of(way, func);
    bool has_types = PyObject_Size(types) != 0;
    Ref frame;
    if (values) {
      if (has_types || info == nullptr || !info->quick || find(way->held.here, names.busy) != Py_False) {
        return the_long_way(self, func, types, args.get(), kwargs);
      }
      bool ask = !truth(way->held.tracer, names.active);
      frame = frame_of(way, *info, ask);
    } else {
      if (has_types || info == nullptr || !info->direct) {
        if (info == nullptr || has_types || info->selected) {
          return the_long_way(self, func, types, args.get(), kwargs);
        }
        return PyObject_Call(info->call.get(), args.get(), kwargs);
      }
      frame = frame_of(way, *info, false);
    }
    bool wanted = frame.get() != Py_None && truth(frame.get(), names.records_ops);
    Ref out(PyObject_Call(info->call.get(), args.get(), kwargs));
    if (!out || !wanted) return out.release();
    bool goes_on = true;
    if (values) {
      goes_on = guarded(way, [&] {
        Ref key = note_values(self, way, *info, frame.get(), args.get(), kwargs, out.get());
        if (!key) return;
        Ref none(kwargs == nullptr ? must(PyDict_New()) : nullptr);
        Ref done(must(PyObject_CallMethodObjArgs(self, names._record, key.get(), frame.get(), info->info.get(),
                                                 args.get(), kwargs == nullptr ? none.get() : kwargs,
                                                 out.get(), nullptr)));
      });
    } else {
      goes_on = guarded(way, [&] {
        try {
          note_shapes(self, way, *info, frame.get(), args.get(), kwargs, out.get());
        } catch (const Unusual&) {
          Ref none(kwargs == nullptr ? must(PyDict_New()) : nullptr);
          Ref done(must(PyObject_CallMethodObjArgs(self, names._note, frame.get(), info->info.get(), args.get(),
                                                   kwargs == nullptr ? none.get() : kwargs, out.get(),
                                                   nullptr)));
        }
      });
    }
    return goes_on ? out.release() : nullptr;
  } catch (const Raised&) {
    return nullptr;
  }
}

PyObject* value_dispatch(PyObject*, PyObject* const* given, Py_ssize_t n) { return dispatch(given, n, true); }
PyObject* meta_dispatch(PyObject*, PyObject* const* given, Py_ssize_t n) { return dispatch(given, n, false); }

Way* way_of(PyObject* self, Ref& holds) {
  holds = attribute(self, names._native);
  return reinterpret_cast<Way*>(holds.get());
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

PyObject* value_note_module(PyObject*, PyObject* const* given, Py_ssize_t n) {
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
        note_module(given[0], way, given[1], given[2], note);
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
  int keep;
  if (!PyArg_ParseTuple(args, "O!LLp", &PyTuple_Type, &held, &is_new, &is_leaf, &keep)) return nullptr;
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
  way->keep = keep != 0;
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
      !add_method<value_dispatch>(module.get(), "value_dispatch", "As ValueRecorder.__torch_dispatch__.") ||
      !add_method<meta_dispatch>(module.get(), "meta_dispatch", "As MetaRecorder.__torch_dispatch__.") ||
      !add_method<value_inputs>(module.get(), "value_inputs", "As ValueRecorder.inputs_of.") ||
      !add_method<value_note_module>(module.get(), "value_note_module", "As ValueRecorder.note_module.")) {
    return nullptr;
  }
  return module.release();
}
