// Two devices whose memory is the host's and whose kernels are the CPU's. What is late is late here, too: see simulated.py.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace {

using namespace at;
constexpr auto kSim = DeviceType::PrivateUse1;
constexpr int kDevices = 2;

std::recursive_mutex lock;
using Guard = std::lock_guard<std::recursive_mutex>;

// Streams: what was queued and has not been done yet.

struct Work {
  int64_t number;
  bool on_host; // whether it writes to the host's memory, where only the host waits for it
  Tensor target, source; // aliases, which hold the memory
};

struct Point {
  int device;
  int64_t stream, number;
};

struct Queue {
  std::deque<Work> works;
  std::vector<std::pair<int64_t, Point>> after; // from a number on: behind a point of another stream
};

std::map<std::pair<int, int64_t>, Queue> queues;
int64_t numbers = 0, streams = 0;
thread_local int current_device = 0;
thread_local int64_t current_stream[kDevices] = {0, 0};
thread_local int inside = 0; // within a kernel: copies are those of the fallback

struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};

Tensor seen(const Tensor& t) { // the same memory, as the CPU sees it
  auto* held = new Storage(t.storage());
  DataPtr data(const_cast<void*>(t.const_data_ptr()), held, [](void* p) { delete static_cast<Storage*>(p); }, kCPU);
  Storage storage(Storage::use_byte_size_t(), at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize()),
                  std::move(data), GetCPUAllocator(), true);
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

void put(const Tensor& target, const Tensor& source) { // both on the host
  InferenceMode guard;
  NoGradGuard no_grad;
  target.copy_(source);
}

void spoil(const Tensor& target) {
  InferenceMode guard;
  if (target.is_floating_point() || target.is_complex())
    target.fill_(std::numeric_limits<double>::quiet_NaN());
  else if (target.scalar_type() != kBool)
    target.fill_(target.scalar_type() == kByte ? 255 : -1);
}

void run(int device, int64_t stream, int64_t last, bool host) {
  auto& queue = queues[{device, stream}];
  if (host) {
    auto after = queue.after;
    for (auto& [number, point] : after)
      if (number <= last) run(point.device, point.stream, point.number, true);
  }
  std::deque<Work> left;
  for (auto& work : queue.works) {
    if (work.number <= last && (host || !work.on_host)) put(work.target, work.source);
    else left.push_back(work);
  }
  queue.works.swap(left);
}

void synchronize(int device) {
  for (auto& [key, queue] : std::map(queues))
    if (key.first == device) run(device, key.second, numbers, true);
}

bool is_done(const Point& point) {
  for (auto& work : queues[{point.device, point.stream}].works)
    if (work.number <= point.number) return false;
  return true;
}

void push(int device, int64_t stream, bool on_host, Tensor target, Tensor source) {
  queues[{device, stream}].works.push_back({++numbers, on_host, std::move(target), std::move(source)});
}

// A kernel or copy that is about to run on a stream. What side streams write is put aside until somebody waits for it.

struct Turn {
  int device;
  int64_t stream;
  std::vector<Tensor> targets, shown;
  std::vector<int64_t> places; // of what was queued before: events before it still stand for it
  Turn(int on_device, int64_t on_stream, const std::vector<Tensor>& written = {}) : device(on_device), stream(on_stream) {
    if (stream) {
      for (auto& work : queues[{device, stream}].works)
        if (!work.on_host) targets.push_back(work.target), places.push_back(work.number);
      for (auto& t : written) targets.push_back(seen(t));
      for (auto& t : targets) shown.push_back(t.clone());
    }
    run(device, stream, numbers, false);
  }
  void end(const std::vector<Tensor>& made = {}) {
    if (!stream) return;
    for (auto& t : made) push(device, stream, false, seen(t), seen(t).clone());
    for (size_t i = 0; i < targets.size(); ++i)
      queues[{device, stream}].works.push_back(
          {i < places.size() ? places[i] : ++numbers, false, targets[i], targets[i].clone()});
    for (auto& t : made) spoil(seen(t));
    for (size_t i = 0; i < targets.size(); ++i) put(targets[i], shown[i]);
  }
};

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
} quiet;

