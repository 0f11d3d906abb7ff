// CUDA kernels of a sum over the ranks of one host, with the residual and the RMS norm that follow it, and of a copy.
//
// Own the exchange between devices and the arithmetic. Compiled and launched by all_reduce.py.
//
//     rank 0   x ─┬──────── push ─────────► slot 0 of rank 1's memory
//                 └─► slot 0 + slot 1 ─► + residual ─► out ─► norm ─► normed      on every rank, equal bits
//     rank 1   x ───────── push ─────────► slot 1 of rank 0's memory
//
//     reduce_packets   a word of data travels with the number of its call in 8 bytes: no flag, no fence, twice the bytes
//     reduce_flagged   16 bytes of data; then a CTA writes one flag to the same CTA of each rank
//     gather_packets   x of all ranks, in packets: a call of reduce_packets without the sum
//
// Data are pushed, so that a rank waits for memory of its own device, and one way over the link is all of the latency.
// Packets and flagged data have their own memory, and their own numbers of calls. A call writes to the slots of its parity, even or odd.
//
// Always true: slots are not written again before they have been read. A rank pushes call n + 2 after its call n + 1 has
// ended. That one read data of call n + 1 from every rank, which each pushed after its call n had ended, so after its last
// load of the slots of that parity. Calls of a rank are in one stream, whose kernels end in order: one that is launched
// early waits for the end of the kernel before. The argument needs no barrier and no number of CTAs, and holds for packets
// and for flagged data alone: any calls may be mixed, in graphs or not, as long as all ranks make the same calls in the same order.
// A packet is one 8-byte access and never seen in part (PTX: an aligned 64-bit access is single-copy atomic; a vector is
// several such), so it needs no order of accesses. A rank's loads of a call have returned before its kernel ends.
// Data precede their flag: bar.sync, st.release.sys, ld.acquire.sys, bar.sync.
// Numbers of calls have 32 bits, and 0 is skipped: it is that of memory that was never written. A packet of 2^32 calls ago
// whose place was not written since would look new.
//
// The number of the next call is in a counter for each CTA that any grid may have. A CTA reads its own only, and writes
// its own and those of CTAs that its grid lacks: all are equal after a call, without an atomic operation.
//
// WORLD         ranks, at least 2
// FLOAT_F32     x is float32; FLOAT_F16: float16; else bfloat16
// MAX_THREADS   most threads of a CTA
// MAX_VECTORS   most vectors of 16 bytes that a thread has of a chunk; kernels without `wide` are for one, in little code

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

#ifdef __CUDACC__
#define SHARED_SUMS(name) __shared__ float name[2][MAX_THREADS / 32]
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
}
// Two packets. Past L1, which is not coherent.
__device__ __forceinline__ void store_packets(uint4* target, u64 first, u64 second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(target), "l"(first), "l"(second) : "memory");
}
__device__ __forceinline__ void load_packets(const uint4* source, u64& first, u64& second) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(source) : "memory");
}
__device__ __forceinline__ void store_data(uint4* target, uint4 value) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"l"(target), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_data(const uint4* source) {
  uint4 value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(source)
               : "memory");
  return value;
}
__device__ __forceinline__ void store_flag(u32* target, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}
__device__ __forceinline__ u32 load_flag(const u32* source) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}
__device__ __forceinline__ u32 load_counter(const u32* source) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}
__device__ __forceinline__ void spin() {}
__device__ __forceinline__ u16 to_half(float x) {
  u16 bits;
#ifdef FLOAT_F16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#endif
  return bits;
}
__device__ __forceinline__ float from_half(u16 bits) {
#ifdef FLOAT_F16
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
#else
  return __uint_as_float((u32)bits << 16);
#endif
}
#endif

