// CUDA kernels of decode attention for steps of many rows: every row has one token.
//
// Own the division of a step among warps, and the arithmetic. Compiled by decode_cuda.py with NVRTC.
//
//     step     row 0 (3 tiles)      row 1 (5 tiles)            row 2 ...          a tile: TILE positions
//     head     0    1    ..         0      1      ..           0   1
//              |ttt|ttt|..          |ttttt|ttttt|..            |...              of one row and key head
//     warp     [--- 0 ---][--- 1 ---][--- 2 ---][--- 3 ---] ...                  the same amount of work
//
//     warp     ring of STAGES tiles ◄── bulk copies, ahead into the next row or head
//                └─► q k: mma ─► max, sum (running) ─► p v: mma ─► output        nothing waits for a warp
//     a row and head that is cut: partial results in scratch; the last warp to finish merges them in order
//
// Always true: lengths, slots and tables are read on the device, so a CUDA graph can hold the kernels. The
// division depends on the lengths and the grid alone, and so does the order of every addition.
//
// Before its wait `decode_qkv` reads blocks, tables and lengths, which earlier steps wrote. `decode_queries`
// reads tables and lengths only: the kernel before it may write the blocks.
//
// The new token's key and value are put into the last tile of their row in shared memory, and into their
// block. So each position goes through the same instructions.
//
// TYPE_BF16              bfloat16; float16 where it is not defined
// HEAD_DIM               64 or 128
// GROUP                  query heads of a key head, 1 to 16
// KV_HEADS, BLOCK_SIZE   layout of the KV cache: [blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
// TILE                   positions of a tile: a multiple of 16 that divides BLOCK_SIZE
// WARPS, STAGES          warps of a CTA, tiles of a warp's ring
// CTAS                   CTAs of a multiprocessor
// MIN_TILES              work of a warp, in tiles, where there is enough for this
// START_TILES            tiles that take as long as the queries and the output of a row and key head

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define ALL_LANES 0xffffffffu
#define INF __int_as_float(0x7f800000)
#define LOG2_E 1.4426950408889634f

#define SPAN 16                              // positions of one matrix product
#define CHUNK 8                              // numbers of 16 bytes
#define TILE_CELLS (TILE * HEAD_DIM)         // of keys, and of values
#define HEAD_CELLS (BLOCK_SIZE * HEAD_DIM)   // of one head in a block
#define K_CHUNKS (HEAD_DIM / CHUNK / 4)      // chunks of a key that a lane reads: t, t + 4, ...
#define V_CHUNKS (HEAD_DIM / CHUNK / 8)      // neighbouring chunks of a value that a lane reads
#define COLUMNS (HEAD_DIM / 8)               // dimensions of a column of the output's matrix products
#define HALVES (GROUP > 8 ? 2 : 1)           // lane: query head g, and g + 8 where there are two
#define PARTIAL_CELLS (32 * (1 + HALVES * COLUMNS / 2))  // float4 of a partial result

struct alignas(16) Chunk { u32 word[4]; };
struct alignas(16) Floats { float x[4]; };

#ifdef __CUDACC__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