int64_t recorded[kDevices] = {0, 0}; // events, by the device of the stream

struct Event {
  Point point;
  int asked = 0;
  std::chrono::steady_clock::time_point time;
};

struct Impl final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device d) const override {
    Device old(kSim, current_device);
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(kSim, current_device); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < kDevices, "there are ", kDevices, " devices, not ", d);
    if (d.index() >= 0) current_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current_device = d.index(); }
  static int index(Device d) { return d.index() < 0 ? current_device : d.index(); }
  Stream getStream(Device d) const override {
    return Stream(Stream::UNSAFE, Device(kSim, index(d)), current_stream[index(d)]);
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, Device(kSim, index(d)), 0); }
  Stream getNewStream(Device d, int) const override {
    return Stream(Stream::UNSAFE, Device(kSim, index(d)), ++streams);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& s, const DeviceIndex own, const c10::EventFlag) const override {
    Guard guard(lock);
    TORCH_CHECK(own < 0 || own == s.device_index(), "an event of sim:", int(own), " is recorded on a stream of ", s.device());
    ++recorded[s.device_index()];
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {{s.device_index(), s.id(), numbers}, 0, std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& s) const override {
    Guard guard(lock);
    auto& point = static_cast<Event*>(event)->point;
    run(point.device, point.stream, point.number, false);
    queues[{s.device_index(), s.id()}].after.push_back({++numbers, point});
  }
  bool queryEvent(void* event) const override { // not at the first question, if there is something to do
    Guard guard(lock);
    auto& own = *static_cast<Event*>(event);
    if (!is_done(own.point) && own.asked++) run(own.point.device, own.point.stream, own.point.number, true);
    return is_done(own.point);
  }
  void synchronizeEvent(void* event) const override {
    Guard guard(lock);
    auto& point = static_cast<Event*>(event)->point;
    run(point.device, point.stream, point.number, true);
  }
  double elapsedTime(void* one, void* two, const DeviceIndex) const override {
    TORCH_CHECK(static_cast<Event*>(one)->point.device == static_cast<Event*>(two)->point.device,
                "no time is between events of two devices");
    auto time = static_cast<Event*>(two)->time - static_cast<Event*>(one)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const Stream& s) const override {
    Guard guard(lock);
    return is_done({s.device_index(), s.id(), numbers});
  }
  void synchronizeStream(const Stream& s) const override {
    Guard guard(lock);
    run(s.device_index(), s.id(), numbers, true);
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    Guard guard(lock);
    synchronize(d);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Impl);

// Memory

int64_t limits[kDevices] = {0, 0}, used[kDevices] = {0, 0}, peaks[kDevices] = {0, 0};

struct Block {
  int device;
  int64_t size;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    Guard guard(lock);
    used[block->device] -= block->size;
  }
  ::free(block);
}