#ifdef FLOAT_F32
constexpr int ELEMENTS = 4;  // of a vector
__device__ __forceinline__ void unpack_word(u32 word, float* target) { target[0] = __uint_as_float(word); }
__device__ __forceinline__ u32 pack_word(const float* source) { return __float_as_uint(source[0]); }
__device__ __forceinline__ float round_once(float x) { return x; }
#else
constexpr int ELEMENTS = 8;
__device__ __forceinline__ void unpack_word(u32 word, float* target) {
  target[0] = from_half(word & 0xffff);
  target[1] = from_half(word >> 16);
}
__device__ __forceinline__ u32 pack_word(const float* source) { return to_half(source[0]) | (u32)to_half(source[1]) << 16; }
__device__ __forceinline__ float round_once(float x) { return from_half(to_half(x)); }
#endif
constexpr int WORD_ELEMENTS = ELEMENTS / 4;

__device__ __forceinline__ void unpack(uint4 value, float (&target)[ELEMENTS]) {
  unpack_word(value.x, target);
  unpack_word(value.y, target + WORD_ELEMENTS);
  unpack_word(value.z, target + 2 * WORD_ELEMENTS);
  unpack_word(value.w, target + 3 * WORD_ELEMENTS);
}
__device__ __forceinline__ uint4 pack(const float (&source)[ELEMENTS]) {
  return {pack_word(source), pack_word(source + WORD_ELEMENTS), pack_word(source + 2 * WORD_ELEMENTS),
          pack_word(source + 3 * WORD_ELEMENTS)};
}

// Memory of one kernel on every device, at the same offsets.
struct Exchange {
  i64 slots_offset;  // slots [parity of the call][rank of the data]
  i64 slot_bytes;
  i64 flags_offset;  // flags [parity][CTA][rank of the flag]
  int rank, max_ctas;
};

// A vector is 4 packets in two lines of 512 bytes for each 32 vectors: a warp writes whole lines.
struct Packets {
  static constexpr bool HAS_FLAGS = false;
  static __device__ __forceinline__ u64 packet(u32 word, u32 call) { return (u64)call << 32 | word; }
  static __device__ __forceinline__ int first_line(int index) { return index / 32 * 64 + index % 32; }
  static __device__ __forceinline__ void push(uint4* slot, int index, uint4 value, u32 call) {
    uint4* target = slot + first_line(index);
    store_packets(target, packet(value.x, call), packet(value.y, call));
    store_packets(target + 32, packet(value.z, call), packet(value.w, call));
  }
  // Returns the vector of every rank, this one's from x.
  static __device__ __forceinline__ void receive(const uint4* slots, int slot_vectors, int rank, const uint4* x, int index,
                                                 u32 call, uint4 (&parts)[WORLD]) {
    const uint4 own = x[index];
    bool is_complete;
    do {
      is_complete = true;
      // The loads of all ranks are on their way together: that of the own slot is ignored.
#pragma unroll
      for (int source = 0; source < WORLD; source++) {
        const uint4* packets = slots + (i64)source * slot_vectors + first_line(index);
        u64 x, y, z, w;
        load_packets(packets, x, y);
        load_packets(packets + 32, z, w);
        parts[source] = {(u32)x, (u32)y, (u32)z, (u32)w};
        const bool has_arrived = (u32)(x >> 32) == call & (u32)(y >> 32) == call & (u32)(z >> 32) == call &
                                 (u32)(w >> 32) == call;
        is_complete &= has_arrived | source == rank;
      }
      if (!is_complete) spin();
    } while (!is_complete);
#pragma unroll
    for (int source = 0; source < WORLD; source++)
      if (source == rank) parts[source] = own;
  }
};

struct Flagged {
  static constexpr bool HAS_FLAGS = true;
  static __device__ __forceinline__ void push(uint4* slot, int index, uint4 value, u32) { store_data(slot + index, value); }
  static __device__ __forceinline__ void receive(const uint4* slots, int slot_vectors, int rank, const uint4* x, int index,
                                                 u32, uint4 (&parts)[WORLD]) {
#pragma unroll
    for (int source = 0; source < WORLD; source++)
      parts[source] = load_data((source == rank ? x : slots + (i64)source * slot_vectors) + index);
  }
};

