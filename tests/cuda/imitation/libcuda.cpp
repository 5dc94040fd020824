// An imitation of NVIDIA's libcuda.so.1, as much of it as cuda.bindings and edgeq call.  Memory is host memory, and a kernel is
// the library that the emulator made of the same text.  The environment says what GPU it is:
//   IMITATED_SM, IMITATED_MEMORY (bytes), IMITATED_DRIVER (12060), IMITATED_COUNT, IMITATED_INTEGRATED
//   IMITATED_HELD      blocks of threads of any kernel that a multiprocessor holds
//   IMITATED_KERNELS   folder of NAME.so for each kernel, and NAME.sizes: the bytes of its parameters
//   IMITATED_CORE      the emulator's own library
//   IMITATED_CONTEXTS  file to which a line with the process is added whenever a context is made
//   IMITATED_FAIL      "function:error:call": that call of the function, counted from 1, fails, as do all in the context after it
//
// What a real driver forgives least is refused: no current context, addresses outside of allocations, host memory that is not
// pinned, images for other GPUs.  Copies and launches are done when something waits for them, not when they are asked for.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
       INVALID_CONTEXT = 201, NO_BINARY = 209, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719, INVALID_CAPTURE = 900 };

namespace {
using Address = unsigned long long;
struct Module { std::string image; };
struct Event { double time; int waiting; bool timed; };  // waiting: times in the queue that it was recorded
struct Function { std::string name; void (*entry)(void **); char *shared, *shared_end; std::vector<int> sizes; };

long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

std::map<Address, size_t> allocations, pinned;
using Steps = std::deque<std::function<int()>>;
Steps queue, *capture;
std::map<Steps *, bool> graphs;  // true: it can be started
std::map<std::string, int> counts;
size_t fetched = 64;  // bytes that a miss of L2 brings
int context_marker, stream_marker, retained, lost, initialized;
thread_local void *current;
thread_local std::vector<void *> covered;

bool within(const std::map<Address, size_t> &memory, Address address, size_t count) {
  auto next = memory.upper_bound(address);
  if (next == memory.begin()) return false;
  --next;
  return address + count <= next->first + next->second;
}

int fails(const char *function) {
  const char *text = getenv("IMITATED_FAIL");
  if (text && !lost) {
    char name[64];
    int error = 0, call = 1;
    if (sscanf(text, "%63[^:]:%d:%d", name, &error, &call) >= 2 && !strcmp(name, function) && ++counts[function] == call) {
      // Want of memory leaves a context as it was.
      if (error == OUT_OF_MEMORY) return error;
      lost = error;
    }
  }
  return lost;
}

int inside(const char *function) {
  if (!initialized) return INVALID_CONTEXT;
  if (int error = fails(function)) return error;
  return current == &context_marker && retained ? SUCCESS : INVALID_CONTEXT;
}

int later(std::function<int()> step) {
  (capture ? *capture : queue).push_back(step);
  return SUCCESS;
}

// Does what was asked for: all of it, or as long as `waiting` of an event says that more has to come before it.
int finish(const int *waiting = nullptr) {
  if (capture) return INVALID_CAPTURE;
  while (!queue.empty() && (!waiting || *waiting)) {
    int error = queue.front()();
    queue.pop_front();
    if (error) return lost = error;
  }
  return SUCCESS;
}

void *core() {
  static void *library = dlopen(getenv("IMITATED_CORE"), RTLD_NOW | RTLD_GLOBAL);
  return library;
}

int run(Function *f, unsigned x, unsigned y, unsigned z, unsigned threads, std::vector<uint64_t> values) {
  auto launch = reinterpret_cast<const char *(*)(void (*)(void **), void **, const unsigned *, int, int, char *, char *)>(
      dlsym(core(), "emulated_launch"));
  std::vector<void *> places;
  for (auto &value : values) places.push_back(&value);
  unsigned grid[3] = {x, y, z};
  const char *failed = launch(f->entry, places.data(), grid, threads, 0, f->shared, f->shared_end);
  if (failed) fprintf(stderr, "%s: %s\n", f->name.c_str(), failed);
  return failed ? LAUNCH_FAILED : SUCCESS;
}
}  // namespace

#define CALL(name) \
  if (int error = inside(name)) return error

