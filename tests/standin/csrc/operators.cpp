// Operators: the CPU's kernels, run on the same memory and accounted on the device.
#include <ATen/Functions.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "runtime.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <unordered_map>
#include <unordered_set>

namespace standin {
namespace {

using at::Tensor;

bool is_own(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// Where a strided tensor's bytes lie within its storage.
std::pair<size_t, size_t> extent(const Tensor& tensor) {
  if (!tensor.numel()) return {0, 0};
  size_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {tensor.storage_offset() * tensor.itemsize(), (last + 1) * tensor.itemsize()};
}

at::SparseTensorImpl* sparse_of(const Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

void touch_tensor(const Tensor& tensor, int stream, uint64_t tick, bool writes, const Place& place) {
  if (!is_checking() || !is_own(tensor)) return;
  if (tensor.is_sparse()) {
    touch_tensor(sparse_of(tensor)->indices(), stream, tick, writes, place);
    touch_tensor(sparse_of(tensor)->values(), stream, tick, writes, place);
    return;
  }
  const auto& data = tensor.storage().data_ptr();
  const auto [begin, end] = extent(tensor);
  if (is_block(data)) touch(block_of(data), begin, end, stream, tick, writes, place);
}

// Autograd, autocast and the like have been: below them is the CPU's kernel.
struct BelowEverything {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// One operator on one device: its tensors as the CPU's, on the same memory, and its results as the device's.
class Operation {
 public:
  Operation(std::string name, int device)
      : name_(std::move(name)), device_(device), stream_(index_of(current_stream(device))), place_(here(name_)),
        tick_(begin_work(stream_)) {}
  ~Operation() { end_work(stream_); }

  Tensor as_cpu(const Tensor& tensor, bool writes, bool touches = true) {
    if (!is_own(tensor)) return tensor;
    TORCH_CHECK(tensor.device().index() == device_, "Expected all tensors to be on the same device, but ", name_,
                " got standin:", device_, " and ", tensor.device());
    if (touches) touch_tensor(tensor, stream_, tick_, writes, place_);
    if (tensor.is_sparse()) {
      BelowEverything below;
      auto* own = sparse_of(tensor);
      auto sparse = at::_sparse_coo_tensor_unsafe(as_strided(own->indices()), as_strided(own->values()), tensor.sizes());
      sparse_of(sparse)->set_coalesced(own->coalesced());
      originals_.emplace(sparse.unsafeGetTensorImpl(), tensor);
      if (writes) written_.emplace_back(tensor, sparse);
      return sparse;
    }
    auto alias = as_strided(tensor);
    originals_.emplace(alias.unsafeGetTensorImpl(), tensor);
    if (writes) written_.emplace_back(tensor, alias);
    return alias;
  }

  Tensor as_own(const Tensor& tensor) {
    if (!tensor.defined() || is_own(tensor)) return tensor;
    if (auto found = originals_.find(tensor.unsafeGetTensorImpl()); found != originals_.end()) return found->second;
    if (tensor.is_sparse()) {
      const c10::DeviceGuard there(device());  // it begins with empty indices and values of its own
      auto sparse = at::detail::make_tensor<at::SparseTensorImpl>(
          c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1), tensor.dtype());
      set_sparse(sparse, tensor);
      return sparse;
    }
    c10::Storage storage = own_storage(tensor);
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) made._set_conj(true);
    if (tensor.is_neg()) made._set_neg(true);
    if (is_new_) touch_tensor(made, stream_, tick_, true, place_);
    return made;
  }

  // What a kernel has given other memory, another size or other values of a sparse tensor, its device's tensor has too.
  void write_back() {
    for (auto& [own, alias] : written_) {
      if (own.is_sparse()) {
        set_sparse(own, alias);
        continue;
      }
      auto* storage = own.storage().unsafeGetStorageImpl();
      auto* cpu = alias.storage().unsafeGetStorageImpl();
      if (cpu->data() != storage->data() || cpu->nbytes() != storage->nbytes()) {
        auto& data = cpu->mutable_data_ptr();
        const auto size = cpu->nbytes();
        if (is_block(data)) {
          auto* context = data.get_context();
          void* at = data.get();
          data.release_context();
          storage->set_data_ptr_noswap({at, context, &forget_block, device()});
          storage->set_nbytes(size);
        }
      }
      if (own.sizes() != alias.sizes() || own.strides() != alias.strides() ||
          own.storage_offset() != alias.storage_offset()) {
        own.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
      }
    }
  }

  c10::Device device() const { return {kType, static_cast<c10::DeviceIndex>(device_)}; }
  int stream() const { return stream_; }

 private:
  Tensor as_strided(const Tensor& tensor) {
    if (!is_own(tensor)) return tensor;
    auto* own = tensor.storage().unsafeGetStorageImpl();
    auto& storage = aliases_[own];
    if (!storage) {
      storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), own->nbytes(), c10::DataPtr(own->mutable_data(), c10::Device(c10::kCPU)),
          c10::GetCPUAllocator(), true));
      owners_.emplace(storage.unsafeGetStorageImpl(), tensor.storage());
    }
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    return alias;
  }