// Tells the same CTA of each rank that this one's data are written, and waits for theirs.
__device__ __forceinline__ void exchange_flags(const u64* buffers, const Exchange& exchange, u32 call) {
  const int peer = threadIdx.x, rank = exchange.rank;
  if (peer < WORLD && peer != rank) {
    const i64 first = exchange.flags_offset + 4 * ((i64)(call & 1) * exchange.max_ctas + blockIdx.x) * WORLD;
    store_flag((u32*)(buffers[peer] + first) + rank, call);
    const u32* flag = (const u32*)(buffers[rank] + first) + peer;
    while (load_flag(flag) != call) spin();
  }
  __syncthreads();
}

// Returns the vector of every rank's x added in the order of ranks, plus the residual, in `sum`.
template <class Protocol>
__device__ __forceinline__ void receive_sum(const uint4* slots, int slot_vectors, int rank, const uint4* x,
                                            const uint4* residual, int index, u32 call, float (&sum)[ELEMENTS]) {
  uint4 shift = {}, parts[WORLD];
  if (residual) shift = residual[index];
  Protocol::receive(slots, slot_vectors, rank, x, index, call, parts);
#pragma unroll
  for (int source = 0; source < WORLD; source++) {
    float part[ELEMENTS];
    unpack(parts[source], part);
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) sum[i] = source ? sum[i] + part[i] : part[i];
  }
  if (!residual) return;
  float part[ELEMENTS];
  unpack(shift, part);
#pragma unroll
  for (int i = 0; i < ELEMENTS; i++) sum[i] += part[i];
}

// Returns the sum over the CTA's threads, the same on each. `warp_sums` is not used again before another such call.
__device__ __forceinline__ float add_threads(float value, float* warp_sums) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < blockDim.x / 32; warp++) total += warp_sums[warp];
  return total;
}

// Waits for the kernel before, sends x to all ranks, and returns the number of this call. Chunks of the vectors go to
// CTAs in turns.
template <class Protocol, int VECTORS>
__device__ __forceinline__ u32 push(const u64* buffers, u32* counters, const Exchange& exchange, const uint4* x,
                                    int num_vectors, int chunk_vectors) {
  const int rank = exchange.rank, num_threads = blockDim.x;
  const i64 slot_vectors = exchange.slot_bytes / 16;
  u64 memory[WORLD];  // of rank + i
#pragma unroll
  for (int i = 1; i < WORLD; i++) memory[i] = buffers[(rank + i) % WORLD] + exchange.slots_offset;
  wait_for_previous_kernel();
  const u32 call = load_counter(counters + blockIdx.x);
  const i64 slot_offset = ((i64)(call & 1) * WORLD + rank) * slot_vectors;
  for (int first = blockIdx.x * chunk_vectors; first < num_vectors; first += gridDim.x * chunk_vectors) {
    uint4 values[VECTORS];  // whose loads are on their way together
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int column = v * num_threads + threadIdx.x, index = first + column;
      if (column < chunk_vectors && index < num_vectors) values[v] = x[index];
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int column = v * num_threads + threadIdx.x, index = first + column;
      if (column >= chunk_vectors || index >= num_vectors) continue;
#pragma unroll
      for (int i = 1; i < WORLD; i++) Protocol::push((uint4*)memory[i] + slot_offset, index, values[v], call);
    }
  }
  __syncthreads();  // All threads have read the counter, and stored their data.
  const u32 next_call = call + 1 ? call + 1 : 2;
  for (int cta = blockIdx.x + threadIdx.x * gridDim.x; cta < exchange.max_ctas; cta += num_threads * gridDim.x)
    counters[cta] = next_call;
  if (Protocol::HAS_FLAGS) exchange_flags(buffers, exchange, call);
  return call;
}

// Slots of this rank to which a call writes.
__device__ __forceinline__ const uint4* own_slots(u64 memory, const Exchange& exchange, u32 call) {
  return (const uint4*)(memory + exchange.slots_offset + (i64)(call & 1) * WORLD * exchange.slot_bytes);
}