__device__ __forceinline__ u32 shared_address(const void* variable) {
  return (u32)__cvta_generic_to_shared(variable);
}
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A barrier of one arrival, which also counts bytes. Generic accesses before a fence come before later copies.
__device__ __forceinline__ void init_barrier(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void expect_bytes(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_bytes(void* target, const void* source, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(target)),
               "l"(source), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void wait_barrier(u64* barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

#ifdef TYPE_BF16
#define MMA_TYPE "bf16"
#else
#define MMA_TYPE "f16"
#endif
// sums [16 rows, 8 columns] += a [16, 16] * b [16, 8]. Lane 4 g + t has rows g and g + 8: of a and sums at
// columns 2 t and 2 t + 1 (of a also 8 more), of b column g at these rows.
__device__ __forceinline__ void mma(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two floats as two numbers of the type, `low` in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 word;
  asm("cvt.rn." MMA_TYPE "x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ float half_to_float(u16 x) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x));
  return value;
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

#ifdef TYPE_BF16
__device__ __forceinline__ float low_float(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_float(u32 word) { return __uint_as_float(word & 0xffff0000u); }
#else
__device__ __forceinline__ float low_float(u32 word) { return half_to_float((u16)word); }
__device__ __forceinline__ float high_float(u32 word) { return half_to_float((u16)(word >> 16)); }
#endif

// Value rounded to the type.
__device__ __forceinline__ float round_type(float x) { return low_float(pack(x, 0.0f)); }

__device__ __forceinline__ float sum_of_four(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
__device__ __forceinline__ float max_of_four(float x) {
  x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ __forceinline__ int num_tiles(int kv_len) { return (kv_len + TILE - 1) / TILE; }

// Work of a row and key head, in tiles. Without its start, a warp with rows of one tile would be the last by far.
__device__ __forceinline__ int head_work(int kv_len) { return kv_len ? num_tiles(kv_len) + START_TILES : 0; }

// Arguments of both kernels, and the rows of the step in shared memory.
struct Step {
  const u16* q;                  // [rows] at q_stride: query heads, then keys and values where FUSED
  i64 q_stride;
  const float *cos, *sin;        // [positions, HEAD_DIM]
  const u16 *q_weight, *k_weight;  // of the norm, or null
  float eps, scale;
  const int* block_tables;
  i64 table_stride;
  u16* blocks;
  u16* out;
  uint4* partials;
  u32* counters;                 // warps that have finished, of each row and key head
  const int *kv_lens, *slots;    // in shared memory
  int total, num_workers;        // work of the step, warps that have some

  // First unit of a worker's work. A unit is a tile, or one of START_TILES before the first tile of a head.
  __device__ __forceinline__ int first_unit(int worker) const { return (int)((u64)worker * total / num_workers); }
  // Worker that has the unit.
  __device__ __forceinline__ int worker_of(int unit) const {
    return (int)(((u64)(unit + 1) * num_workers - 1) / total);
  }
  // First cell of the tile's keys in its block. HEAD_CELLS * KV_HEADS after it are the values.
  __device__ __forceinline__ u16* cells(int block, int head, int tile) const {
    return blocks + ((i64)block * 2 * KV_HEADS + head) * HEAD_CELLS + tile * TILE % BLOCK_SIZE * HEAD_DIM;
  }
};

// A tile of the step: `index` of the `count` tiles of a row and key head.
struct Place {
  int row, head, index, count;
  __device__ __forceinline__ void advance(const Step& step) {
    if (++index < count) return;
    index = 0;
    if (++head < KV_HEADS) return;
    head = 0;
    do count = num_tiles(step.kv_lens[++row]);
    while (!count);
  }
  __device__ __forceinline__ int load_block(const Step& step) const {
    return step.block_tables[step.slots[row] * step.table_stride + index * TILE / BLOCK_SIZE];
  }
};

// A lane's part of a head after norm and rotation: K_CHUNKS chunks. Lanes 4 g + t for t = 0 to 3 have one head.
__device__ __forceinline__ void load_rotated(const Step& step, const u16* head, const u16* weight, int position,
                                             u32 (&words)[4 * K_CHUNKS]) {
  const int t = threadIdx.x & 3;
  float x[K_CHUNKS][CHUNK];
#pragma unroll
  for (int j = 0; j < K_CHUNKS; j++) {
    const Chunk chunk = *(const Chunk*)(head + CHUNK * (t + 4 * j));
#pragma unroll
    for (int i = 0; i < 4; i++) x[j][2 * i] = low_float(chunk.word[i]), x[j][2 * i + 1] = high_float(chunk.word[i]);
  }
  if (weight) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < K_CHUNKS; j++)
#pragma unroll
      for (int i = 0; i < CHUNK; i++) squares += x[j][i] * x[j][i];
    const float scale = rsqrtf(sum_of_four(squares) / HEAD_DIM + step.eps);
#pragma unroll
    for (int j = 0; j < K_CHUNKS; j++) {
      const Chunk chunk = *(const Chunk*)(weight + CHUNK * (t + 4 * j));
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        const u32 word = chunk.word[i / 2];
        x[j][i] = round_type(round_type(x[j][i] * scale) * (i & 1 ? high_float(word) : low_float(word)));
      }
    }
  }
  const float* cos = step.cos + (i64)position * HEAD_DIM + CHUNK * t;
  const float* sin = step.sin + (i64)position * HEAD_DIM + CHUNK * t;
#pragma unroll
  for (int j = 0; j < K_CHUNKS / 2; j++)
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
      // Dimension d rotates with d + HEAD_DIM / 2, which this lane has too.
      const int d = 4 * CHUNK * j + i;
      const Floats cos_low = *(const Floats*)(cos + d), cos_high = *(const Floats*)(cos + d + HEAD_DIM / 2);
      const Floats sin_low = *(const Floats*)(sin + d), sin_high = *(const Floats*)(sin + d + HEAD_DIM / 2);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float low = x[j][i + k], high = x[j + K_CHUNKS / 2][i + k];
        x[j][i + k] = low * cos_low.x[k] - high * sin_low.x[k];
        x[j + K_CHUNKS / 2][i + k] = high * cos_high.x[k] + low * sin_high.x[k];
      }
    }
#pragma unroll
  for (int j = 0; j < K_CHUNKS; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) words[4 * j + i] = pack(x[j][2 * i], x[j][2 * i + 1]);
}

// Running output of one row and key head: lane 4 g + t has query head g, and g + 8 where there are two halves.
struct Output {
  float acc[COLUMNS][4];  // [c]: dimensions COLUMNS * (2 t) + c and COLUMNS * (2 t + 1) + c; two of each head
  float top[HALVES], sum[HALVES];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) acc[c][0] = acc[c][1] = acc[c][2] = acc[c][3] = 0.0f;
#pragma unroll
    for (int half = 0; half < HALVES; half++) top[half] = -INF, sum[half] = 0.0f;
  }

  // Raises the largest score to `new_top`, and rescales sum and output.
  __device__ __forceinline__ void raise(int half, float new_top) {
    const float rescale = exp2_approx(top[half] - new_top);
    top[half] = new_top;
    sum[half] *= rescale;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) acc[c][2 * half] *= rescale, acc[c][2 * half + 1] *= rescale;
  }

  // Adds the first `count` of SPAN positions.
  __device__ __forceinline__ void add(const u32 (&q)[HALVES][4 * K_CHUNKS], const u16* keys, const u16* values,
                                      int count, float scale) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float scores[2][4] = {};
    // Any order of the dimensions gives the same products, so a lane reads 16 bytes at once. Odd rows read
    // another chunk first: rows are a multiple of 128 bytes apart.
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const u16* row = keys + (8 * n + g) * HEAD_DIM + CHUNK * t;
#pragma unroll
      for (int j = 0; j < K_CHUNKS; j += 2) {
        const Chunk x = *(const Chunk*)(row + 4 * CHUNK * (j + (g & 1)));
        const Chunk y = *(const Chunk*)(row + 4 * CHUNK * (j + 1 - (g & 1)));
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const int at = 4 * j + i;
          const bool take_x = (i < 4) == !(g & 1);
          const u32 b0 = take_x ? x.word[i & 3] : y.word[i & 3], b1 = take_x ? x.word[(i & 3) + 1] : y.word[(i & 3) + 1];
          mma(scores[n], q[0][at], HALVES > 1 ? q[HALVES - 1][at] : 0, q[0][at + 1],
              HALVES > 1 ? q[HALVES - 1][at + 1] : 0, b0, b1);
        }
      }
    }
    u32 weights[2][2] = {};  // [n][half]
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int position = 8 * (i >> 1) + 2 * t + (i & 1);
        x[i] = position < count ? scores[i >> 1][2 * half + (i & 1)] * scale : -INF;
      }
      raise(half, fmaxf(top[half], max_of_four(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])))));
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = exp2_approx(x[i] - top[half]);
      sum[half] += (x[0] + x[1]) + (x[2] + x[3]);  // of this lane's positions
      weights[0][half] = pack(x[0], x[1]);
      weights[1][half] = pack(x[2], x[3]);
    }
    // A lane reads COLUMNS neighbouring dimensions of four positions; two positions are interleaved. Odd lanes
    // read another chunk first.
    Chunk v[4][V_CHUNKS];
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const int position = 8 * (p >> 1) + 2 * t + (p & 1);
      const u16* row = values + position * HEAD_DIM + COLUMNS * g;
      Chunk raw[V_CHUNKS];