  c10::Storage own_storage(const Tensor& tensor) {
    auto* cpu = tensor.storage().unsafeGetStorageImpl();
    is_new_ = false;
    if (auto found = owners_.find(cpu); found != owners_.end()) return found->second;
    is_new_ = true;
    const auto size = cpu->nbytes();
    c10::DataPtr data;
    if (is_block(cpu->data_ptr())) {
      auto& given = cpu->mutable_data_ptr();
      void *at = given.get(), *context = given.release_context();
      data = {at, context, &forget_block, device()};
    } else {
      data = take(size, device_, device());
      if (size) std::memcpy(data.get(), cpu->data(), size);
    }
    c10::Storage made(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size, std::move(data),
                                                            allocator(), true));
    owners_.emplace(cpu, made);
    kept_.push_back(tensor);  // so that no other storage has this address meanwhile
    return made;
  }

  void set_sparse(const Tensor& own, const Tensor& sparse) {
    auto *impl = sparse_of(own), *from = sparse_of(sparse);
    auto indices = as_own(from->indices()), values = as_own(from->values());
    impl->raw_resize_(from->sparse_dim(), from->dense_dim(), sparse.sizes());
    impl->set_indices_and_values_unsafe(indices, values);
    impl->set_coalesced(from->coalesced());
  }

  std::string name_;
  int device_, stream_;
  Place place_;
  uint64_t tick_;
  bool is_new_ = false;
  std::unordered_map<c10::StorageImpl*, c10::Storage> aliases_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> owners_;
  std::unordered_map<c10::TensorImpl*, Tensor> originals_;
  std::vector<std::pair<Tensor, Tensor>> written_;
  std::vector<Tensor> kept_;
};

template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) for_each_tensor(each, visit);
  }
}

template <typename Change>
c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(change(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorList())
      list.push_back(each.has_value() ? std::optional<Tensor>(change(*each)) : std::nullopt);
    return list;
  }
  return value;
}

// A card takes indices of the host too.
bool takes_host_tensors(const std::string& name) { return name.find("index") != std::string::npos; }

