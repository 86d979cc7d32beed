// Streams, events and the host as vector clocks and times, and the check of what reads and writes memory when.
#include <Python.h>

#include <torch/csrc/autograd/node.h>

#include "runtime.h"

#include <chrono>
#include <thread>
#include <unordered_set>

namespace standin {
namespace {

struct Stream {
  Clock clock{};
  double ready_at = 0;  // when what was asked of it would be done
};

struct Arrival {
  int stream;
  uint64_t tick;
  std::function<void()> arrive;
};

int devices = 4;
std::array<Stream, kClocks> streams;
Clock host{};  // of all threads together: handing something from one to another orders it
std::array<double, kMaxDevices> delays{};
std::array<int, kMaxDevices> next_of_pool{};
std::vector<Arrival> arrivals;
bool checking = false;
std::vector<std::string> reports;

thread_local int device_here = 0;
thread_local std::array<int64_t, kMaxDevices> streams_here{};

void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kClocks; ++i) into[i] = std::max(into[i], other[i]);
}

void sleep_until(double time) {
  if (time > now()) {
    PyThreadState* released = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    std::this_thread::sleep_for(std::chrono::duration<double>(time - now()));
    if (released) PyEval_RestoreThread(released);
  }
}

void host_reaches(const Clock& clock, double ready_at) {
  sleep_until(ready_at);
  std::vector<Arrival> arrived;
  {
    std::lock_guard<std::recursive_mutex> guard(lock());
    join(host, clock);
    std::vector<Arrival> waiting;
    for (auto& each : arrivals) (host[each.stream] >= each.tick ? arrived : waiting).push_back(std::move(each));
    arrivals = std::move(waiting);
  }
  for (auto& each : arrived) each.arrive();
}

bool is_left_out(const std::string& file) {
  for (const char* part : {"/torch/", "<frozen", "/_pytest/", "/pluggy/", "/threading.py", "/concurrent/", "/contextlib.py"})
    if (file.find(part) != std::string::npos) return true;
  return false;
}

// The innermost lines of Python that are neither torch's own nor whoever runs the program.
std::string python_lines() {
  if (!Py_IsInitialized()) return "";
  const PyGILState_STATE gil = PyGILState_Ensure();
  std::string said;
  int count = 0;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr && count < 3) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const std::string file = PyUnicode_AsUTF8(code->co_filename);
    if (!is_left_out(file)) {
      said += (count++ ? " < " : " at ") + file.substr(file.rfind('/') + 1) + ":" +
          std::to_string(PyFrame_GetLineNumber(frame)) + " in " + PyUnicode_AsUTF8(code->co_name);
    }
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  PyGILState_Release(gil);
  return said;
}

}  // namespace

std::recursive_mutex& lock() {
  static std::recursive_mutex* mutex = new std::recursive_mutex;  // outlives what is freed as the process ends
  return *mutex;
}

int num_devices() { return devices; }
void set_num_devices(int count) { devices = count; }

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int index_of(const c10::Stream& stream) {
  const int device = stream.device_index() < 0 ? device_here : stream.device_index();
  return device * kStreams + static_cast<int>(stream.id());
}
c10::Stream stream_at(int index) {
  return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(index / kStreams)}, index % kStreams);
}
int current_device() { return device_here; }
void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < devices, "standin:", device, " is not there: there are ", devices, " devices");
  device_here = device;
}
c10::Stream current_stream(int device) {
  device = device < 0 ? device_here : device;
  return stream_at(device * kStreams + static_cast<int>(streams_here[device]));
}
c10::Stream exchange_stream(const c10::Stream& stream) {
  auto before = current_stream(stream.device_index());
  streams_here[stream.device_index()] = stream.id();
  return before;
}
c10::Stream next_stream(int device) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  device = device < 0 ? device_here : device;
  return stream_at(device * kStreams + 1 + next_of_pool[device]++ % (kStreams - 1));
}

uint64_t begin_work(int stream) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  join(streams[stream].clock, host);
  return ++streams[stream].clock[stream];
}