#pragma unroll
      for (int h = 0; h < V_CHUNKS; h++) raw[h] = *(const Chunk*)(row + CHUNK * (V_CHUNKS > 1 ? h ^ (t & 1) : 0));
#pragma unroll
      for (int h = 0; h < V_CHUNKS; h++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          v[p][h].word[i] = V_CHUNKS > 1 && (t & 1) ? raw[V_CHUNKS - 1 - h].word[i] : raw[h].word[i];
    }
    if (count < SPAN) {
      // Unused positions may hold NaN, and NaN * 0 is NaN.
#pragma unroll
      for (int p = 0; p < 4; p++)
        if (8 * (p >> 1) + 2 * t + (p & 1) >= count)
#pragma unroll
          for (int h = 0; h < V_CHUNKS; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) v[p][h].word[i] = 0;
    }
#pragma unroll
    for (int h = 0; h < V_CHUNKS; h++)
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        const u32 halves = i & 1 ? 0x7632 : 0x5410;
        mma(acc[CHUNK * h + i], weights[0][0], weights[0][1], weights[1][0], weights[1][1],
            __byte_perm(v[0][h].word[i / 2], v[1][h].word[i / 2], halves),
            __byte_perm(v[2][h].word[i / 2], v[3][h].word[i / 2], halves));
      }
  }

  __device__ __forceinline__ void store_partial(uint4* partial) const {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    const float stats[4] = {top[0], sum[0], top[HALVES - 1], sum[HALVES - 1]};
    partial[lane] = *(const uint4*)stats;
#pragma unroll
    for (int half = 0; half < HALVES; half++)
      if (8 * half + g < GROUP)
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 2) {
          const float cells[4] = {acc[c][2 * half], acc[c][2 * half + 1], acc[c + 1][2 * half],
                                  acc[c + 1][2 * half + 1]};
          partial[32 * (1 + half * COLUMNS / 2 + c / 2) + lane] = *(const uint4*)cells;
        }
  }

  __device__ __forceinline__ void add_partial(const uint4* partial) {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    const uint4 stats = __ldcg(partial + lane);
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const float other_top = __uint_as_float(half ? stats.z : stats.x);
      const float other_sum = __uint_as_float(half ? stats.w : stats.y);
      raise(half, fmaxf(top[half], other_top));
      const float weight = exp2_approx(other_top - top[half]);
      sum[half] += other_sum * weight;
      if (8 * half + g < GROUP)
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 2) {
          const uint4 cells = __ldcg(partial + 32 * (1 + half * COLUMNS / 2 + c / 2) + lane);
          acc[c][2 * half] += __uint_as_float(cells.x) * weight;
          acc[c][2 * half + 1] += __uint_as_float(cells.y) * weight;
          acc[c + 1][2 * half] += __uint_as_float(cells.z) * weight;
          acc[c + 1][2 * half + 1] += __uint_as_float(cells.w) * weight;
        }
    }
  }

  __device__ __forceinline__ void store(u16* out) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      if (8 * half + g >= GROUP) continue;
      const float scale = 1.0f / sum[half];
