// The scheduler of the emulator, and the warp operations.  emulator.h says how threads take turns.
#include "emulator.h"
#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <ucontext.h>
#include <unordered_map>
#include <vector>
#include <iterator>

namespace {
enum State { READY, AT_WARP, AT_BARRIER, DONE };
constexpr int WARP = 32, MOST_COPIES = 64;
constexpr size_t STACK = 64 << 10;

struct Copy { void *to; const void *from; };

struct Thread : Lane {
  State state;
  int warp;
  bool made = false;  // its fiber exists and waits in `start` for a block
  jmp_buf context;
  Copy copies[MOST_COPIES];  // asynchronous copies that were asked for and have not been waited for, oldest first
  int copy_count, group_ends[MOST_COPIES], group_count;
  bool fenced;  // since its last barrier: what the block wrote before that barrier, others then see
};

struct Warp {
  int arrived, operation;  // lanes that are at the warp operation, and which
  int next;                // place in lane_order of the lane that runs after the present one
};

std::vector<Thread> threads;
std::vector<Warp> warps;
std::vector<char> stacks;
std::vector<int> lane_order, warp_order;
ucontext_t first_context;
jmp_buf scheduler;
Thread *current;
void (*entry)(void **);
void **arguments;
bool copies_come_early;
char failure[256];
char *shared_start, *shared_stop;
struct Range { uintptr_t start, stop; };  // of addresses
std::vector<Range> allowed;  // what a kernel that is checked may read and write, in order
std::vector<const void *> raised;                 // counters that the present block raised
std::unordered_map<const void *, bool> arrivals;  // of a launch, by counter: whether the last block to raise it fenced after that

void note(const char *message) {
  const Index &block = current->block;
  snprintf(failure, sizeof failure, "%s (block %u %u %u, thread %u)", message, block.x, block.y, block.z, current->thread.x);
}

void fail(const char *message) {
  note(message);
  _longjmp(scheduler, 2);
}

void resume(Thread &thread) {
  current = &thread;
  emulated_lane = &thread;
  _longjmp(thread.context, 1);
}

// Gives the turn to the next lane of a warp that can run, else returns.
void run_warp(int number) {
  Warp &warp = warps[number];
  for (int i = 0; i < WARP; ++i) {
    Thread &lane = threads[number * WARP + lane_order[warp.next]];
    warp.next = (warp.next + 1) % WARP;
    if (lane.state == READY) resume(lane);
  }
}

// Gives the turn to another lane, else to the scheduler; returns when this thread has it again.
void leave() {
  if (_setjmp(current->context)) return;
  run_warp(current->warp);
  _longjmp(scheduler, 1);
}

// The life of a fiber: one block after the other.
void start() {
  if (!_setjmp(current->context)) _longjmp(scheduler, 1);
  for (;;) {
    entry(arguments);
    current->state = DONE;
    leave();
  }
}

bool within(const Range &range, uintptr_t at, size_t bytes) { return range.start <= at && at + bytes <= range.stop; }

// An access of a kernel that is checked.
void check(uintptr_t at, size_t bytes) {
  Range own[] = {{uintptr_t(stacks.data()), uintptr_t(stacks.data() + stacks.size())},
                 {uintptr_t(threads.data()), uintptr_t(threads.data() + threads.size())},
                 {uintptr_t(shared_start), uintptr_t(shared_stop)}};
  for (const Range &range : own)
    if (within(range, at, bytes)) return;
  auto next = std::upper_bound(allowed.begin(), allowed.end(), at, [](uintptr_t a, const Range &r) { return a < r.start; });
  if (next == allowed.begin() || !within(*std::prev(next), at, bytes)) fail("an access outside of every allocation");
}

void shuffle(Thread *lanes, bool exclusive) {
  for (int i = 0; i < WARP; ++i) {
    unsigned from = exclusive ? i ^ lanes[i].in.words[1] : lanes[i].in.words[1];
    lanes[i].out.words[0] = lanes[from % WARP].in.words[0];
  }
}

typedef float Floats __attribute__((vector_size(32)));
typedef int Ints __attribute__((vector_size(32)));

// Eight halves as floats.
Floats widened(const uint16_t *halves) {
  Floats wide;
#if defined(__F16C__)
  typedef short Shorts __attribute__((vector_size(16)));
  Shorts narrow;
  memcpy(&narrow, halves, sizeof narrow);
  wide = __builtin_ia32_vcvtph2ps256(narrow);
#else
  for (int i = 0; i < 8; ++i) {
    half h;
    h.bits = halves[i];
    wide[i] = h;
  }
#endif
  return wide;
}

// m16n8k16: lane (g = lane / 4, t = lane % 4) has rows g, g + 8 and columns 2t, 2t + 1 (+ 8) of A, PTX ISA 9.7.14.5.
void mma_f16(Thread *lanes) {
  uint16_t a[16][16], b[16][8];
  float row[16];
  Floats columns[16], d[16];
  for (int l = 0; l < WARP; ++l) {
    int g = l / 4, t = l % 4;
    const Operands &in = lanes[l].in;
    for (int i = 0; i < 4; ++i) memcpy(&a[g + i % 2 * 8][2 * t + i / 2 * 8], &in.words[i], 4);
    for (int h = 0; h < 2; ++h)
      for (int i = 0; i < 2; ++i) {
        b[2 * t + h + i * 8][g] = uint16_t(in.words[4 + i] >> 16 * h);
        d[g + i * 8][2 * t + h] = in.floats[6 + 2 * i + h];
      }
  }
  for (int k = 0; k < 16; ++k) columns[k] = widened(b[k]);
  for (int r = 0; r < 16; ++r) {
    for (int k = 0; k < 16; k += 8) {
      Floats wide = widened(a[r] + k);
      memcpy(row + k, &wide, sizeof wide);
    }
    for (int k = 0; k < 16; ++k) d[r] += row[k] * columns[k];
  }
  for (int l = 0; l < WARP; ++l)
    for (int i = 0; i < 4; ++i) lanes[l].out.floats[i] = d[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
}

// m16n8k32 of unsigned by signed bytes: lane (g, t) has rows g, g + 8 and columns 4t ... 4t + 3 (+ 16) of A.
void mma_u8s8(Thread *lanes) {
  uint8_t a[16][32];
  Ints b[32], d[16];
  for (int l = 0; l < WARP; ++l) {
    int g = l / 4, t = l % 4;
    const Operands &in = lanes[l].in;
    for (int i = 0; i < 4; ++i) {
      memcpy(&a[g + i % 2 * 8][4 * t + i / 2 * 16], &in.words[i], 4);
      for (int j = 0; j < 2; ++j) b[4 * t + i + j * 16][g] = int8_t(in.words[4 + j] >> 8 * i);
      d[g + i / 2 * 8][2 * t + i % 2] = int(in.words[6 + i]);
    }
  }
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < 32; ++k) d[r] += a[r][k] * b[k];
  for (int l = 0; l < WARP; ++l)
    for (int i = 0; i < 4; ++i) lanes[l].out.words[i] = uint32_t(d[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2]);
}

void perform(int operation, Thread *lanes) {
  switch (operation) {
    case SHUFFLE: return shuffle(lanes, false);
    case SHUFFLE_XOR: return shuffle(lanes, true);
    case MMA_F16: return mma_f16(lanes);
    case MMA_U8S8: return mma_u8s8(lanes);
  }
}

void make_fiber(Thread &thread, char *stack) {
  ucontext_t context = first_context;
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = STACK;
  current = &thread;
  makecontext(&context, start, 0);
  if (_setjmp(scheduler) == 0) setcontext(&context);
  thread.made = true;
}

void run_block(Index block) {
  int count = int(threads.size());
  for (int i = 0; i < count; ++i) {
    Thread &thread = threads[i];
    thread.thread = {unsigned(i), 0, 0};
    thread.block = block;
    thread.state = READY;
    thread.copy_count = thread.group_count = 0;
    thread.fenced = false;
  }
  for (Warp &warp : warps) warp = {0, 0, 0};
  raised.clear();
  for (;;) {
    for (volatile size_t w = 0; w < warps.size(); ++w) {
      int turn = _setjmp(scheduler);
      if (turn == 2) return;
      if (turn == 0) run_warp(warp_order[w]);
      if (warps[warp_order[w]].arrived) {
        current = &threads[warp_order[w] * WARP];
        return note("a warp operation that not all lanes reach");
      }
    }
    int done = 0;
    for (Thread &thread : threads) done += thread.state == DONE;
    if (done == count) return;
    if (done) return note("a barrier that not all threads reach");
    for (Thread &thread : threads) thread.state = READY;
  }
}
}  // namespace