// What a card's host waits for, since it cannot know a size or a value before.
bool waits(const c10::FunctionSchema& schema) {
  static const std::unordered_set<std::string> sized_by_values = {
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"};
  if (sized_by_values.count(schema.name())) return true;
  for (const auto& each : schema.returns())
    if (each.type()->kind() == c10::TypeKind::BoolType || each.type()->kind() == c10::TypeKind::NumberType) return true;
  return false;
}

int device_of(const std::vector<c10::IValue>& arguments) {
  int device = -1;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const Tensor& tensor) {
      if (device < 0 && is_own(tensor)) device = tensor.device().index();
    });
  }
  for (const auto& argument : arguments) {
    if (device < 0 && argument.isDevice() && argument.toDevice().type() == kType)
      device = argument.toDevice().has_index() ? argument.toDevice().index() : current_device();
  }
  return device < 0 ? current_device() : device;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  Operation operation(schema.name(), device_of(arguments));
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& argument = arguments[i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool writes = alias && alias->isWrite();
    const bool touches = !alias || writes;  // a view is made without a look at the values
    if (argument.isDevice() && argument.toDevice().type() == kType) {
      argument = c10::Device(c10::kCPU);
    } else if (argument.isGenerator()) {
      argument = drawing_of(argument.toGenerator());
    } else if (argument.isNone() && schema.arguments()[i].name() == "generator") {
      argument = drawing_of(default_generator(operation.device().index()));
    } else {
      argument = changed(argument, [&](const Tensor& tensor) {
        TORCH_CHECK(!tensor.defined() || is_own(tensor) || tensor.dim() == 0 || takes_host_tensors(schema.name()),
                    "Expected all tensors to be on the same device, but ", schema.name(), " got ", operation.device(),
                    " and ", tensor.device());
        return operation.as_cpu(tensor, writes, touches);
      });
    }
    torch::jit::push(*stack, argument);
  }
  {
    BelowEverything below;
    AllocateOn here(operation.device().index());
    op.callBoxed(stack);
  }
  auto results = torch::jit::pop(*stack, schema.returns().size());
  operation.write_back();
  for (auto& result : results)
    torch::jit::push(*stack, changed(result, [&](const Tensor& tensor) { return operation.as_own(tensor); }));
  if (waits(schema)) synchronize(operation.stream());
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef new_size, std::optional<c10::MemoryFormat> format) {
  const auto size = C10_AS_INTARRAYREF_SLOW(new_size);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  const size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (self.numel() && needed > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const int64_t size = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), true), 0, {0}, {});
}

// What stands in the host's memory while a copy there is on its way: nobody must read it.
void fill_with_garbage(const Tensor& target, const Tensor& arriving) {
  if (target.scalar_type() == at::kBool) {
    target.copy_(arriving.logical_not());
  } else if (c10::isIntegralType(target.scalar_type(), false)) {
    target.fill_(-1);
  } else {
    target.fill_(std::numeric_limits<double>::quiet_NaN());
  }
}

void copy_values(const Tensor& to, const Tensor& from) {
  BelowEverything below;
  to.copy_(from);
}

// As torch's own copies between cards: on the source's stream, which waits for the target's before and is waited for
// afterwards.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.numel()) return self;
  if (is_own(self) && is_own(source)) {
    const int from = index_of(current_stream(source.device().index()));
    const int to = index_of(current_stream(self.device().index()));
    if (from != to) wait_for_stream(from, to);
    const Place place = here("aten::copy_");
    {
      Operation reading("aten::copy_", source.device().index());
      auto values = reading.as_cpu(source, false);
      const uint64_t tick = begin_work(from);
      touch_tensor(self, from, tick, true, place);
      // the target is another device's: its alias is made without its checks
      Operation writing("aten::copy_", self.device().index());
      const bool checks = is_checking();
      if (checks && from != to) set_checking(false);
      auto target = writing.as_cpu(self, true);
      if (checks && from != to) set_checking(true);
      AllocateOn here(source.device().index());
      copy_values(target, values);
    }
    if (from != to) wait_for_stream(to, from);
    return self;
  }
  const int device = is_own(self) ? self.device().index() : source.device().index();
  const int stream = index_of(current_stream(device));
  if (is_own(self)) {
    Operation operation("aten::copy_ from the host", device);
    AllocateOn here(device);
    copy_values(operation.as_cpu(self, true), source);
    if (non_blocking) return self;
  } else {
    Operation operation("aten::copy_ to the host", device);
    auto values = operation.as_cpu(source, false);
    if (!non_blocking) {
      copy_values(self, values);
    } else {
      BelowEverything below;
      auto arriving = at::empty_like(self);
      arriving.copy_(values);
      fill_with_garbage(self, arriving);
      auto target = self.detach();
      when_host_reaches(stream, begin_work(stream), [target, arriving] { copy_values(target, arriving); });
    }
  }
  if (!non_blocking) synchronize(stream);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  return copy_(const_cast<Tensor&>(target), self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_(const_cast<Tensor&>(target), self, false);
}