#pragma unroll
      for (int side = 0; side < 2; side++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c += CHUNK) {
          Chunk chunk;
#pragma unroll
          for (int i = 0; i < 4; i++)
            chunk.word[i] =
                pack(acc[c + 2 * i][2 * half + side] * scale, acc[c + 2 * i + 1][2 * half + side] * scale);
          *(Chunk*)(out + (8 * half + g) * HEAD_DIM + COLUMNS * (2 * t + side) + c) = chunk;
        }
    }
  }
};

// Starts the copies of a tile's keys and values that are in their block.
template <bool FUSED>
__device__ __forceinline__ void start_copies(const Step& step, const Place& place, int block, u16* tile, u64* barrier) {
  const int cached = step.kv_lens[place.row] - FUSED - place.index * TILE;
  const u32 bytes = min(cached, TILE) * HEAD_DIM * 2;
  const u16* keys = step.cells(block, place.head, place.index);
  expect_bytes(barrier, 2 * bytes);
  if (!bytes) return;
  copy_bytes(tile, keys, bytes, barrier);
  copy_bytes(tile + TILE_CELLS, keys + KV_HEADS * HEAD_CELLS, bytes, barrier);
}

// Takes the new token from the projection: into the tile in shared memory, and into its block.
__device__ __forceinline__ void add_new_token(const Step& step, const Place& place, u16* tile) {
  const int lane = threadIdx.x & 31, position = step.kv_lens[place.row] - 1;
  const u16* key = step.q + place.row * step.q_stride + (GROUP * KV_HEADS + place.head) * HEAD_DIM;
  u16* target = step.cells(place.load_block(step), place.head, place.index) + position % TILE * HEAD_DIM;
  tile += position % TILE * HEAD_DIM;
  if (lane < HEAD_DIM / CHUNK) {
    const Chunk chunk = *(const Chunk*)(key + KV_HEADS * HEAD_DIM + CHUNK * lane);
    *(Chunk*)(target + KV_HEADS * HEAD_CELLS + CHUNK * lane) = chunk;
    *(Chunk*)(tile + TILE_CELLS + CHUNK * lane) = chunk;
  }
  u32 words[4 * K_CHUNKS];
  load_rotated(step, key, step.k_weight, position, words);
  if (lane < 4) {
#pragma unroll
    for (int j = 0; j < K_CHUNKS; j++) {
      const Chunk chunk = {words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]};
      *(Chunk*)(target + CHUNK * (lane + 4 * j)) = chunk;
      *(Chunk*)(tile + CHUNK * (lane + 4 * j)) = chunk;
    }
  }
  fence_async();  // A later copy overwrites the tile.
  __syncwarp();
}