extern "C" {
int cuInit(unsigned) {
  initialized = 1;
  return setting("IMITATED_COUNT", 1) ? SUCCESS : NO_DEVICE;
}
int cuDriverGetVersion(int *version) { return *version = setting("IMITATED_DRIVER", 12060), SUCCESS; }
int cuDeviceGetCount(int *count) { return *count = setting("IMITATED_COUNT", 1), SUCCESS; }
int cuDeviceGet(int *device, int ordinal) {
  return *device = ordinal, ordinal < setting("IMITATED_COUNT", 1) ? SUCCESS : INVALID_DEVICE;
}
int cuDeviceGetName(char *name, int length, int ordinal) {
  return snprintf(name, length, "Imitated GPU %d", ordinal), SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, int) {
  long sm = setting("IMITATED_SM", 87);
  switch (attribute) {
    case 75: return *value = sm / 10, SUCCESS;
    case 76: return *value = sm % 10, SUCCESS;
    case 16: return *value = 8, SUCCESS;
    case 18: return *value = setting("IMITATED_INTEGRATED", 0), SUCCESS;
  }
  return INVALID_VALUE;
}
int cuDeviceTotalMem(size_t *bytes, int) { return *bytes = setting("IMITATED_MEMORY", 1L << 32), SUCCESS; }
int cuDevicePrimaryCtxRetain(void **context, int) {
  if (!retained++) {
    lost = 0;
    if (const char *path = getenv("IMITATED_CONTEXTS")) std::ofstream(path, std::ios::app) << getpid() << "\n";
  }
  return *context = &context_marker, SUCCESS;
}
int cuDevicePrimaryCtxRelease(int) {
  if (!--retained) allocations.clear(), pinned.clear(), queue.clear(), graphs.clear(), capture = nullptr, lost = 0;
  return SUCCESS;
}
int cuCtxSetCurrent(void *context) { return current = context, SUCCESS; }
int cuCtxPushCurrent(void *context) { return covered.push_back(current), current = context, SUCCESS; }
int cuCtxPopCurrent(void **context) {
  if (covered.empty()) return INVALID_CONTEXT;
  *context = current, current = covered.back(), covered.pop_back();
  return SUCCESS;
}
int cuCtxSetLimit(int limit, size_t value) {
  CALL("cuCtxSetLimit");
  if (limit != 5) return INVALID_VALUE;
  return fetched = value, SUCCESS;
}
int imitated_fetched() { return fetched; }
int cuCtxGetCurrent(void **context) { return *context = current, SUCCESS; }

int cuMemGetInfo(size_t *free, size_t *total) {
  CALL("cuMemGetInfo");
  size_t taken = 0;
  for (auto &each : allocations) taken += each.second;
  *total = setting("IMITATED_MEMORY", 1L << 32);
  return *free = *total > taken ? *total - taken : 0, SUCCESS;
}
int cuMemAlloc(Address *address, size_t bytes) {
  CALL("cuMemAlloc");
  size_t free, total;
  cuMemGetInfo(&free, &total);
  if (!bytes) return INVALID_VALUE;
  if (bytes > free) return OUT_OF_MEMORY;
  void *memory = aligned_alloc(256, (bytes + 511) / 256 * 256);
  memset(memory, 0xff, bytes);
  allocations[*address = Address(memory)] = bytes;
  return SUCCESS;
}
int cuMemFree(Address address) {
  CALL("cuMemFree");
  if (int error = finish()) return error;
  if (!allocations.erase(address)) return INVALID_VALUE;
  return free(reinterpret_cast<void *>(address)), SUCCESS;
}
int cuMemHostAlloc(void **memory, size_t bytes, unsigned) {
  CALL("cuMemHostAlloc");
  *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return pinned[Address(*memory)] = bytes, SUCCESS;
}
int cuMemFreeHost(void *memory) {
  CALL("cuMemFreeHost");
  if (int error = finish()) return error;
  if (!pinned.erase(Address(memory))) return INVALID_VALUE;
  return free(memory), SUCCESS;
}
static int copy(Address to, Address from, Address device, Address host, size_t bytes) {
  if (!within(allocations, device, bytes) || !within(pinned, host, bytes)) return INVALID_VALUE;
  return later([=] {
    // A graph may outlive what it copies.
    if (!within(allocations, device, bytes) || !within(pinned, host, bytes)) return int(ILLEGAL_ADDRESS);
    return memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes), int(SUCCESS);
  });
}
int cuMemcpyHtoDAsync(Address to, const void *from, size_t bytes, void *stream) {
  CALL("cuMemcpyHtoDAsync");
  return stream == &stream_marker ? copy(to, Address(from), to, Address(from), bytes) : INVALID_VALUE;
}
int cuMemcpyDtoHAsync(void *to, Address from, size_t bytes, void *stream) {
  CALL("cuMemcpyDtoHAsync");
  return stream == &stream_marker ? copy(Address(to), from, from, Address(to), bytes) : INVALID_VALUE;
}
int cuMemcpyDtoDAsync(Address to, Address from, size_t bytes, void *stream) {
  CALL("cuMemcpyDtoDAsync");
  if (stream != &stream_marker || !within(allocations, to, bytes) || !within(allocations, from, bytes)) return INVALID_VALUE;
  return later([=] { return memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes), SUCCESS; });
}
int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void *stream) {
  CALL("cuMemsetD8Async");
  if (stream != &stream_marker || !within(allocations, to, bytes)) return INVALID_VALUE;
  return later([=] { return memset(reinterpret_cast<void *>(to), value, bytes), SUCCESS; });
}

