// Memory of each device: a capacity, torch's caching in segments and blocks, its statistics, and running out of it.
#include <c10/util/Exception.h>

#include "runtime.h"

#include <sys/mman.h>

#include <cstring>
#include <list>
#include <map>
#include <unordered_map>

namespace standin {

struct Segment {
  char* data;
  size_t size;
  int device;
  int stream;
  bool is_small;
};

namespace {

// torch's own figures (c10/core/AllocatorConfig.h)
constexpr size_t kMinBlock = 512;
constexpr size_t kSmall = 1 << 20;          // up to here a request is small
constexpr size_t kSmallSegment = 2 << 20;   // small requests share segments of this size
constexpr size_t kMedium = 10 << 20;        // up to here a request shares ...
constexpr size_t kMediumSegment = 20 << 20; // ... segments of this size
constexpr size_t kRoundLarge = 2 << 20;     // larger ones have a segment rounded up to this

// Freed while another stream may still use it: whoever is given it next on its own stream could change it meanwhile.
struct Freed {
  char* begin;
  char* end;
  std::vector<Access> accesses;
  Place place;
};

// Freed, but recorded on other streams: kept back until these have done what they were asked for by then.
struct Waiting {
  Block* block;
  std::vector<Event> events;
};

struct Smaller {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->data < b->data;
  }
};

struct Device {
  size_t total = size_t(16) << 30;
  size_t outside = 0;
  double fraction = 1;
  size_t reserved = 0;
  c10::CachingDeviceAllocator::DeviceStats stats;
  std::map<std::pair<int, bool>, std::set<Block*, Smaller>> free;  // by stream, and whether its segment is a small one
  std::list<Waiting> waiting;
  std::vector<std::pair<int, Freed>> freed;  // by stream
};

Device* device_state(int index) {
  static auto* all = new std::array<Device, kMaxDevices>;
  return &all->at(index);
}

void count(c10::CachingAllocator::StatArray& stat, int64_t by) {
  auto& aggregate = stat[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  by > 0 ? aggregate.increase(by) : aggregate.decrease(-by);
}

std::string as_text(size_t bytes) {
  char text[32];
  const double mib = bytes / double(1 << 20);
  mib >= 1024 ? std::snprintf(text, sizeof text, "%.2f GiB", mib / 1024) : std::snprintf(text, sizeof text, "%.2f MiB", mib);
  return text;
}

size_t free_bytes(const Device& device) {
  const size_t held = device.outside + device.reserved;
  return device.total > held ? device.total - held : 0;
}

bool has_room(const Device& device, size_t size) {
  return size <= free_bytes(device) && device.reserved + size <= size_t(device.fraction * device.total);
}

Block* new_segment(Device& device, int index, int stream, bool is_small, size_t size) {
  if (!has_room(device, size)) return nullptr;
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  device.reserved += size;
  device.stats.num_device_alloc++;
  count(device.stats.reserved_bytes, size);
  count(device.stats.segment, 1);
  auto* segment = new Segment{static_cast<char*>(data), size, index, stream, is_small};
  return new Block{segment->data, size, 0, index, stream, false, segment, nullptr, nullptr, {}, {}};
}

void insert(Device& device, Block* block) { device.free[{block->stream, block->segment->is_small}].insert(block); }

void release_segments(Device& device) {
  for (auto& [key, blocks] : device.free) {
    for (auto it = blocks.begin(); it != blocks.end();) {
      Block* block = *it;
      if (block->size != block->segment->size) {
        ++it;
        continue;
      }
      it = blocks.erase(it);
      auto& freed = device.freed;  // giving memory back waits for the device
      freed.erase(std::remove_if(freed.begin(), freed.end(),
                                 [&](auto& each) {
                                   return each.second.begin < block->data + block->size && block->data < each.second.end;
                                 }),
                  freed.end());
      device.reserved -= block->size;
      device.stats.num_device_free++;
      count(device.stats.reserved_bytes, -static_cast<int64_t>(block->size));
      count(device.stats.segment, -1);
      munmap(block->segment->data, block->segment->size);
      delete block->segment;
      delete block;
    }
  }
}

void merge(Device& device, Block* block) {
  for (Block* other : {block->previous, block->next}) {
    if (other == nullptr || other->taken) continue;
    auto& pool = device.free[{other->stream, other->segment->is_small}];
    if (!pool.erase(other)) continue;  // kept back for another stream
    if (other == block->previous) {
      block->data = other->data;
      block->previous = other->previous;
      if (block->previous) block->previous->next = block;
    } else {
      block->next = other->next;
      if (block->next) block->next->previous = block;
    }
    block->size += other->size;
    delete other;
  }
  block->accesses.clear();
  block->recorded.clear();
  insert(device, block);
}

void process_waiting(Device& device, bool wait_for_them) {
  for (auto it = device.waiting.begin(); it != device.waiting.end();) {
    bool finished = true;
    for (auto& event : it->events) {
      finished = finished && (wait_for_them || event.ready_at <= now());
    }
    if (!finished) {
      ++it;
      continue;
    }
    for (auto& event : it->events) host_has_seen(event);
    count(device.stats.active_bytes, -static_cast<int64_t>(it->block->size));
    count(device.stats.active, -1);
    merge(device, it->block);
    it = device.waiting.erase(it);
  }
}

// What this request could have been given although another stream may still use it.
void check_reuse(Device& device, int stream, const Place& place) {
  auto& freed = device.freed;
  for (auto& [its_stream, each] : freed) {
    if (its_stream != stream) continue;
    for (auto& access : each.accesses) {
      if (!is_ordered(access, stream)) {
        report("memory can be given out again while another stream may still use it (no record_stream, and nothing "
               "waited): it was " + describe(access) + "; freed by " + (each.place ? *each.place : "the host") +
               "; then allocated by " + (place ? *place : "what was not watched"));
      }
    }
  }
  freed.erase(std::remove_if(freed.begin(), freed.end(), [&](auto& each) { return each.first == stream; }), freed.end());
}

[[noreturn]] void run_out(Device& device, int index, size_t size) {
  device.stats.num_ooms++;
  const auto allocated = device.stats.allocated_bytes[0].current;
  std::string cap;
  if (device.fraction < 1) cap = as_text(size_t(device.fraction * device.total)) + " allowed; ";
  TORCH_CHECK_WITH(OutOfMemoryError, false, "Standin out of memory. Tried to allocate ", as_text(size), ". GPU ", index,
                   " has a total capacity of ", as_text(device.total), " of which ", as_text(free_bytes(device)),
                   " is free. ", cap, "Of the allocated memory ", as_text(allocated), " is allocated by PyTorch, and ",
                   as_text(device.reserved - allocated), " is reserved by PyTorch but unallocated.");
}

Block* take_block(size_t requested, int index) {
  const Place place = here("an allocation of " + std::to_string(requested) + " bytes");
  std::lock_guard<std::recursive_mutex> guard(lock());
  Device& device = *device_state(index);
  const int stream = index_of(current_stream(index));
  process_waiting(device, false);
  if (is_checking()) check_reuse(device, stream, place);
  const size_t size = std::max(kMinBlock, (requested + kMinBlock - 1) / kMinBlock * kMinBlock);
  const bool is_small = size <= kSmall;
  const size_t rounded = (size + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
  const size_t segment_size = is_small ? kSmallSegment : size < kMedium ? kMediumSegment : rounded;
  auto& pool = device.free[{stream, is_small}];
  Block wanted{nullptr, size, 0, index, stream, false, nullptr, nullptr, nullptr, {}, {}};
  Block* block = nullptr;
  if (auto found = pool.lower_bound(&wanted); found != pool.end()) {
    block = *found;
    pool.erase(found);
  } else if (!(block = new_segment(device, index, stream, is_small, segment_size))) {
    device.stats.num_alloc_retries++;
    process_waiting(device, true);
    release_segments(device);
    if (!(block = new_segment(device, index, stream, is_small, segment_size))) run_out(device, index, segment_size);
  }
  const size_t left = block->size - size;
  if (is_small ? left >= kMinBlock : left > kSmall) {
    auto* rest = new Block{block->data + size, left, 0, index, stream, false, block->segment, block, block->next, {}, {}};
    if (rest->next) rest->next->previous = rest;
    block->next = rest;
    block->size = size;
    insert(device, rest);
  }
  block->taken = true;
  block->requested = requested;
  count(device.stats.allocated_bytes, block->size);
  count(device.stats.allocation, 1);
  count(device.stats.active_bytes, block->size);
  count(device.stats.active, 1);
  count(device.stats.requested_bytes, requested);
  return block;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const int device = current_device();
    return take(size, device, {kType, static_cast<c10::DeviceIndex>(device)});
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int i = 0; i < num_devices(); ++i) {
      std::lock_guard<std::recursive_mutex> guard(lock());
      process_waiting(*device_state(i), true);
      release_segments(*device_state(i));
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (!is_block(data)) return;
    std::lock_guard<std::recursive_mutex> guard(lock());
    Block* block = block_of(data);
    if (index_of(stream) != block->stream) block->recorded.insert(index_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard<std::recursive_mutex> guard(lock());
    return device_state(index)->stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    std::lock_guard<std::recursive_mutex> guard(lock());
    auto& stats = device_state(index)->stats;
    stats.num_alloc_retries = stats.num_ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard<std::recursive_mutex> guard(lock());
    auto& stats = device_state(index)->stats;
    for (auto* stat : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                       &stats.active_bytes, &stats.requested_bytes})
      for (auto& each : *stat) each.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const auto [total, free] = memory(index);
    return {free, total};
  }
};

thread_local int allocating_on = -1;

// By its address, which is all that some of torch's own callers keep.
std::unordered_map<void*, Block*>& taken() {
  static auto* all = new std::unordered_map<void*, Block*>;
  return *all;
}

void forget_either(void* data) {
  bool is_taken;
  {
    std::lock_guard<std::recursive_mutex> guard(lock());
    is_taken = taken().count(data);
  }
  is_taken ? forget_block(data) : c10::GetDefaultCPUAllocator()->raw_deleter()(data);
}

// The host's allocator, in whose place kernels of the CPU are given memory of the device they compute for.
struct HostAllocator final : c10::Allocator {
  c10::Allocator* plain = nullptr;
  c10::DataPtr allocate(size_t size) override {
    return allocating_on < 0 || !size ? plain->allocate(size) : take(size, allocating_on, c10::Device(c10::kCPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &forget_either; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

}  // namespace

c10::DataPtr take(size_t size, int device, c10::Device seen_as) {
  if (!size) return {nullptr, seen_as};
  Block* block = take_block(size, device);
  std::lock_guard<std::recursive_mutex> guard(lock());
  taken()[block->data] = block;
  return {block->data, block->data, &forget_block, seen_as};
}

bool is_block(const c10::DataPtr& data) { return data.get_deleter() == &forget_block && data.get_context() != nullptr; }
Block* block_of(const c10::DataPtr& data) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  return taken().at(data.get_context());
}

void forget_block(void* context) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  Block* block = taken().at(context);
  taken().erase(context);
  Device& device = *device_state(block->device);
  count(device.stats.allocated_bytes, -static_cast<int64_t>(block->size));
  count(device.stats.allocation, -1);
  count(device.stats.requested_bytes, -static_cast<int64_t>(block->requested));
  block->taken = false;
  Freed freed{block->data, block->data + block->size, {}, nullptr};
  for (auto& access : block->accesses)
    if (!is_ordered(access, block->stream) && !block->recorded.count(access.stream)) freed.accesses.push_back(access);
  if (is_checking() && !freed.accesses.empty()) device.freed.emplace_back(block->stream, std::move(freed));
  if (!block->recorded.empty()) {
    Waiting waiting{block, {}};
    for (int stream : block->recorded) {
      waiting.events.emplace_back();
      record(waiting.events.back(), stream);
    }
    device.waiting.push_back(std::move(waiting));
    return;
  }
  count(device.stats.active_bytes, -static_cast<int64_t>(block->size));
  count(device.stats.active, -1);
  merge(device, block);
}

void set_capacity(int device, size_t total_bytes, size_t outside_bytes) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  device_state(device)->total = total_bytes;
  device_state(device)->outside = outside_bytes;
}
void set_fraction(int device, double fraction) { device_state(device)->fraction = fraction; }
double fraction(int device) { return device_state(device)->fraction; }
std::pair<size_t, size_t> memory(int device) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  return {device_state(device)->total, free_bytes(*device_state(device))};
}

AllocateOn::AllocateOn(int device) : before(allocating_on) { allocating_on = device; }
AllocateOn::~AllocateOn() { allocating_on = before; }

c10::DeviceAllocator* allocator() {
  static auto* one = new Allocator;
  return one;
}

void register_allocators() {
  c10::SetAllocator(kType, allocator());
  static auto* host = new HostAllocator;
  host->plain = c10::GetDefaultCPUAllocator();
  c10::SetCPUAllocator(host, 1);
}

}  // namespace standin
