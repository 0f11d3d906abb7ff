// Runs a CUDA kernel on the CPU: a fiber for each thread of a cluster, one cluster after the other.
//
// Included before the kernel's source. Knows the few intrinsics that the kernel calls.
//
//     cluster ─ CTAs ─ warps ─ fibers     a barrier for each cluster, CTA and warp
//
// A fiber runs until it waits at a barrier. The ready warp with the highest priority goes on, and the
// priorities are drawn again from time to time. So a warp or a CTA may be far ahead of the others, and a
// missing barrier shows as another result. Data races between two barriers of one warp do not show.
//
// Always true: shared memory is filled with one byte before its CTA starts, and again when it ends. The
// bytes after it are checked.

#pragma once
#include <math.h>
#include <setjmp.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(x, y, z)
#define DYNAMIC_SHARED(name) unsigned char* name = emulator::current->block->shared.data()
#define threadIdx (emulator::current->thread_index)
#define blockIdx (emulator::current->block_index)

using std::max;
using std::min;
struct Index3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

namespace emulator {

constexpr int STACK_BYTES = 1 << 16, GUARD_BYTES = 64;

struct Barrier {
  int num_threads, num_arrived = 0, generation = 0;
  std::vector<unsigned long long> values[2];  // of each thread, in turns
  explicit Barrier(int num_threads) : num_threads(num_threads) {
    for (auto& each : values) each.resize(num_threads);
  }
};
struct Block {
  unsigned rank;
  int num_running;
  Barrier barrier;
  std::vector<unsigned char> shared;
};
struct Fiber {
  Index3 thread_index, block_index;
  Block* block;
  Barrier* warp_barrier;
  std::unique_ptr<char[]> stack;
  ucontext_t start;
  jmp_buf state;
  bool is_started = false;
  const Barrier* waits_for = nullptr;
  int generation = 0;  // of that barrier
  bool is_done = false;
  bool is_ready() const { return !is_done && (!waits_for || waits_for->generation != generation); }
};
struct Warp {
  Barrier barrier{32};
  std::vector<Fiber> fibers{32};
  std::pair<unsigned long long, unsigned long long> priority;
};

static std::vector<Block> blocks;
static std::unique_ptr<Barrier> cluster_barrier;
static Fiber* current;
static jmp_buf scheduler;
static const std::function<void()>* kernel;
static unsigned char fill;

static int lane() { return current->thread_index.x % 32; }

// Switching is by longjmp, since a swapcontext is two system calls.
static void resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.is_started) _longjmp(fiber.state, 1);
  fiber.is_started = true;
  setcontext(&fiber.start);
}

static void suspend() {
  if (!_setjmp(current->state)) _longjmp(scheduler, 1);
}

static void wait(Barrier& barrier) {
  if (++barrier.num_arrived == barrier.num_threads) {
    barrier.num_arrived = 0;
    barrier.generation++;
    return;
  }
  current->waits_for = &barrier;
  current->generation = barrier.generation;
  suspend();
}

// Waits, and returns the values of all threads. They stay until this thread arrives again.
static const unsigned long long* gather(Barrier& barrier, int index, unsigned long long value) {
  auto& values = barrier.values[barrier.generation & 1];
  values[index] = value;
  wait(barrier);
  return values.data();
}

static void run_fiber() {
  (*kernel)();
  current->is_done = true;
  Block& block = *current->block;
  if (!--block.num_running) std::fill(block.shared.begin(), block.shared.end() - GUARD_BYTES, fill);
  suspend();
}

static unsigned long long draw(unsigned long long& state) {
  unsigned long long x = state += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Returns null, or what went wrong.
static const char* run_cluster(Index3 first, int cluster, int threads, int shared_bytes,
                               unsigned long long& random) {
  fill = draw(random) >> 63 ? 0x5a : 0xa5;  // a positive or a negative number
  cluster_barrier = std::make_unique<Barrier>(cluster * threads);
  blocks.clear();
  for (unsigned rank = 0; rank < (unsigned)cluster; rank++)
    blocks.push_back({rank, threads, Barrier(threads), std::vector<unsigned char>(shared_bytes + GUARD_BYTES, fill)});
  std::vector<Warp> warps(cluster * threads / 32);
  std::vector<Warp*> order;
  for (int i = 0; i < cluster * threads; i++) {
    Warp& warp = warps[i / 32];
    Fiber& fiber = warp.fibers[i % 32];
    if (i % 32 == 0) order.push_back(&warp);
    fiber.thread_index = {unsigned(i % threads), 0, 0};
    fiber.block_index = {first.x + i / threads, first.y, 0};
    fiber.block = &blocks[i / threads];
    fiber.warp_barrier = &warp.barrier;
    fiber.stack.reset(new char[STACK_BYTES]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.start, run_fiber, 0);
  }
  for (int step = 0;; step++) {
    const auto drawn = draw(random);
    if (!step || drawn % 16 == 0) {
      // In half of the cases a CTA's warps are neighbours in the order.
      std::vector<unsigned long long> of_block(cluster);
      for (auto& each : of_block) each = drawn >> 63 ? draw(random) : 0;
      for (Warp* warp : order) warp->priority = {of_block[warp->fibers[0].block->rank], draw(random)};
      std::sort(order.begin(), order.end(), [](Warp* a, Warp* b) { return a->priority > b->priority; });
    }
    auto is_ready = [](const Fiber& fiber) { return fiber.is_ready(); };
    auto next = std::find_if(order.begin(), order.end(), [&](Warp* warp) {
      return std::any_of(warp->fibers.begin(), warp->fibers.end(), is_ready);
    });
    if (next == order.end()) break;
    for (int i = 0; i < 32; i++) {
      Fiber& fiber = (*next)->fibers[drawn >> 62 & 1 ? i : 31 - i];
      if (!fiber.is_ready()) continue;
      fiber.waits_for = nullptr;
      resume(fiber);
    }
  }
  for (auto& block : blocks) {
    if (block.num_running) return "deadlock";
    if (std::any_of(block.shared.end() - GUARD_BYTES, block.shared.end(), [](unsigned char x) { return x != fill; }))
      return "write beyond shared memory";
  }
  return nullptr;
}

// Calls `run` once for each thread of the grid. Returns null, or what went wrong.
static const char* run_grid(unsigned grid_x, unsigned grid_y, int cluster, int threads, int shared_bytes,
                            unsigned long long seed, const std::function<void()>& run) {
  kernel = &run;
  for (unsigned y = 0; y < grid_y; y++)
    for (unsigned x = 0; x < grid_x; x += cluster)
      if (const char* error = run_cluster({x, y, 0}, cluster, threads, shared_bytes, seed)) return error;
  return nullptr;
}

}  // namespace emulator

