// Devices that stand in for cards: their streams, events, clocks and memory. Work is done at once, on the host, by the
// thread that asks for it; what a card would have done later is kept as a time and as an order, and both can be asked.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace standin {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
constexpr int kStreams = 9;  // of a device: its default stream, and a pool of eight
constexpr int kClocks = kMaxDevices * kStreams;

// How much of every stream has happened: a vector clock. One thing is ordered after another where its clock has reached
// the other's tick of the other's stream.
using Clock = std::array<uint64_t, kClocks>;

// Where an access came from, in words; null unless order is checked.
using Place = std::shared_ptr<const std::string>;
Place here(const std::string& what);

// A tensor's bytes that some stream reads or writes.
struct Access {
  size_t begin, end;  // within its block
  int stream;
  uint64_t tick;
  bool writes;
  Place place;
};

struct Segment;

// A piece of a segment: handed out, or kept for the next request of its stream.
struct Block {
  char* data;
  size_t size;
  size_t requested;
  int device;
  int stream;
  bool taken;
  Segment* segment;
  Block* previous;
  Block* next;
  std::vector<Access> accesses;
  std::set<int> recorded;
};

struct Event {
  Clock clock;
  double ready_at;
  int device;
};

// One lock for everything below. No Python is run under it.
std::recursive_mutex& lock();

int num_devices();
void set_num_devices(int count);
double now();

// Streams. An index counts all streams of all devices; the first of a device is its default stream.
int index_of(const c10::Stream& stream);
c10::Stream stream_at(int index);
int current_device();
void set_current_device(int device);
c10::Stream current_stream(int device);
c10::Stream exchange_stream(const c10::Stream& stream);
c10::Stream next_stream(int device);

// Work: `begin` gives the tick of the next piece of work on a stream, `end` says that it has been computed.
uint64_t begin_work(int stream);
void end_work(int stream);
void touch(Block* block, size_t begin, size_t end, int stream, uint64_t tick, bool writes, const Place& place);

// Order and time between streams, events and the host.
void record(Event& event, int stream);
void wait(int stream, const Event& event);
void wait_for_stream(int waiting, int stream);
bool has_finished(int stream);
bool has_finished(const Event& event);
void host_has_seen(const Event& event);  // it has finished, and what comes after is ordered after it
void synchronize(int stream);
void synchronize(const Event& event);
void synchronize_device(int device);

// Something on the host that is not there before the host has waited for a stream's tick.
void when_host_reaches(int stream, uint64_t tick, std::function<void()> arrive);

// Delays: seconds that every piece of work on a device takes longer; and once, on a stream.
void set_delay(int device, double seconds);
void sleep_on(int stream, double seconds);
void forget_delays();

// The check of order.
void set_checking(bool is_on);
bool is_checking();
void report(const std::string& complaint);
std::vector<std::string> take_reports();
bool is_ordered(const Access& access, int stream);
std::string describe(const Access& access);

// Memory.
c10::DeviceAllocator* allocator();
c10::DataPtr take(size_t size, int device, c10::Device seen_as);
bool is_block(const c10::DataPtr& data);
Block* block_of(const c10::DataPtr& data);
void forget_block(void* data);
void set_capacity(int device, size_t total_bytes, size_t outside_bytes);
void set_fraction(int device, double fraction);
double fraction(int device);
std::pair<size_t, size_t> memory(int device);  // total, free

// While one lives, what the host's allocator gives in this thread is memory of this device, and is accounted there.
struct AllocateOn {
  explicit AllocateOn(int device);
  ~AllocateOn();
  int before;
};

// Operators and the device guard are registered as the library is loaded; these need a call.
void register_guard();
void register_allocators();
const at::Generator& default_generator(int device);
at::Generator drawing_of(const at::Generator& generator);  // that of the CPU, which kernels take

}  // namespace standin
