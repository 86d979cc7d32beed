// What Python calls.
#include <torch/csrc/utils/pybind.h>


#include "runtime.h"

namespace py = pybind11;
using namespace standin;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("init", [](int count) {
    TORCH_CHECK(count >= 1 && count <= kMaxDevices, count, " devices: expected 1 to ", kMaxDevices);
    set_num_devices(count);
    register_guard();
    register_allocators();
  });
  m.def("device_count", &num_devices);
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("synchronize", [](int device) { synchronize_device(device); }, py::call_guard<py::gil_scoped_release>());
  m.def("stats", [](int device) {
    const auto stats = allocator()->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    py::dict said;
    const auto say = [&](const std::string& name, const c10::CachingAllocator::StatArray& stat) {
      said[(name + ".all.current").c_str()] = stat[0].current;
      said[(name + ".all.peak").c_str()] = stat[0].peak;
      said[(name + ".all.allocated").c_str()] = stat[0].allocated;
      said[(name + ".all.freed").c_str()] = stat[0].freed;
    };
    say("allocation", stats.allocation);
    say("segment", stats.segment);
    say("active", stats.active);
    say("allocated_bytes", stats.allocated_bytes);
    say("reserved_bytes", stats.reserved_bytes);
    say("active_bytes", stats.active_bytes);
    say("requested_bytes", stats.requested_bytes);
    said["num_alloc_retries"] = stats.num_alloc_retries;
    said["num_ooms"] = stats.num_ooms;
    return said;
  });
  m.def("reset_peaks", [](int device) { allocator()->resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
  m.def("empty_cache", [] { allocator()->emptyCache(); }, py::call_guard<py::gil_scoped_release>());
  m.def("memory", &memory);
  m.def("set_capacity", &set_capacity);
  m.def("set_fraction", &set_fraction);
  m.def("fraction", &fraction);
  m.def("set_delay", &set_delay);
  m.def("sleep", [](int device, double seconds) { sleep_on(index_of(current_stream(device)), seconds); });
  m.def("forget_delays", &forget_delays);
  m.def("set_checking", &set_checking);
  m.def("is_checking", &is_checking);
  m.def("take_reports", &take_reports);
  m.def("default_generator", [](int device) { return default_generator(device); });
}