static unsigned cluster_rank() { return emulator::current->block->rank; }
static void cluster_sync() { emulator::wait(*emulator::cluster_barrier); }
// The address in another CTA's shared memory has the same offset.
static unsigned load_peer(const unsigned* variable, unsigned rank) {
  auto offset = (const unsigned char*)variable - emulator::current->block->shared.data();
  return *(const unsigned*)(emulator::blocks.at(rank).shared.data() + offset);
}

static void __syncthreads() { emulator::wait(emulator::current->block->barrier); }
static int __syncthreads_or(int vote) {
  auto& barrier = emulator::current->block->barrier;
  const auto* votes = emulator::gather(barrier, emulator::current->thread_index.x, vote != 0);
  return std::count(votes, votes + barrier.num_threads, 1) > 0;
}
static unsigned __ballot_sync(unsigned, bool vote) {
  const auto* votes = emulator::gather(*emulator::current->warp_barrier, emulator::lane(), vote);
  unsigned ballot = 0;
  for (int i = 0; i < 32; i++) ballot |= (unsigned)votes[i] << i;
  return ballot;
}
template <typename T>
static T shuffle(T value, int source) {
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  const auto* values = emulator::gather(*emulator::current->warp_barrier, emulator::lane(), bits);
  if (source >= 0) memcpy(&value, &values[source], sizeof(T));
  return value;
}
template <typename T>
static T __shfl_xor_sync(unsigned, T value, int offset) { return shuffle(value, emulator::lane() ^ offset); }
template <typename T>
static T __shfl_up_sync(unsigned, T value, int offset) { return shuffle(value, emulator::lane() - offset); }

// A fiber is not interrupted here, so every access is atomic.
template <typename T>
static T exchange(T* cell, T value) {
  std::swap(*cell, value);
  return value;
}
template <typename T>
static T atomicAdd(T* cell, T value) { return exchange(cell, *cell + value); }
template <typename T>
static T atomicOr(T* cell, T value) { return exchange(cell, *cell | value); }
template <typename T>
static T atomicMin(T* cell, T value) { return exchange(cell, min(*cell, value)); }
template <typename T>
static T atomicMax(T* cell, T value) { return exchange(cell, max(*cell, value)); }

template <typename To, typename From>
static To bits_of(From value) {
  To result;
  static_assert(sizeof(To) == sizeof(From), "");
  memcpy(&result, &value, sizeof(To));
  return result;
}
static float __uint_as_float(unsigned x) { return bits_of<float>(x); }
static unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
static float __int_as_float(int x) { return bits_of<float>(x); }
static double __longlong_as_double(long long x) { return bits_of<double>(x); }
static long long __double_as_longlong(double x) { return bits_of<long long>(x); }
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static float __uint2float_rn(unsigned x) { return (float)x; }
static float __double2float_rn(double x) { return (float)x; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dsub_rn(double a, double b) { return a - b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __ddiv_rn(double a, double b) { return a / b; }

// Errs as much as the device's may: by 2^-21.41 where x is in [0.5, 2], else by 3 ulp; in both directions.
static float emulated_logf(float x) {
  const float log_x = logf(x), error = x >= 0.5f && x <= 2.0f ? 3.59e-7f : 3 * ldexpf(1.0f, ilogbf(log_x) - 23);
  return log_x + (bits_of<unsigned>(x) & 1 ? error : -error);
}
#define __logf emulated_logf

static float half_to_float(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                    : ldexpf(fraction | (exponent ? 1024 : 0), max(exponent, 1) - 25);
  return bits >> 15 ? -size : size;
}