// A lane's part of the query heads, in the order of the dimensions in Output::add.
template <bool FUSED>
__device__ __forceinline__ void load_queries(const Step& step, const Place& place, u32 (&q)[HALVES][4 * K_CHUNKS]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    const int query = 8 * half + g;
    const u16* head = step.q + place.row * step.q_stride + (place.head * GROUP + min(query, GROUP - 1)) * HEAD_DIM;
    if (FUSED) {
      load_rotated(step, head, step.q_weight, step.kv_lens[place.row] - 1, q[half]);
    } else {
#pragma unroll
      for (int j = 0; j < K_CHUNKS; j++) {
        const Chunk chunk = *(const Chunk*)(head + CHUNK * (t + 4 * j));
#pragma unroll
        for (int i = 0; i < 4; i++) q[half][4 * j + i] = chunk.word[i];
      }
    }
    if (query >= GROUP)
#pragma unroll
      for (int i = 0; i < 4 * K_CHUNKS; i++) q[half][i] = 0;
  }
}

// Stores the output of tiles [first, end) of a row and key head: to `out`, or as a partial result where they are
// not all. Then the last warp to finish merges. `item` is the unit of the first tile of the row and head.
__device__ __forceinline__ void finish(const Step& step, Output& output, const Place& place, int item, int worker,
                                       bool is_first, bool is_whole) {
  const int lane = threadIdx.x & 31, index = place.row * KV_HEADS + place.head;
  u16* out = step.out + (i64)index * GROUP * HEAD_DIM;
#pragma unroll
  for (int half = 0; half < HALVES; half++) output.sum[half] = sum_of_four(output.sum[half]);
  if (!is_whole) {
    // A worker has at most one part that is not the first of its row and head, and one that is.
    output.store_partial(step.partials + (i64)(2 * worker + is_first) * PARTIAL_CELLS);
    __syncwarp();
    const int begin = step.worker_of(item), end = step.worker_of(item + place.count - 1) + 1;
    u32 finished = 0;
    if (!lane) {
      __threadfence();
      finished = atomicAdd(&step.counters[index], 1u) + 1;
      __threadfence();
    }
    if (__shfl_sync(ALL_LANES, finished, 0) < end - begin) return;
    __syncwarp();  // All lanes read the other parts after the fence of lane 0.
    if (!lane) step.counters[index] = 0;
    output.clear();
    for (int w = begin; w < end; w++)
      output.add_partial(step.partials + (i64)(2 * w + (w == begin)) * PARTIAL_CELLS);
  }
  output.store(out);
}

