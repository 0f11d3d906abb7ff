// Adds to cuda_emulator.h what decode.cu calls: bulk copies, their barriers, and matrix products.
//
// Included after cuda_emulator.h. All CTAs of a grid run at the same time, as one cluster: so the order in
// which their warps finish is drawn.
//
//     copy_bytes ─► pending ─┬─ at once, or                    drawn for each launch
//                            └─ when a warp waits for it
//
// Always true: a warp that reads a tile without a wait, or refills one that others still read, gets other
// numbers in one of the two. What the kernel before writes is NaN until the wait for it.

#pragma once
#include <map>
#include <set>

#define gridDim (emulator::grid)

namespace emulator {

static Index3 grid;
static bool copies_at_once;
// What the kernel before this one writes: (target, source, bytes), copied when a thread waits for it.
struct Copy { void* target; const void* source; unsigned bytes; };
static std::vector<Copy> late_writes;

struct CopyBarrier {
  unsigned num_phases = 0, bytes = 0;
  bool has_arrival = false;
  std::vector<Copy> pending;
};
static std::map<const void*, CopyBarrier> copy_barriers;
static std::set<const Block*> started_blocks;

static void stop_thread() {
  static Barrier never(1 << 30);
  wait(never);
}

static CopyBarrier& copy_barrier(const void* address) {
  auto found = copy_barriers.find(address);
  if (found == copy_barriers.end()) {
    stop_thread();
    __builtin_unreachable();
  }
  return found->second;
}

// Calls `run` once for each thread of the grid. Returns null, or what went wrong.
static const char* run_whole_grid(unsigned num_blocks, int threads, int shared_bytes, unsigned long long seed,
                                  const std::function<void()>& run) {
  grid = {num_blocks, 1, 1};
  copies_at_once = draw(seed) & 1;
  copy_barriers.clear();
  started_blocks.clear();
  return run_grid(num_blocks, 1, num_blocks, threads, shared_bytes, seed, run);
}

}  // namespace emulator

// The first call of a kernel. Shared memory may hold NaN.
static void launch_dependents() {
  auto* block = emulator::current->block;
  if (emulator::started_blocks.insert(block).second)
    std::fill(block->shared.begin(), block->shared.end() - emulator::GUARD_BYTES, 0xff);
}
static void wait_for_grid() {
  for (auto& each : emulator::late_writes) memcpy(each.target, each.source, each.bytes);
  emulator::late_writes.clear();
}

static void fence_async() {}
static void __threadfence() {}
static void init_barrier(unsigned long long* barrier) { emulator::copy_barriers[barrier] = {}; }
static void expect_bytes(unsigned long long* barrier, unsigned bytes) {
  auto& state = emulator::copy_barrier(barrier);
  if (state.has_arrival) emulator::stop_thread();
  state.has_arrival = true;
  state.bytes = bytes;
}
static void copy_bytes(void* target, const void* source, unsigned bytes, unsigned long long* barrier) {
  if (((unsigned long long)target | (unsigned long long)source | bytes) & 15 || !bytes) emulator::stop_thread();
  if (emulator::copies_at_once) memcpy(target, source, bytes);
  emulator::copy_barrier(barrier).pending.push_back({target, source, bytes});
}
static void wait_barrier(unsigned long long* barrier, unsigned parity) {
  auto& state = emulator::copy_barrier(barrier);
  for (int i = 0; !state.has_arrival && (state.num_phases & 1) == parity; i++) {
    if (i == 1000) emulator::stop_thread();
    emulator::suspend();
  }
  if ((state.num_phases & 1) != parity) return;
  unsigned bytes = 0;
  for (auto& each : state.pending) {
    if (!emulator::copies_at_once) memcpy(each.target, each.source, each.bytes);
    bytes += each.bytes;
  }
  if (bytes != state.bytes) emulator::stop_thread();
  state.num_phases++;
  state.has_arrival = false;
  state.pending.clear();
}

static void __syncwarp() { emulator::wait(*emulator::current->warp_barrier); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
template <typename T>
static T __shfl_sync(unsigned, T value, int source) { return shuffle(value, source); }
static uint4 __ldcg(const uint4* cell) { return *cell; }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static float exp2_approx(float x) { return exp2f(x); }

#ifdef TYPE_BF16
static float type_to_float(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
static unsigned short float_to_type(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
static float type_to_float(unsigned short x) { return half_to_float(x); }
static unsigned short float_to_type(float x) {
  const unsigned sign = __float_as_uint(x) >> 16 & 0x8000;
  const float size = fabsf(x);
  if (x != x) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  const int exponent = size < 6.103515625e-5f ? -14 : ilogbf(size);
  const unsigned steps = (unsigned)rintf(ldexpf(size, 10 - exponent));  // may round up to the next exponent
  return sign | (exponent == -14 ? steps : ((exponent + 14) << 10) + steps);
}
#endif
static unsigned pack(float low, float high) { return float_to_type(low) | (unsigned)float_to_type(high) << 16; }

// Lane 4 g + t has of `a` rows g and g + 8, of `b` column g, and of `sums` rows g and g + 8, columns 2 t and
// 2 t + 1.
static void mma(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const unsigned words[6] = {a0, a1, a2, a3, b0, b1};
  auto& barrier = *emulator::current->warp_barrier;
  const auto* lanes = emulator::gather(barrier, emulator::lane(), (unsigned long long)words);
  // Column k of a row is in lane 4 row + k % 8 / 2, word k / 8, half k % 2.
  auto number = [&](int lane, int word, int k) {
    return type_to_float(((const unsigned*)lanes[lane])[word] >> 16 * (k & 1));
  };
  for (int i = 0; i < 4; i++) {
    const int row = emulator::lane() / 4, column = 2 * (emulator::lane() % 4) + i % 2;
    for (int k = 0; k < 16; k++)
      sums[i] += number(4 * row + k % 8 / 2, i / 2 + k / 8 * 2, k) * number(4 * column + k % 8 / 2, 4 + k / 8, k);
  }
  emulator::wait(barrier);  // The words are on the stacks of the lanes.
}
