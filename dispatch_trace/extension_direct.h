// Modes that the dispatcher calls without going through Python.
//
// For each op under a dispatch mode the dispatcher asks torch's `PyInterpreter`, by a table of functions, to call the
// mode. While a mode of ours is on the stack of some thread, that table is one of ours. It runs the op itself
// and has it noted, where our mode is on top of its thread's stack and the op is the plain case; all else,
// tensor subclasses and what is unusual among it, goes on to torch's table, and so comes to `__torch_dispatch__`.
#pragma once

#include "extension_note.h"

#if TORCH_IS_2_13

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>

#include <atomic>

namespace {

using c10::SymBool, c10::SymInt, c10::SymIntArrayRef, c10::TensorImpl;

using Table = c10::impl::PyInterpreterVTable;

// Torch's own, while ours is in its place.
const Table*& kept_table() {
  static const Table* kept = nullptr;
  return kept;
}

const Table& torchs() { return *kept_table(); }

// The interpreter lock, for as long as this lasts.
class Locked {
 public:
  Locked() : state_(PyGILState_Ensure()) {}
  ~Locked() { PyGILState_Release(state_); }
  Locked(const Locked&) = delete;

 private:
  PyGILState_STATE state_;
};

// Does everything as torch's; see `Direct` for what it does not.
struct AsTorchs : Table {
  std::string name() const override { return torchs().name(); }
  void incref(PyObject* object) const override { torchs().incref(object); }
  void decref(PyObject* object) const override { torchs().decref(object); }
  bool try_incref(const c10::impl::PyObjectSlot& slot) const override { return torchs().try_incref(slot); }
  size_t refcnt(PyObject* object) const override { return torchs().refcnt(object); }
  c10::intrusive_ptr<TensorImpl> detach(const TensorImpl* self) const override { return torchs().detach(self); }
  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    torchs().dispatch(op, stack);
  }
  void reportErrorCallback(PyObject* callback, c10::DispatchKey key) const override {
    torchs().reportErrorCallback(callback, key);
  }
  void python_op_registration_trampoline(const c10::OperatorHandle& op, c10::DispatchKey key,
                                         c10::DispatchKeySet keys, torch::jit::Stack* stack, bool with_keyset,
                                         bool with_op) const override {
    torchs().python_op_registration_trampoline(op, key, keys, stack, with_keyset, with_op);
  }
  void throw_abstract_impl_not_imported_error(std::string name, const char* module,
                                              const char* context) const override {
    torchs().throw_abstract_impl_not_imported_error(std::move(name), module, context);
  }
  void python_dispatcher(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) const override {
    torchs().python_dispatcher(op, keys, stack);
  }
  bool is_contiguous(const TensorImpl* self, at::MemoryFormat format) const override {
    return torchs().is_contiguous(self, format);
  }
  SymBool sym_is_contiguous(const TensorImpl* self, at::MemoryFormat format) const override {
    return torchs().sym_is_contiguous(self, format);
  }
  bool is_strides_like(const TensorImpl* self, at::MemoryFormat format) const override {
    return torchs().is_strides_like(self, format);
  }
  bool is_non_overlapping_and_dense(const TensorImpl* self) const override {
    return torchs().is_non_overlapping_and_dense(self);
  }
  c10::Device device(const TensorImpl* self) const override { return torchs().device(self); }
  int64_t dim(const TensorImpl* self) const override { return torchs().dim(self); }
  c10::IntArrayRef strides(const TensorImpl* self) const override { return torchs().strides(self); }
  c10::IntArrayRef sizes(const TensorImpl* self) const override { return torchs().sizes(self); }
  SymIntArrayRef sym_sizes(const TensorImpl* self) const override { return torchs().sym_sizes(self); }
  c10::Layout layout(const TensorImpl* self) const override { return torchs().layout(self); }
  int64_t numel(const TensorImpl* self) const override { return torchs().numel(self); }
  SymInt sym_numel(const TensorImpl* self) const override { return torchs().sym_numel(self); }
  SymIntArrayRef sym_strides(const TensorImpl* self) const override { return torchs().sym_strides(self); }
  SymInt sym_storage_offset(const TensorImpl* self) const override { return torchs().sym_storage_offset(self); }
  void trace_gpu_event_creation(c10::DeviceType type, uintptr_t event) const override {
    torchs().trace_gpu_event_creation(type, event);
  }
  void trace_gpu_event_deletion(c10::DeviceType type, uintptr_t event) const override {
    torchs().trace_gpu_event_deletion(type, event);
  }
  void trace_gpu_event_record(c10::DeviceType type, uintptr_t event, uintptr_t stream) const override {
    torchs().trace_gpu_event_record(type, event, stream);
  }
  void trace_gpu_event_wait(c10::DeviceType type, uintptr_t event, uintptr_t stream) const override {
    torchs().trace_gpu_event_wait(type, event, stream);
  }
  void trace_gpu_memory_allocation(c10::DeviceType type, uintptr_t address) const override {
    torchs().trace_gpu_memory_allocation(type, address);
  }
  void trace_gpu_memory_deallocation(c10::DeviceType type, uintptr_t address) const override {
    torchs().trace_gpu_memory_deallocation(type, address);
  }
  void trace_gpu_stream_creation(c10::DeviceType type, uintptr_t stream) const override {
    torchs().trace_gpu_stream_creation(type, stream);
  }
  void trace_gpu_device_synchronization(c10::DeviceType type) const override {
    torchs().trace_gpu_device_synchronization(type);
  }
  void trace_gpu_stream_synchronization(c10::DeviceType type, uintptr_t stream) const override {
    torchs().trace_gpu_stream_synchronization(type, stream);
  }
  void trace_gpu_event_synchronization(c10::DeviceType type, uintptr_t event) const override {
    torchs().trace_gpu_event_synchronization(type, event);
  }
  void reset_backward_hooks(const TensorImpl* self) const override { torchs().reset_backward_hooks(self); }
};