// Copies the lengths and slots to shared memory and adds up the work. Returns the unit of this worker's first
// tile; `place` is where it is. A worker without work gets step.total, and one without a tile gets a later unit
// than it has.
__device__ __forceinline__ int divide(Step& step, Place& place, const int* kv_lens, const int* slots, int num_rows,
                                      int* rows, int worker) {
  const int lane = threadIdx.x & 31, num_chunks = (num_rows + 31) / 32;
  int *shared_lens = rows, *shared_slots = rows + num_rows, *ends = rows + 2 * num_rows;  // ends: within 32 rows
  int* chunk_sums = rows + 3 * num_rows;
  auto scan = [&](int sum) {
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int other = __shfl_up_sync(ALL_LANES, sum, offset);
      if (lane >= offset) sum += other;
    }
    return sum;
  };
  for (int chunk = threadIdx.x / 32; chunk < num_chunks; chunk += WARPS) {
    const int row = 32 * chunk + lane, len = row < num_rows ? kv_lens[row] : 0;
    const int sum = scan(head_work(len) * KV_HEADS);
    if (row < num_rows) shared_lens[row] = len, shared_slots[row] = slots[row], ends[row] = sum;
    if (lane == 31) chunk_sums[chunk] = sum;
  }
  __syncthreads();
  step.kv_lens = shared_lens, step.slots = shared_slots;
  const int chunk_end = scan(lane < num_chunks ? chunk_sums[lane] : 0);
  step.total = __shfl_sync(ALL_LANES, chunk_end, 31);
  step.num_workers = max(1, min((int)gridDim.x * WARPS, step.total / MIN_TILES));
  if (worker >= step.num_workers || !step.total) return step.total;
  const int unit = step.first_unit(worker);
  const int chunk = __popc(__ballot_sync(ALL_LANES, chunk_end <= unit));
  const int chunk_begin = chunk ? __shfl_sync(ALL_LANES, chunk_end, chunk - 1) : 0;
  const int row = 32 * chunk + lane, end = row < num_rows ? chunk_begin + ends[row] : 0x7fffffff;
  const int before = __popc(__ballot_sync(ALL_LANES, end <= unit));
  const int begin = before ? __shfl_sync(ALL_LANES, end, before - 1) : chunk_begin;
  place.row = 32 * chunk + before;
  place.count = num_tiles(shared_lens[place.row]);
  const int work = place.count + START_TILES, done = (unit - begin) % work;
  place.head = (unit - begin) / work;
  place.index = max(0, done - START_TILES);
  return unit + max(0, START_TILES - done);
}