// With a norm a chunk is a row.
template <class Protocol, int VECTORS>
__device__ __forceinline__ void reduce(const u64* buffers, u32* counters, const Exchange& exchange, const uint4* x,
                                       const uint4* residual, const uint4* weight, uint4* out, uint4* normed,
                                       int num_vectors, int chunk_vectors, float eps) {
  SHARED_SUMS(warp_sums);
  const int rank = exchange.rank, slot_vectors = exchange.slot_bytes / 16, num_threads = blockDim.x;
  const u64 memory = buffers[rank];
  uint4 scales[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int column = v * num_threads + threadIdx.x;
    scales[v] = {};
    if (weight && column < chunk_vectors) scales[v] = weight[column];
  }
  const u32 call = push<Protocol, VECTORS>(buffers, counters, exchange, x, num_vectors, chunk_vectors);
  const uint4* slots = own_slots(memory, exchange, call);
  int row = 0;
  for (int first = blockIdx.x * chunk_vectors; first < num_vectors; first += gridDim.x * chunk_vectors, row++) {
    uint4 sums[VECTORS];
    float squares = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int column = v * num_threads + threadIdx.x, index = first + column;
      if (column >= chunk_vectors || index >= num_vectors) continue;
      float sum[ELEMENTS];
      receive_sum<Protocol>(slots, slot_vectors, rank, x, residual, index, call, sum);
      sums[v] = pack(sum);
      out[index] = sums[v];
      unpack(sums[v], sum);
#pragma unroll
      for (int i = 0; i < ELEMENTS; i++) squares += sum[i] * sum[i];
    }
    if (!weight) continue;
    const float scale = rsqrtf(add_threads(squares, warp_sums[row & 1]) / (chunk_vectors * ELEMENTS) + eps);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int column = v * num_threads + threadIdx.x;
      if (column >= chunk_vectors) continue;
      float value[ELEMENTS], factor[ELEMENTS];
      unpack(sums[v], value);
      unpack(scales[v], factor);
#pragma unroll
      for (int i = 0; i < ELEMENTS; i++) value[i] = round_once(value[i] * scale) * factor[i];
      normed[first + column] = pack(value);
    }
  }
}

#define REDUCE_KERNEL(name, protocol, vectors)                                                                        \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                      \
  name(const u64* buffers, u32* counters, i64 slots_offset, i64 slot_bytes, i64 flags_offset, i64 rank,             \
       i64 max_ctas, const uint4* x, const uint4* residual, const uint4* weight, uint4* out, uint4* normed,         \
       i64 num_vectors, i64 chunk_vectors, float eps) {                                                             \
    const Exchange exchange = {slots_offset, slot_bytes, flags_offset, (int)rank, (int)max_ctas};                   \
    reduce<protocol, vectors>(buffers, counters, exchange, x, residual, weight, out, normed, num_vectors,            \
                              chunk_vectors, eps);                                                                   \
  }
REDUCE_KERNEL(reduce_packets, Packets, 1)
REDUCE_KERNEL(reduce_packets_wide, Packets, MAX_VECTORS)
REDUCE_KERNEL(reduce_flagged, Flagged, 1)
REDUCE_KERNEL(reduce_flagged_wide, Flagged, MAX_VECTORS)

// out [WORLD, num_vectors] is x of every rank.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
gather_packets(const u64* buffers, u32* counters, i64 slots_offset, i64 slot_bytes, i64 flags_offset, i64 rank,
               i64 max_ctas, const uint4* x, uint4* out, i64 num_vectors, i64 chunk_vectors) {
  const Exchange exchange = {slots_offset, slot_bytes, flags_offset, (int)rank, (int)max_ctas};
  const u64 memory = buffers[rank];
  const u32 call = push<Packets, MAX_VECTORS>(buffers, counters, exchange, x, num_vectors, chunk_vectors);
  const uint4* slots = own_slots(memory, exchange, call);
  for (int first = blockIdx.x * chunk_vectors; first < num_vectors; first += gridDim.x * chunk_vectors) {
    for (int column = threadIdx.x; column < chunk_vectors && first + column < num_vectors; column += blockDim.x) {
      const int index = first + column;
      uint4 parts[WORLD];
      Packets::receive(slots, slot_bytes / 16, rank, x, index, call, parts);
#pragma unroll
      for (int source = 0; source < WORLD; source++) out[source * num_vectors + index] = parts[source];
    }
  }
}
