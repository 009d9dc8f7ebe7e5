// A simulated Neuron device for tests: PyTorch's spare device type PrivateUse1, with host memory behind it.
//
// What it is for: tensors that really are on another device. `.to("neuron")` copies, `tensor.device` says
// `neuron:0`, mixing devices is an error, and every op is dispatched under PrivateUse1. What it is not:
// anything like Neuron's numerics. Ops run as the CPU's kernels on copies of their arguments.
//
// Python (device.py) renames the device type, adds `torch.neuron` and asks this module what ran.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr c10::DeviceType kSimulated = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device the_device() {
  return c10::Device(kSimulated, 0);
}

// -- memory ----------------------------------------------------------------------------------------------

// The context of a DataPtr is its data and `raw_deleter` is free: both together make the pointer "simple",
// without which neither `storage.resize_` nor copy-on-write clones work.
struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = num_bytes ? std::malloc(num_bytes) : nullptr;
    TORCH_CHECK(data || !num_bytes, "simulated device: no memory for ", num_bytes, " bytes");
    return {data, data, &release, the_device()};
  }
  static void release(void* data) {
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
};

HostAllocator allocator;
REGISTER_ALLOCATOR(kSimulated, &allocator);

// -- one device, one stream, nothing to wait for ---------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSimulated;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return the_device();
  }
  c10::Device getDevice() const override {
    return the_device();
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, the_device());
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, the_device());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// `torch.accelerator` asks the guard and these hooks; without them `.to("neuron")` refuses to initialise.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    c10::DataPtr larger = allocator.allocate(num_bytes);
    std::memcpy(larger.get(), storage.data(), std::min(num_bytes, storage.nbytes()));
    storage.set_data_ptr(std::move(larger));
    storage.set_nbytes(num_bytes);
  }
};

// -- copies ----------------------------------------------------------------------------------------------

// The same memory as a CPU tensor: what the host may read and write directly, because it is host memory.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    return tensor;
  }
  char* data = static_cast<char*>(tensor.storage().mutable_data());
  data = data ? data + tensor.storage_offset() * tensor.element_size() : nullptr;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

// Every copy that has this device on one side, or both: `.to`, `.cpu()`, `copy_`, `clone`.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool /*non_blocking*/) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  return on_host(tensor).item();
}

// -- factories -------------------------------------------------------------------------------------------

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> memory_format) {
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// -- all other ops ---------------------------------------------------------------------------------------

std::mutex executed_lock;
std::vector<std::string> executed;

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  {
    const std::lock_guard<std::mutex> guard(executed_lock);
    executed.push_back(op.schema().operator_name().name);
  }
  at::native::cpu_fallback(op, stack);
}

// `scaled_dot_product_attention` asks each device for its fused kernel. The CPU's answer, which the fallback
// would give, names a kernel that only the CPU has; "math" is the composite that runs on any device.
int64_t choose_math_attention(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// Views must alias, so they cannot go through the fallback, which works on copies.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_fused_sdp_choice", &choose_math_attention);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view.dtype", &at::native::view_dtype);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks; // lives as long as the process, as torch keeps the pointer
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("executed_ops", [] {
    const std::lock_guard<std::mutex> guard(executed_lock);
    return executed;
  });
  m.def("clear_executed_ops", [] {
    const std::lock_guard<std::mutex> guard(executed_lock);
    executed.clear();
  });
}