template <bool FUSED>
__device__ __forceinline__ void decode(Step step, const int* kv_lens, const int* slots, int num_rows) {
  DYNAMIC_SHARED(shared);
  launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int worker = warp * gridDim.x + blockIdx.x;  // the first workers are on different multiprocessors
  u16* ring = (u16*)shared + warp * STAGES * 2 * TILE_CELLS;
  u64* barriers = (u64*)((u16*)shared + WARPS * STAGES * 2 * TILE_CELLS) + warp * STAGES;
  if (!lane) {
    for (int i = 0; i < STAGES; i++) init_barrier(barriers + i);
    fence_async();
  }
  Place place;
  int unit = divide(step, place, kv_lens, slots, num_rows,
                    (int*)((u16*)shared + WARPS * STAGES * 2 * TILE_CELLS) + 2 * WARPS * STAGES, worker);
  const int end = worker < step.num_workers ? step.first_unit(worker + 1) : 0;
  if (!FUSED || unit >= end) wait_for_grid();
  if (unit >= end) return;

  Place ahead = place;
  int next_copied = unit, next_block = ahead.load_block(step);
  auto copy_next = [&](int stage) {
    if (next_copied >= end) return;
    if (!lane) start_copies<FUSED>(step, ahead, next_block, ring + stage * 2 * TILE_CELLS, barriers + stage);
    next_copied += ahead.index + 1 < ahead.count ? 1 : 1 + START_TILES;
    if (next_copied >= end) return;
    ahead.advance(step);
    next_block = ahead.load_block(step);
  };
  for (int i = 0; i < STAGES; i++) copy_next(i);
  if (FUSED) wait_for_grid();

  const float scale = step.scale * LOG2_E;
  int stage = 0;
  u32 parity = 0;
  Output output;
  u32 q[HALVES][4 * K_CHUNKS];
  while (unit < end) {
    const int item = unit - place.index, first = place.index, kv_len = step.kv_lens[place.row];
    const int last = min(place.count, first + end - unit) - 1;
    load_queries<FUSED>(step, place, q);
    output.clear();
    for (;;) {
      u16* keys = ring + stage * 2 * TILE_CELLS;
      wait_barrier(barriers + stage, parity);
      if (FUSED && place.index == place.count - 1) add_new_token(step, place, keys);
      const int count = min(TILE, kv_len - place.index * TILE);
      for (int i = 0; i < count; i += SPAN)
        output.add(q, keys + i * HEAD_DIM, keys + TILE_CELLS + i * HEAD_DIM, count - i, scale);
      __syncwarp();  // All lanes have read the tile.
      copy_next(stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
      if (place.index == last) break;
      place.index++;
    }
    finish(step, output, place, item, worker, !first, !first && last == place.count - 1);
    unit += last - first + 1 + START_TILES;
    if (unit < end) place.advance(step);
  }
}

// Keys and values of the rows are in their blocks. Rows of length 0 leave `out` unchanged.
extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) decode_queries(
    const u16* q, i64 q_stride, const int* slots, const int* kv_lens, i64 num_rows, const int* block_tables,
    i64 table_stride, u16* blocks, float scale, u16* out, uint4* partials, u32* counters) {
  decode<false>({q, q_stride, nullptr, nullptr, nullptr, nullptr, 0.0f, scale, block_tables, table_stride, blocks,
                 out, partials, counters},
                kv_lens, slots, (int)num_rows);
}

// Lengths count the new token, whose key and value are in `qkv` and in no block.
extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) decode_qkv(
    const u16* qkv, i64 q_stride, const int* slots, const int* kv_lens, i64 num_rows, const int* block_tables,
    i64 table_stride, u16* blocks, float scale, u16* out, uint4* partials, u32* counters, const float* cos,
    const float* sin, const u16* q_weight, const u16* k_weight, float eps) {
  decode<true>({qkv, q_stride, cos, sin, q_weight, k_weight, eps, scale, block_tables, table_stride, blocks, out,
                partials, counters},
               kv_lens, slots, (int)num_rows);
}
