// Adds to cuda_emulator.h what all_reduce.cu calls: several devices that run at the same time, and memory that they share.
//
// Included after cuda_emulator.h and before the kernel. The CTAs of all ranks are one cluster. Each runs its rank's
// calls one after the other, and a rank may be ahead of another.
//
//     store to another device ─► pending ─► memory      later, in any order, 8 bytes at a time
//     release store           ─► pending ─► memory      after what its CTA has stored before it
//
// Always true: between two accesses of shared memory other warps may run and stores may arrive. A call's x and residual
// are NaN until a thread of its rank has waited for the call before.

#pragma once

struct Dim3 { unsigned x; };
#define gridDim (emulator::current_call().grid)
#define blockDim (emulator::current_call().block)
#define SHARED_SUMS(name) auto name = (float(*)[MAX_THREADS / 32])emulator::current->block->shared.data()

namespace emulator {

constexpr int MAX_POLLS = 50000;  // without a store that arrives
constexpr int MAX_PENDING = 4096;

struct Copy { void* target; const void* source; long long bytes; };
struct RankCall { Dim3 grid, block; long long index; std::vector<Copy> late_writes; };
// What a run has seen: calls started while another rank was in an earlier one, stores that arrived after their call.
struct Reached { long long early_calls, late_stores; };
struct Store { char* target; unsigned long long value; int bytes; const Block* block; unsigned long long index; bool is_release; long long call; };

static std::vector<const RankCall*> calls_of_thread;  // by cluster rank and thread
static int max_threads;
static std::vector<std::unique_ptr<Barrier>> rank_barriers;
static std::vector<Store> pending;
static unsigned long long num_stores, random_state;
static int num_polls, blocks_of_rank, store_delay;
static std::vector<long long> call_of_rank;
static Reached reached;

static const RankCall*& call_of_current() {
  return calls_of_thread[current->block->rank * max_threads + current->thread_index.x];
}
static const RankCall& current_call() { return *call_of_current(); }

static void stop_thread() {
  static Barrier never(0);  // one thread or more arrives, and none has a value there
  wait(never);
}

// Writes a random pending store to memory, if it may arrive.
static void deliver() {
  if (pending.empty()) return;
  const size_t at = draw(random_state) % pending.size();
  Store store = pending[at];
  if (store.is_release)
    for (const Store& other : pending)
      if (other.block == store.block && other.index < store.index) return;
  memcpy(store.target, &store.value, store.bytes);
  reached.late_stores += store.call < call_of_rank[store.block->rank / blocks_of_rank];
  pending[at] = pending.back();
  pending.pop_back();
  num_polls = 0;
}
// Other warps run, sometimes, and stores arrive, sometimes.
static void pass_time() {
  const auto drawn = draw(random_state);
  while ((int)pending.size() > MAX_PENDING || (!pending.empty() && drawn % store_delay == 0 && draw(random_state) % 4))
    deliver();
  if (drawn >> 32 & 1) suspend();
}
static void store_shared(void* target, unsigned long long value, int bytes, bool is_release = false) {
  pass_time();
  pending.push_back({(char*)target, value, bytes, current->block, num_stores++, is_release, current_call().index});
  num_polls = 0;
}

}  // namespace emulator

// Returns when every thread of the rank has ended the call before.
static void wait_for_previous_kernel() {
  auto& block = *emulator::current->block;
  const int rank = block.rank / emulator::blocks_of_rank;
  emulator::wait(*emulator::rank_barriers[rank]);
  const auto& call = emulator::current_call();
  if (emulator::call_of_rank[rank] < call.index) {
    emulator::call_of_rank[rank] = call.index;
    for (auto other : emulator::call_of_rank) emulator::reached.early_calls += other < call.index;
  }
  block.barrier.num_threads = call.block.x;
  for (const auto& each : call.late_writes) memcpy(each.target, each.source, each.bytes);
  const_cast<std::vector<emulator::Copy>&>(call.late_writes).clear();
}
static void spin() {
  emulator::deliver();
  if (++emulator::num_polls > emulator::MAX_POLLS) emulator::stop_thread();
  emulator::suspend();
}
static void store_packets(uint4* target, unsigned long long first, unsigned long long second) {
  emulator::store_shared(target, first, 8);
  emulator::store_shared((char*)target + 8, second, 8);
}
static void load_packets(const uint4* source, unsigned long long& first, unsigned long long& second) {
  memcpy(&first, source, 8);
  emulator::pass_time();
  memcpy(&second, (const char*)source + 8, 8);
}
static void store_data(uint4* target, uint4 value) {
  const unsigned words[4] = {value.x, value.y, value.z, value.w};
  for (int i = 0; i < 4; i++) emulator::store_shared((char*)target + 4 * i, words[i], 4);
}
static uint4 load_data(const uint4* source) {
  emulator::pass_time();
  return *source;
}
static void store_flag(unsigned* target, unsigned value) { emulator::store_shared(target, value, 4, true); }
static unsigned load_flag(const unsigned* source) {
  emulator::pass_time();
  return *source;
}
static unsigned load_counter(const unsigned* source) { return *source; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }

static float from_half(unsigned short bits) {
#ifdef FLOAT_F16
  return half_to_float(bits);
#else
  return bits_of<float>((unsigned)bits << 16);
#endif
}
static unsigned short to_half(float x) {
#ifdef FLOAT_F16
  return bits_of<unsigned short>((_Float16)x);
#else
  const unsigned bits = bits_of<unsigned>(x);
  return x != x ? 0x7fff : bits + 0x7fff + (bits >> 16 & 1) >> 16;
#endif
}