int cuStreamCreate(void **stream, unsigned) {
  CALL("cuStreamCreate");
  return *stream = &stream_marker, SUCCESS;
}
int cuStreamSynchronize(void *) {
  CALL("cuStreamSynchronize");
  return finish();
}
int cuStreamDestroy(void *) {
  CALL("cuStreamDestroy");
  return SUCCESS;
}

int cuStreamBeginCapture(void *stream, int) {
  CALL("cuStreamBeginCapture");
  if (stream != &stream_marker || capture) return INVALID_VALUE;
  return capture = new Steps, SUCCESS;
}
int cuStreamEndCapture(void *stream, Steps **graph) {
  CALL("cuStreamEndCapture");
  if (stream != &stream_marker || !capture) return INVALID_VALUE;
  graphs[*graph = capture] = false, capture = nullptr;
  return SUCCESS;
}
int cuGraphInstantiate(Steps **made, Steps *graph, unsigned long long flags) {
  CALL("cuGraphInstantiate");
  if (!graphs.count(graph) || flags) return INVALID_VALUE;
  graphs[*made = new Steps(*graph)] = true;
  return SUCCESS;
}
int cuGraphInstantiateWithFlags(Steps **made, Steps *graph, unsigned long long flags) {
  return cuGraphInstantiate(made, graph, flags);
}
int cuGraphLaunch(Steps *graph, void *stream) {
  CALL("cuGraphLaunch");
  if (!graphs.count(graph) || !graphs[graph] || stream != &stream_marker || capture) return INVALID_VALUE;
  for (auto &step : *graph) queue.push_back(step);
  return SUCCESS;
}
static int drop(Steps *graph, bool started) {
  auto found = graphs.find(graph);
  if (found == graphs.end() || found->second != started) return INVALID_VALUE;
  return graphs.erase(found), delete graph, SUCCESS;
}
int cuGraphDestroy(Steps *graph) {
  CALL("cuGraphDestroy");
  return drop(graph, false);
}
int cuGraphExecDestroy(Steps *graph) {
  CALL("cuGraphExecDestroy");
  return drop(graph, true);
}
int imitated_graphs() { return graphs.size(); }
int cuEventCreate(Event **event, unsigned flags) {
  CALL("cuEventCreate");
  return *event = new Event{0, 0, flags != 2}, SUCCESS;
}
static int stamp(Event *event) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return event->time = 1e3 * now.tv_sec + 1e-6 * now.tv_nsec, int(SUCCESS);
}
int cuEventRecord(Event *event, void *stream) {
  CALL("cuEventRecord");
  // In a graph it would order steps and take no time.
  if (capture) return INVALID_CAPTURE;
  if (stream != &stream_marker) return INVALID_VALUE;
  ++event->waiting;
  return later([=] { return --event->waiting, stamp(event); });
}
int cuEventRecordWithFlags(Event *event, void *stream, unsigned flags) {
  CALL("cuEventRecordWithFlags");
  return flags == 1 && stream == &stream_marker ? later([=] { return stamp(event); }) : INVALID_VALUE;
}
int cuEventSynchronize(Event *event) {
  CALL("cuEventSynchronize");
  // One that a graph records has no place in the queue of its own.
  return event->timed ? finish() : finish(&event->waiting);
}
int cuEventElapsedTime(float *milliseconds, Event *start, Event *stop) {
  return *milliseconds = stop->time - start->time, start->time && stop->time ? SUCCESS : INVALID_VALUE;
}
int cuEventDestroy(Event *event) {
  CALL("cuEventDestroy");
  if (int error = finish()) return error;
  return delete event, SUCCESS;
}