void end_work(int stream) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  streams[stream].ready_at = std::max(streams[stream].ready_at, now()) + delays[stream / kStreams];
}

bool is_ordered(const Access& access, int stream) {
  return access.stream == stream || host[access.stream] >= access.tick ||
      streams[stream].clock[access.stream] >= access.tick;
}

std::string describe(const Access& access) {
  const auto stream = stream_at(access.stream);
  return std::string(access.writes ? "written" : "read") + " on standin:" + std::to_string(stream.device_index()) +
      ", stream " + std::to_string(stream.id()) + ", by " + (access.place ? *access.place : "what was not watched");
}

void touch(Block* block, size_t begin, size_t end, int stream, uint64_t tick, bool writes, const Place& place) {
  if (begin >= end) return;
  std::lock_guard<std::recursive_mutex> guard(lock());
  const Access access{begin, end, stream, tick, writes, place};
  std::vector<Access> kept;
  for (auto& before : block->accesses) {
    const bool overlaps = before.begin < end && begin < before.end;
    const bool ordered = !overlaps || is_ordered(before, stream);
    if (checking && !ordered && (writes || before.writes)) {
      report("no order between two accesses to the same memory: it was " + describe(before) + "; then " +
             describe(access));
    }
    const bool superseded = ordered && begin <= before.begin && before.end <= end &&
        (writes || (!before.writes && before.stream == stream));
    if (!superseded) kept.push_back(std::move(before));
  }
  kept.push_back(access);
  block->accesses = std::move(kept);
}

void record(Event& event, int stream) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  event.clock = streams[stream].clock;
  event.ready_at = std::max(streams[stream].ready_at, now());
  event.device = stream / kStreams;
}

void wait(int stream, const Event& event) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  join(streams[stream].clock, event.clock);
  streams[stream].ready_at = std::max(streams[stream].ready_at, event.ready_at);
}

void wait_for_stream(int waiting, int stream) {
  Event event;
  record(event, stream);
  wait(waiting, event);
}

bool has_finished(int stream) {
  Event event;
  record(event, stream);
  return has_finished(event);
}

bool has_finished(const Event& event) {
  if (event.ready_at > now()) return false;
  host_reaches(event.clock, event.ready_at);
  return true;
}

void host_has_seen(const Event& event) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  join(host, event.clock);
}

void synchronize(int stream) {
  Event event;
  record(event, stream);
  synchronize(event);
}

void synchronize(const Event& event) { host_reaches(event.clock, event.ready_at); }

void synchronize_device(int device) {
  for (int i = 0; i < kStreams; ++i) synchronize(device * kStreams + i);
}

void when_host_reaches(int stream, uint64_t tick, std::function<void()> arrive) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  arrivals.push_back({stream, tick, std::move(arrive)});
}

void set_delay(int device, double seconds) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  delays[device] = seconds;
}

void sleep_on(int stream, double seconds) {
  begin_work(stream);
  std::lock_guard<std::recursive_mutex> guard(lock());
  streams[stream].ready_at = std::max(streams[stream].ready_at, now()) + seconds;
}

void forget_delays() {
  std::lock_guard<std::recursive_mutex> guard(lock());
  delays.fill(0);
  for (auto& stream : streams) stream.ready_at = std::min(stream.ready_at, now());
}

void set_checking(bool is_on) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  checking = is_on;
}
bool is_checking() { return checking; }

void report(const std::string& complaint) {
  if (std::find(reports.begin(), reports.end(), complaint) == reports.end()) reports.push_back(complaint);
}
std::vector<std::string> take_reports() {
  std::lock_guard<std::recursive_mutex> guard(lock());
  return std::exchange(reports, {});
}

Place here(const std::string& what) {
  if (!checking) return nullptr;
  std::string said = what;
  if (auto node = torch::autograd::get_current_node()) said += " in " + node->name();
  return std::make_shared<const std::string>(said + python_lines());
}

}  // namespace standin
