// A device "cuda" for a torch without CUDA, whose memory is the host's: whatever torch has no kernel of CUDA's for runs
// on the CPU, over the same bytes. Shapes, views and what operations are made of stay torch's own.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zero_ops.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

using c10::DataPtr;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using c10::StorageImpl;

const Device kGpu(c10::DeviceType::CUDA, 0);
const Device kHost(c10::DeviceType::CPU);
constexpr DispatchKeySet kOnHost(DispatchKey::CPU);
constexpr size_t kPage = 4096;
// Pieces of this size are the system's own zero pages until they are written to: a KV pool may be as large as a card.
constexpr size_t kMapped = size_t(64) << 20;

std::atomic<int64_t> allocated{0}, peak{0}, limit{INT64_MAX};

void count(size_t bytes) {
  int64_t now = allocated += int64_t(bytes), most = peak;
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
}

struct Piece {
  void* base;
  size_t bytes;
};

void release(void* context) {
  auto* piece = static_cast<Piece*>(context);
  piece->bytes >= kMapped ? void(munmap(piece->base, piece->bytes)) : std::free(piece->base);
  allocated -= int64_t(piece->bytes);
  delete piece;
}

struct Memory final : c10::Allocator {
  DataPtr allocate(size_t wanted) override {
    if (wanted == 0) return {nullptr, kGpu};
    const size_t bytes = (wanted + 511) / 512 * 512;
    TORCH_CHECK_WITH(OutOfMemoryError, allocated + int64_t(bytes) <= limit, "CUDA out of memory. Tried to allocate ", bytes, " bytes");
    void* base = nullptr;
    if (bytes >= kMapped) {
      base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(base != MAP_FAILED, "the host has no ", bytes, " bytes");
    } else {
      base = std::aligned_alloc(512, bytes);
      std::memset(base, 0xff, bytes);  // NaN, and no index: what is read before it is written shows
    }
    count(bytes);
    return {base, new Piece{base, bytes}, release, kGpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Memory memory;

at::Tensor over(const at::Tensor& tensor, DataPtr data, Device device) {
  auto storage = c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), tensor.storage().nbytes(), std::move(data),
      device.is_cpu() ? c10::GetCPUAllocator() : static_cast<c10::Allocator*>(&memory), true);
  const auto key = device.is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA;
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

struct Held {
  Storage storage;
  int64_t counted;
};

void let_go(void* context) {
  auto* held = static_cast<Held*>(context);
  allocated -= held->counted;
  delete held;
}

// The same memory under the name of another device, which it keeps alive.
at::Tensor renamed(const at::Tensor& tensor, Device device, int64_t counted = 0) {
  void* base = tensor.storage().mutable_data();
  return over(tensor, DataPtr(base, new Held{tensor.storage(), counted}, let_go, device), device);
}

at::Tensor to_host(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? renamed(tensor, kHost) : tensor;
}

at::Tensor to_gpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  const auto bytes = tensor.storage().nbytes();
  count(bytes);
  return renamed(tensor, kGpu, int64_t(bytes));
}

// What an operation wrote into has new memory, or another shape, where it was resized.
void follow(const at::Tensor& gpu, const at::Tensor& host) {
  auto* own = gpu.unsafeGetTensorImpl();
  if (gpu.storage().data() != host.storage().data()) own->set_storage_keep_dtype(to_gpu(host).storage());
  if (gpu.sizes() != host.sizes() || gpu.strides() != host.strides())
    own->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {
    const auto& given = op.schema().arguments();
    const size_t begin = stack->size() - given.size();
    own_.reserve(given.size());
    for (size_t i = 0; i < given.size(); ++i) {
      own_.push_back((*stack)[begin + i]);
      (*stack)[begin + i] = moved(own_.back(), given[i]);
    }
    for (const auto& tensor : of_host_)
      TORCH_CHECK(!any_on_gpu_ || tensor.dim() == 0, "Expected all tensors to be on the same device: ", op.schema().name(),
                  " gets ", tensor.sizes(), " ", tensor.dtype(), " from the host");
  }

  void run() {
    op_.redispatchBoxed(kOnHost, stack_);
    for (const auto& [gpu, host] : written_) follow(gpu, host);
    const auto& returns = op_.schema().returns();
    const size_t begin = stack_->size() - returns.size();
    for (size_t i = 0; i < returns.size(); ++i) {
      auto& value = (*stack_)[begin + i];
      const auto* alias = returns[i].alias_info();
      value = alias != nullptr && alias->isWrite() ? argument_of(*alias) : brought(value);
    }
  }

 private:
  c10::IValue moved(const c10::IValue& value, const c10::Argument& argument) {
    const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (value.isTensor()) return on_host(value.toTensor(), writes);
    if (value.isTensorList()) {
      c10::List<at::Tensor> hosts;
      for (const at::Tensor& tensor : value.toTensorVector()) hosts.push_back(on_host(tensor, writes));
      return hosts;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        hosts.push_back(tensor ? std::optional(on_host(*tensor, writes)) : std::nullopt);
      return hosts;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return kHost;
    return value;
  }

  at::Tensor on_host(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      of_host_.push_back(tensor);
      return tensor;
    }
    any_on_gpu_ = true;
    auto host = to_host(tensor);
    given_.emplace_back(tensor, host);
    if (writes) written_.emplace_back(tensor, host);
    return host;
  }

  c10::IValue argument_of(const c10::AliasInfo& alias) const {
    const auto& given = op_.schema().arguments();
    for (size_t i = 0; i < given.size(); ++i)
      if (given[i].alias_info() != nullptr && given[i].alias_info()->beforeSets() == alias.beforeSets()) return own_[i];
    TORCH_CHECK(false, op_.schema().name(), " returns what it was not given");
  }

  c10::IValue brought(const c10::IValue& value) const {
    if (value.isTensor()) return brought(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(brought(tensor));
    return tensors;
  }

  // A view is in the storage of what it is a view of.
  at::Tensor brought(const at::Tensor& tensor) const {
    for (const auto& [gpu, host] : given_) {
      if (!tensor.defined() || !tensor.has_storage() || tensor.storage().data() != host.storage().data() || !host.storage().data())
        continue;
      auto made = at::detail::make_tensor<c10::TensorImpl>(Storage(gpu.storage()), DispatchKeySet(DispatchKey::CUDA), tensor.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
      return made;
    }
    return to_gpu(tensor);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::vector<c10::IValue> own_;
  std::vector<at::Tensor> of_host_;
  std::vector<std::pair<at::Tensor, at::Tensor>> given_, written_;
  bool any_on_gpu_ = false;
};

void on_the_host(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) { Call(op, stack).run(); }

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, DispatchKeySet(DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

// Between any two devices.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  auto host = to_host(self);
  at::_ops::copy_::redispatch(kOnHost, host, to_host(source), non_blocking);
  return self;
}

at::Tensor& zero(at::Tensor& self) {
  const auto bytes = self.storage().nbytes();
  if (bytes >= kMapped && self.numel() * self.itemsize() + kPage > bytes && self.is_contiguous()) {
    // Its pages are given back: they read as zeros.
    auto* base = static_cast<char*>(self.storage().mutable_data());
    TORCH_CHECK(madvise(base, (bytes + kPage - 1) / kPage * kPage, MADV_DONTNEED) == 0, "madvise");
    return self;
  }
  auto host = to_host(self);
  at::_ops::zero_::redispatch(kOnHost, host);
  return self;
}

// The same memory, which may be gone while this lives.
at::Tensor borrowed(const at::Tensor& tensor) {
  return over(tensor, DataPtr(tensor.storage().mutable_data(), kGpu), kGpu);
}

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device getDevice() const override { return kGpu; }
  Device exchangeDevice(Device) const override { return kGpu; }
  void synchronizeDevice(c10::DeviceIndex) const override {}
};

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("copy_", copy);
  library.impl("zero_", zero);
  // Made of others in ways that ask for kernels of the device by another door.
  for (const char* name : {ON_THE_HOST})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

TORCH_LIBRARY(gpu_of_numbers, library) {
  library.def("host(Tensor gpu) -> Tensor");
  library.def("borrowed(Tensor gpu) -> Tensor");
  library.impl("host", DispatchKey::CUDA, to_host);
  library.impl("borrowed", DispatchKey::CUDA, borrowed);
}

extern "C" {
int64_t gpu_allocated() { return allocated; }
int64_t gpu_peak() { return peak; }
void gpu_forget_peak() { peak = allocated.load(); }
void gpu_limit(int64_t bytes) { limit = bytes; }
}