int cuModuleLoadData(Module **module, const void *image) {
  CALL("cuModuleLoadData");
  const char *bytes = static_cast<const char *>(image);
  if (!memcmp(bytes, "\177ELF", 4)) {
    // Of an ELF file of 64 bits the end of the table of sections is the end of machine code; e_flags begin with the sm.
    uint64_t sections;
    uint32_t flags;
    uint16_t size, count;
    memcpy(&sections, bytes + 40, 8), memcpy(&flags, bytes + 48, 4), memcpy(&size, bytes + 58, 2), memcpy(&count, bytes + 60, 2);
    long sm = setting("IMITATED_SM", 87), own = flags & 0xff;
    if (own / 10 != sm / 10 || own > sm) return NO_BINARY;
    *module = new Module{std::string(bytes, sections + size * count)};
    return SUCCESS;
  }
  std::string text(bytes);
  if (text.find(".version") == std::string::npos) return INVALID_IMAGE;
  return *module = new Module{text}, SUCCESS;
}
int cuModuleUnload(Module *module) {
  CALL("cuModuleUnload");
  return delete module, SUCCESS;
}
int cuModuleGetFunction(Function **function, Module *module, const char *name) {
  CALL("cuModuleGetFunction");
  if (module->image.find(name) == std::string::npos) return NOT_FOUND;
  void *library = core() ? dlopen((std::string(getenv("IMITATED_KERNELS")) + "/" + name + ".so").c_str(), RTLD_NOW) : nullptr;
  if (!library) return fprintf(stderr, "%s\n", dlerror()), NOT_FOUND;
  auto address = [&](const char *symbol) { return reinterpret_cast<char *(*)()>(dlsym(library, symbol))(); };
  auto entry = reinterpret_cast<void (*)(void **)>(dlsym(library, "emulated_kernel"));
  std::vector<int> of;
  std::ifstream sizes(std::string(getenv("IMITATED_KERNELS")) + "/" + name + ".sizes");
  for (int size; sizes >> size;) of.push_back(size);
  *function = new Function{name, entry, address("emulated_shared_start"), address("emulated_shared_stop"), of};
  return SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Function *f, int threads, size_t shared) {
  CALL("cuOccupancyMaxActiveBlocksPerMultiprocessor");
  if (!f || threads < 1 || threads > 1024 || shared) return INVALID_VALUE;
  return *blocks = setting("IMITATED_HELD", 4), SUCCESS;
}
int cuLaunchKernel(Function *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **values, void **extra) {
  CALL("cuLaunchKernel");
  if (stream != &stream_marker || by != 1 || bz != 1 || shared || extra || !x || !y || !z || y > 65535 || z > 65535 || bx > 1024)
    return INVALID_VALUE;
  // As a driver does: each argument is as long as its parameter, and taken at once.
  std::vector<uint64_t> taken(f->sizes.size());
  for (size_t i = 0; i < taken.size(); ++i) memcpy(&taken[i], values[i], f->sizes[i]);
  return later([=] { return run(f, x, y, z, bx, taken); });
}

int cuGetErrorName(int error, const char **name) { return *name = "", error ? INVALID_VALUE : SUCCESS; }
int cuGetErrorString(int error, const char **text) {
  static const std::map<int, const char *> texts{{1, "invalid argument"}, {2, "out of memory"}, {201, "invalid device context"},
    {209, "no kernel image is available for execution on the device"}, {700, "an illegal memory access was encountered"},
    {719, "unspecified launch failure"}, {222, "the provided PTX was compiled with an unsupported toolchain."}};
  auto found = texts.find(error);
  return *text = found == texts.end() ? "unknown error" : found->second, SUCCESS;
}

int cuGetProcAddress_v2(const char *symbol, void **function, int, uint64_t, int *) {
  static void *self = [] {
    Dl_info about;
    dladdr(reinterpret_cast<void *>(&cuInit), &about);
    return dlopen(about.dli_fname, RTLD_NOW);
  }();
  return *function = dlsym(self, symbol), SUCCESS;
}
}