using OnStack = c10::impl::TorchDispatchModeTLS;

// A mode of ours on this thread's stack.
struct Running {
  PyObject* mode;
  Way* way;
};

std::vector<Running>& running() {
  static thread_local std::vector<Running> modes;
  return modes;
}

// Null where the mode on top is not ours.
const Running* on_top() {
  const auto& modes = running();
  auto depth = OnStack::stack_len();
  if (modes.empty() || depth == 0) return nullptr;
  PyObject* top = OnStack::get_stack_at(depth - 1)->ptr(getPyInterpreter());
  for (auto each = modes.rbegin(); each != modes.rend(); ++each) {
    if (each->mode == top) return &*each;
  }
  return nullptr;
}

const Info* info_of(Way* way, const c10::OperatorHandle& op) {
  PyObject* func = op.getPythonOp([&] {
    Locked lock;
    return torch::detail::getTorchApiFunction(op).ptr();
  });
  auto found = way->known->find(func);
  if (found != way->known->end()) return &found->second;
  Locked lock;
  const Info* info = nullptr;
  if (!guarded(way, [&] { info = info_of(way, func); })) throw python_error();
  return info;
}

bool sees_ops(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

struct Direct final : AsTorchs {
  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    const Running* found = on_top();
    if (found == nullptr) return torchs().dispatch(op, stack);
    auto [mode, way] = *found;
    const auto& schema = op.schema();
    auto given = torch::jit::last(*stack, schema.arguments().size());
    const Info* info = info_of(way, op);
    if (info == nullptr || !goes_here(way, *info) || any_tensor(given, sees_ops)) {
      return torchs().dispatch(op, stack);
    }
    torch::torch_dispatch_mode::StashTorchDispatchModeGuard below;
    if (!is_noted(way, *info)) return op.callBoxed(stack);
    Call call{&schema, info, given.vec(), {}};
    op.callBoxed(stack);
    call.outs = torch::jit::last(*stack, schema.returns().size());
    Locked lock;
    if (!guarded(way, [&] { note(mode, way, call); })) throw python_error();
  }
};

// All three with the interpreter lock held.
size_t& num_running() {
  static size_t count = 0;
  return count;
}

void set_table(const Table* table) {
  std::atomic_ref<const Table*>(getPyInterpreter()->vtable_).store(table, std::memory_order_release);
}

const Table* our_table() {
  static const auto* ours = new Direct();  // never freed: other threads may be in it
  return ours;
}

void begin_direct(PyObject* mode, Way* way) {
  running().push_back({mode, way});
  Py_INCREF(reinterpret_cast<PyObject*>(way));
  if (num_running()++ == 0 && getPyInterpreter()->vtable_ != our_table()) {
    kept_table() = getPyInterpreter()->vtable_;
    set_table(our_table());
  }
}

void end_direct(PyObject* mode) {
  auto& modes = running();
  for (size_t i = modes.size(); i-- > 0;) {
    if (modes[i].mode != mode) continue;
    Ref way(reinterpret_cast<PyObject*>(modes[i].way));
    modes.erase(modes.begin() + static_cast<std::ptrdiff_t>(i));
    if (--num_running() == 0 && getPyInterpreter()->vtable_ == our_table()) set_table(kept_table());
    return;
  }
}

}  // namespace

#else

namespace {

void begin_direct(PyObject*, Way*) {}
void end_direct(PyObject*) {}

}  // namespace

#endif