struct Memory final : c10::DeviceAllocator {
  DataPtr allocate(size_t n) override {
    Guard guard(lock);
    int device = current_device;
    auto size = static_cast<int64_t>(n);
    TORCH_CHECK_WITH(OutOfMemoryError, !limits[device] || used[device] + size <= limits[device],
                     "sim:", device, " is out of memory: ", used[device], " of ", limits[device],
                     " bytes are in use, and ", size, " were asked for");
    auto* block = static_cast<Block*>(::aligned_alloc(64, (n + 127) / 64 * 64));
    *block = {device, size};
    char* data = reinterpret_cast<char*>(block) + 64;
    memset(data, 0xff, n); // nan, or -1
    used[device] += size;
    peaks[device] = std::max(peaks[device], used[device]);
    return {data, block, &release, Device(kSim, device)};
  }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(MempoolId_t) override {}
  void recordStream(const DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = used[d];
    stats.allocated_bytes[0].peak = peaks[d];
    return stats;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    int64_t all = limits[d] ? limits[d] : int64_t(1) << 34;
    return {static_cast<size_t>(all - used[d]), static_cast<size_t>(all)};
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override { peaks[d] = used[d]; }
} memory;
bool registered = (c10::SetAllocator(kSim, &memory), true);

std::map<const char*, size_t> pins;

struct Pinned final : Allocator {
  DataPtr allocate(size_t n) override {
    Guard guard(lock);
    auto* data = static_cast<char*>(::malloc(n + 1));
    pins[data] = n + 1;
    return {data, data, [](void* p) { Guard inner(lock); pins.erase(static_cast<char*>(p)); ::free(p); }, kCPU};
  }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} pinned;

bool is_pinned(const void* data) {
  Guard guard(lock);
  auto at = pins.upper_bound(static_cast<const char*>(data));
  return at != pins.begin() && static_cast<const char*>(data) < (--at)->first + at->second;
}

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex d) const override { current_device = d; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current_device, int(d)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  Device getDeviceFromPtr(void*) const override { return Device(kSim, current_device); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
} hooks;
bool hooked = (RegisterPrivateUse1HooksInterface(&hooks), true);

// Waits of the host

int64_t waits = 0;
bool tells = false;

void wait(int device, const char* what) {
  if (inside) return;
  ++waits;
  if (tells) TORCH_WARN("the host waits for sim:", device, " (", what, ")");
  run(device, current_stream[device], numbers, true);
}

// Tensors

bool late_unpinned = false; // whether copies without waiting from and to memory that is not pinned are late, too, as on MPS
bool has_float64 = true;

void check(ScalarType dtype) {
  TORCH_CHECK_TYPE(has_float64 || (dtype != kDouble && dtype != kComplexDouble), "sim has no ", dtype);
}

Device of(std::optional<Device> device) {
  return Device(kSim, device && device->index() >= 0 ? device->index() : current_device);
}

Tensor make(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::DeviceGuard guard(of(device));
  check(dtype_or_default(dtype));
  return at::detail::empty_generic(size, &memory, DispatchKeySet(DispatchKey::PrivateUse1), dtype_or_default(dtype), format);
}

Tensor make_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(of(device));
  check(dtype_or_default(dtype));
  return at::detail::empty_strided_generic(size, stride, &memory, DispatchKeySet(DispatchKey::PrivateUse1),
                                       dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  c10::DeviceGuard guard(self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = (self.storage_offset() + self.numel()) * self.element_size();
  auto storage = self.storage();
  if (storage.nbytes() < needed) {
    auto data = memory.allocate(needed);
    memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(needed);
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Guard guard(lock);
  auto source = seen(self), target = seen(dst);
  if (inside) {
    put(target, source);
    return dst;
  }
  int device = self.device().type() == kSim ? self.device().index() : dst.device().index();
  int64_t stream = current_stream[device];
  bool from_host = self.device().is_cpu(), to_host = dst.device().is_cpu();
  Turn turn(device, stream, to_host ? std::vector<Tensor>() : std::vector<Tensor>{dst});
  if (!from_host && !to_host) {
    put(target, source);
    turn.end();
  } else if (non_blocking && (late_unpinned || is_pinned((to_host ? dst : self).const_data_ptr()))) {
    auto taken = to_host ? source.clone() : source; // the host's memory is read when its turn comes
    turn.end();
    push(device, stream, to_host, target, taken);
    if (to_host) spoil(target);
  } else if (non_blocking && from_host) {
    put(target, source);
    turn.end();
  } else {
    wait(device, to_host ? "a copy to the host" : "a copy from the host");
    put(target, source);
  }
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (self.sizes() != dst.sizes()) dst.resize_(self.sizes());
  Inside within;
  return copy_from(self, dst, false);
}

Scalar read(const Tensor& self) {
  Guard guard(lock);
  wait(self.device().index(), "item");
  return seen(self).item();
}

std::vector<Tensor> to_cpu(TensorList tensors) { // for the fallback, whose kernels work where the tensors are
  std::vector<Tensor> found;
  for (auto& t : tensors) found.push_back(t.device().type() == kSim ? seen(t) : t);
  return found;
}

Tensor strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor viewed(const Tensor& self, IntArrayRef size) { return native::view(self, size); }
Tensor reshaped(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return native::_reshape_alias(self, size, stride);
}
Tensor unfolded(const Tensor& self, int64_t dim, int64_t size, int64_t step) { return native::unfold(self, dim, size, step); }
Tensor as_real(const Tensor& self) { return native::view_as_real(self); }
Tensor as_complex(const Tensor& self) { return native::view_as_complex(self); }
Tensor& set_storage(Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole(Tensor& self, Storage source) {
  int64_t count = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {count}, {1});
}

// Every other kernel is the CPU's, in the order of its stream.

const std::set<std::string> sized_by_values = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::bincount", "aten::repeat_interleave"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Guard guard(lock);
  const auto& schema = op.schema();
  const size_t given = schema.arguments().size();
  std::vector<Tensor> written;
  int device = -1;
  auto look = [&](const Tensor& t, bool is_written) {
    if (!t.defined() || t.device().type() != kSim) return;
    TORCH_CHECK(device < 0 || device == t.device().index() || t.dim() == 0, schema.name(),
                ": expected all tensors to be on the same device, but found sim:", device, " and ", t.device());
    if (device < 0 || t.dim()) device = t.device().index();
    if (is_written) written.push_back(t);
  };
  for (size_t i = 0; i < given; ++i) {
    const auto& value = (*stack)[stack->size() - given + i];
    const bool is_written = schema.arguments()[i].alias_info() && schema.arguments()[i].alias_info()->isWrite();
    if (value.isTensor()) look(value.toTensor(), is_written);
    else if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) look(t, is_written);
  }
  if (device < 0) device = current_device;
  const int64_t on = current_stream[device];
  if (sized_by_values.count(schema.name())) wait(device, schema.name().c_str());
  if (inside) {
    native::cpu_fallback(op, stack);
    return;
  }
  Turn turn(device, on, written);
  {
    Inside within;
    c10::WarningUtils::WarningHandlerGuard handler(&quiet);
    c10::DeviceGuard on_device(Device(kSim, device));
    native::cpu_fallback(op, stack);
  }
  std::vector<Tensor> made;
  for (size_t i = stack->size() - schema.returns().size(); written.empty() && i < stack->size(); ++i)
    if ((*stack)[i].isTensor() && (*stack)[i].toTensor().device().type() == kSim) made.push_back((*stack)[i].toTensor());
  turn.end(made);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &make);
  m.impl("empty_strided", &make_strided);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &read);
  m.impl("_to_cpu", &to_cpu);
  m.impl("record_stream", [](Tensor&, Stream) {});
  m.impl("as_strided", &strided);
  m.impl("view", &viewed);
  m.impl("_reshape_alias", &reshaped);
  m.impl("unfold", &unfolded);
  m.impl("view_as_real", &as_real);
  m.impl("view_as_complex", &as_complex);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
}

// What autocast casts: the operations of the CPU's autocast that the tests use.

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

TORCH_LIBRARY(sim, m) {
  m.def("waits", []() { return waits; });
  m.def("tell", [](bool on) { tells = on; });
  m.def("recorded", [](int64_t device) { return recorded[device]; });
  m.def("late_unpinned", [](bool on) { late_unpinned = on; });
  m.def("float64", [](bool on) { has_float64 = on; });
  m.def("limit", [](int64_t device, int64_t bytes) { limits[device] = bytes; });
  m.def("queued", [](int64_t device) {
    Guard guard(lock);
    int64_t found = 0;
    for (auto& [key, queue] : queues) if (key.first == device) found += queue.works.size();
    return found;
  });
}

} // namespace