at::Scalar item(const Tensor& self) {
  at::Scalar value;
  int stream;
  {
    Operation operation("aten::item", self.device().index());
    stream = operation.stream();
    value = at::_local_scalar_dense(operation.as_cpu(self, false));
  }
  synchronize(stream);
  return value;
}

// What moves a module's parameters in place, as between a card and the host.
bool can_take_the_place_of(const Tensor& self, const Tensor& from) { return self.layout() == from.layout(); }

void record_stream(Tensor& self, c10::Stream stream) { allocator()->recordStream(self.storage().data_ptr(), stream); }

// Operators that torch asks of its accelerators alone, in terms of those it asks of every device.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride,
                   c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
                   int64_t groups) {
  Operation operation("aten::convolution", input.device().index());
  std::optional<Tensor> own_bias;
  if (bias.has_value() && bias->defined()) own_bias = operation.as_cpu(*bias, false);
  BelowEverything below;
  AllocateOn here(input.device().index());
  return operation.as_own(at::convolution(operation.as_cpu(input, false), operation.as_cpu(weight, false), own_bias, stride,
                                          padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        c10::IntArrayRef stride, c10::IntArrayRef padding,
                                                        c10::IntArrayRef dilation, bool transposed,
                                                        c10::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  Operation operation("aten::convolution_backward", input.device().index());
  BelowEverything below;
  AllocateOn here(input.device().index());
  const int64_t num_channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [a, b, c] = at::convolution_backward(operation.as_cpu(grad, false), operation.as_cpu(input, false),
                                            operation.as_cpu(weight, false), c10::IntArrayRef{num_channels}, stride, padding,
                                            dilation, transposed, output_padding, groups, wanted);
  return {operation.as_own(a), operation.as_own(b), operation.as_own(c)};
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  auto gates = input_gates + hidden_gates;
  if (input_bias.has_value() && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  auto parts = gates.unsafe_chunk(4, 1);
  auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& grad_hy,
                                                      const std::optional<Tensor>& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& gates, bool has_bias) {
  auto parts = gates.unsafe_chunk(4, 1);
  auto &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  auto squashed = cy.tanh();
  auto gh = grad_hy.has_value() && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  auto gc = gh * out * (1 - squashed * squashed);
  if (grad_cy.has_value() && grad_cy->defined()) gc = gc + *grad_cy;
  auto grad = at::cat({gc * cell * in * (1 - in), gc * cx * forget * (1 - forget), gc * in * (1 - cell * cell),
                       gh * squashed * out * (1 - out)}, 1);
  return {grad, gc * forget, has_bias ? grad.sum(0) : Tensor()};
}

}  // namespace

// Where torch has a kernel for the CPU and one in terms of other operators, ours is the CPU's as well.
void prefer_cpu(torch::Library& m, c10::DispatchKey cpu, c10::DispatchKey own) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(cpu) || op->hasKernelForDispatchKey(own)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) continue;
    const std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

Tensor& copy_sparse(Tensor& self, const Tensor& source, bool non_blocking) {
  auto *to = sparse_of(self), *from = sparse_of(source);
  to->raw_resize_(from->sparse_dim(), from->dense_dim(), source.sizes());
  to->set_indices_and_values_unsafe(from->indices().to(self.device(), non_blocking, true),
                                    from->values().to(self.options().layout(c10::kStrided), non_blocking, true));
  to->set_coalesced(from->coalesced());
  return self;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &can_take_the_place_of);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_dropout", &native_dropout);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  prefer_cpu(m, c10::DispatchKey::CPU, c10::DispatchKey::PrivateUse1);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("copy_sparse_to_sparse_", &copy_sparse);
  prefer_cpu(m, c10::DispatchKey::SparseCPU, c10::DispatchKey::SparsePrivateUse1);
}

}  // namespace standin
