// What torch asks of a device type: the current device, its streams and events, its generators.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "runtime.h"

namespace standin {
namespace {

// Draws as the CPU's generator does. It is one of its own for every device.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl({kType, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        drawing(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { drawing.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { drawing.set_offset(offset); }
  uint64_t get_offset() const override { return drawing.get_offset(); }
  uint64_t current_seed() const override { return drawing.current_seed(); }
  uint64_t seed() override { return drawing.seed(); }
  void set_state(const c10::TensorImpl& state) override { drawing.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return drawing.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->drawing = drawing.clone();
    return copy;
  }
  at::Generator drawing;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device())}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    set_current_device(device.index());
    return before;
  }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices()); }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_at((device.has_index() ? device.index() : current_device()) * kStreams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return next_stream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override { return next_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return has_finished(index_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(index_of(stream)); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    standin::record(*static_cast<Event*>(*event), index_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait(index_of(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return !event || has_finished(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "both events must be recorded before the time between them is asked for");
    return (static_cast<Event*>(end)->ready_at - static_cast<Event*>(begin)->ready_at) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator()->recordStream(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(static_cast<c10::DeviceIndex>(device < 0 ? current_device() : device));
  }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = take(size, storage.device().index(), storage.device());
    if (size && impl->nbytes()) std::memcpy(data.get(), impl->data(), std::min(size, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; ++i) made->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return all->at(device);
}

at::Generator drawing_of(const at::Generator& generator) {
  auto* own = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  return own ? own->drawing : generator;
}

void register_guard() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace standin