extern "C" {
Lane *emulated_lane;

void emulated_fail(const char *message) { fail(message); }

void emulated_meet(int operation) {
  Warp &warp = warps[current->warp];
  if (warp.arrived && warp.operation != operation) fail("lanes of a warp at different operations");
  warp.operation = operation;
  current->state = AT_WARP;
  if (++warp.arrived == WARP) {
    Thread *lanes = &threads[current->warp * WARP];
    perform(operation, lanes);
    warp.arrived = 0;
    for (int i = 0; i < WARP; ++i) lanes[i].state = READY;
  }
  leave();
}

void emulated_barrier() {
  current->fenced = false;
  current->state = AT_BARRIER;
  leave();
}

// What a block wrote others see once a thread that came to a barrier after it fenced, and then raised a counter (PTX memory model,
// cumulativity: a fence of each thread before the barrier is not what the model promises); they fence before they read it.
void emulated_arrive(const void *counter) {
  if (!current->fenced) fail("a counter is raised without a fence before it");
  raised.push_back(counter);
  arrivals[counter] = false;
}

void emulated_fence() {
  current->fenced = true;
  for (const void *counter : raised) arrivals[counter] = true;
}

void emulated_copy_later(void *to, const void *from) {
  if (!allowed.empty()) check(uintptr_t(from), 16);
  if (uintptr_t(to) % 16 || uintptr_t(from) % 16) fail("cp.async from or to an address that is no multiple of 16");
  if (copies_come_early) {
    memcpy(to, from, 16);
    return;
  }
  if (current->copy_count == MOST_COPIES) fail("more asynchronous copies than the emulator holds");
  current->copies[current->copy_count++] = {to, from};
}

void emulated_copies_commit() {
  if (current->group_count == MOST_COPIES) fail("more groups of asynchronous copies than the emulator holds");
  current->group_ends[current->group_count++] = current->copy_count;
}

// Where copies come late, they come as late as the program allows.
void emulated_copies_wait(int pending) {
  Thread &t = *current;
  int groups = t.group_count - pending;
  if (groups <= 0) return;
  int copies = t.group_ends[groups - 1];
  for (int i = 0; i < copies; ++i) memcpy(t.copies[i].to, t.copies[i].from, 16);
  std::copy(t.copies + copies, t.copies + t.copy_count, t.copies);
  t.copy_count -= copies;
  for (int i = groups; i < t.group_count; ++i) t.group_ends[i - groups] = t.group_ends[i] - copies;
  t.group_count -= groups;
}

// What g++ calls before each access of a kernel that it compiled with -fsanitize=kernel-address, and where an index or an address is
// wrong with -fsanitize=bounds,alignment.
#define CHECKED(bytes)                                                  \
  void __asan_load##bytes##_noabort(uintptr_t at) { check(at, bytes); } \
  void __asan_store##bytes##_noabort(uintptr_t at) { check(at, bytes); }
CHECKED(1) CHECKED(2) CHECKED(4) CHECKED(8) CHECKED(16)
void __asan_loadN_noabort(uintptr_t at, size_t bytes) { check(at, bytes); }
void __asan_storeN_noabort(uintptr_t at, size_t bytes) { check(at, bytes); }
void __asan_handle_no_return() {}
void __ubsan_handle_out_of_bounds_abort(void *, uintptr_t) { fail("an index outside of its array"); }
void __ubsan_handle_type_mismatch_v1_abort(void *, uintptr_t) { fail("an access at an address that is no multiple of its bytes"); }

// Where the launches that follow may read and write, as pairs of addresses in order.  None: nothing is checked.
void emulated_allow(const uint64_t *ranges, int count) {
  allowed.clear();
  for (int i = 0; i < count; ++i) allowed.push_back({ranges[2 * i], ranges[2 * i + 1]});
}

// order: 0 lanes, warps and blocks forward; 1 all backward, asynchronous copies at once; 2 lanes and warps shuffled.
// Returns what failed, or null.
const char *emulated_launch(void (*kernel)(void **), void **values, const unsigned *grid, int count, int order, char *shared,
                            char *shared_end) {
  static std::minstd_rand random(1);
  arrivals.clear();
  shared_start = shared, shared_stop = shared_end;
  entry = kernel, arguments = values, failure[0] = 0, copies_come_early = order == 1;
  if (count % WARP || count > 1024) return "blocks of whole warps, at most 1024 threads";
  if (int(threads.size()) != count) {
    threads.assign(count, Thread());
    stacks.resize(count * STACK);
    warps.resize(count / WARP);
  }
  getcontext(&first_context);
  lane_order.resize(WARP), warp_order.resize(count / WARP);
  for (int i = 0; i < WARP; ++i) lane_order[i] = order == 1 ? WARP - 1 - i : i;
  for (int i = 0; i < count / WARP; ++i) warp_order[i] = order == 1 ? count / WARP - 1 - i : i;
  for (int i = 0; i < count; ++i) {
    threads[i].warp = i / WARP;
    if (!threads[i].made) make_fiber(threads[i], &stacks[i * STACK]);
  }
  unsigned long long blocks = 1ull * grid[0] * grid[1] * grid[2];
  for (unsigned long long i = 0; i < blocks && !failure[0]; ++i) {
    unsigned long long b = order == 1 ? blocks - 1 - i : i;
    if (order == 2) {
      std::shuffle(lane_order.begin(), lane_order.end(), random);
      std::shuffle(warp_order.begin(), warp_order.end(), random);
    }
    if (shared) memset(shared, 0xff, shared_end - shared);
    run_block({unsigned(b % grid[0]), unsigned(b / grid[0] % grid[1]), unsigned(b / grid[0] / grid[1])});
  }
  for (auto &[counter, read] : arrivals)
    if (!read && !failure[0]) snprintf(failure, sizeof failure, "the last block to raise a counter does not fence after it");
  if (failure[0]) threads.clear();  // their fibers are somewhere inside the kernel
  return failure[0] ? failure : nullptr;
}
}
