// CUDA kernels of sampling: adjusted logits, filters, noise and the token of each row.
//
// Own the arithmetic of forge.sampling on a CUDA device. Compiled by sample_cuda.py with NVRTC.
//
//     adjust   [row, tile]    raw logits ─ mask, allowed ids ─ bias ─ penalties ─► float32 logits
//     sample   [row]          logits ─ top-k, top-p, min-p ─ + noise ─ argmax ─► token and status
//     logprobs [row]          raw logits ─► log probability of a token, and the most likely tokens
//
//     sample, a row of the vocabulary over a cluster of CTAs:
//       CTA 0 [ gaps ]   CTA 1 [ gaps ]  ...  CTA 7 [ gaps ]     where the row has filters
//             └─ counts and masses of 256 bins of gaps ─┘        added over the cluster, 3 passes
//             └──────── best score and its token ───────┘
//
// Always true: gaps, weights and sums are integers, so the order of additions does not matter.
// Scores are compared in float64; float32 only rules out tokens that cannot win. Built with
// --fmad=false: forge.sampling rounds a product before it adds.
//
// LOGIT_BF16, LOGIT_F16   type of the logits; float where neither is defined
// CLUSTER                 CTAs of a row
// THREADS                 threads of a CTA
// SHARED_STATE_BYTES      room for Shared in shared memory

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if CLUSTER > 1
#define ROW_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define ROW_CLUSTER
#endif

#ifdef __CUDACC__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
__device__ __forceinline__ float half_to_float(unsigned short x) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x));
  return value;
}
#if CLUSTER > 1
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Address of the same variable in the shared memory of another CTA of the cluster.
__device__ __forceinline__ u32 peer_address(const void* variable, u32 rank) {
  u32 address, peer;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(address) : "l"(variable));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}
__device__ __forceinline__ u32 load_peer(const u32* variable, u32 rank) {
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(peer_address(variable, rank)) : "memory");
  return value;
}
#else
__device__ __forceinline__ u32 cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
__device__ __forceinline__ u32 load_peer(const u32* variable, u32) { return *(const volatile u32*)variable; }
#endif
#endif

#define WARPS (THREADS / 32)
#define ALL_LANES 0xffffffffu
#define NUM_BINS 256
#define NUM_SLOT_FIELDS 6
#define MAX_GAP (255 * 4096 - 1)
#define IMPOSSIBLE (MAX_GAP + 1)
#define NO_TOKEN 0x7fffffff
#define INF __int_as_float(0x7f800000)
#define MAX_SINGLE 3.4028234663852886e38f

// Flags of the raw logits of a row.
#define HAS_NAN 1u
#define HAS_POSITIVE_INF 2u
#define HAS_FINITE 4u

// forge/models/hf/sampling/status.py
#define STATUS_OK 0
#define STATUS_NAN 1
#define STATUS_POSITIVE_INF 2
#define STATUS_NOTHING_ALLOWED 3
#define STATUS_NEGATIVE_INF 4

#if defined(LOGIT_BF16)
typedef unsigned short logit_t;
__device__ __forceinline__ float to_float(logit_t x) { return __uint_as_float((u32)x << 16); }
#elif defined(LOGIT_F16)
typedef unsigned short logit_t;
__device__ __forceinline__ float to_float(logit_t x) { return half_to_float(x); }
#else
typedef float logit_t;
__device__ __forceinline__ float to_float(logit_t x) { return x; }
#endif

__device__ __forceinline__ u32 logit_flags(float x) {
  return x != x ? HAS_NAN : x == INF ? HAS_POSITIVE_INF : x == -INF ? 0 : HAS_FINITE;
}

// Calls visit(index, logit) for each of `size` logits, 16 bytes at a time where they are aligned. Copies
// them to `cells` as float, unless it is null. LOADS reads of a thread are in flight together.
#define LOADS 5
template <typename Visit>
__device__ __forceinline__ void for_each_logit(const logit_t* logits, int size, float* cells, Visit visit) {
  constexpr int width = 16 / sizeof(logit_t), stride = THREADS * width;
  int first = 0;
  if (((u64)logits & 15) == 0) {
    first = size / width * width;
    for (int start = threadIdx.x * width; start < first; start += LOADS * stride) {
      uint4 packed[LOADS];
#pragma unroll
      for (int k = 0; k < LOADS; k++)
        if (start + k * stride < first) packed[k] = *(const uint4*)(logits + start + k * stride);
#pragma unroll
      for (int k = 0; k < LOADS; k++) {
        const int i = start + k * stride;
        if (i >= first) break;
        const logit_t* raw = (const logit_t*)&packed[k];
        float values[width];
#pragma unroll
        for (int j = 0; j < width; j++) values[j] = to_float(raw[j]);
        if (cells) {
#pragma unroll
          for (int j = 0; j < width; j += 4) *(uint4*)(cells + i + j) = *(uint4*)(values + j);
        }
#pragma unroll
        for (int j = 0; j < width; j++) visit(i + j, values[j]);
      }
    }
  }
  for (int i = first + threadIdx.x; i < size; i += THREADS) {
    const float value = to_float(logits[i]);
    if (cells) cells[i] = value;
    visit(i, value);
  }
}

// Calls visit(index, cell) for each of `size` cells, a multiple of 4.
template <typename Visit>
__device__ __forceinline__ void for_each_cell(u32* cells, int size, Visit visit) {
#pragma unroll 2
  for (int i = threadIdx.x * 4; i < size; i += THREADS * 4) {
    uint4 four = *(uint4*)(cells + i);
    visit(i, four.x), visit(i + 1, four.y), visit(i + 2, four.z), visit(i + 3, four.w);
  }
}

// A finite number beyond the range of single precision becomes the last one within; -inf stays.
__device__ __forceinline__ float round_single(double x) {
  return x == -(double)INF ? -INF : __double2float_rn(fmax(-(double)MAX_SINGLE, fmin(x, (double)MAX_SINGLE)));
}

__device__ __forceinline__ u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

__device__ __forceinline__ int logit_gap(float x, float top, float scale) {
  float difference = x < top ? __fsub_rn(top, x) : 0.0f;
  difference = fminf(difference, MAX_SINGLE);
  int steps = (int)(fminf(__fmul_rn(difference, scale), 32.0f) * 32768.0f);
  return x > -INF ? min(steps, MAX_GAP) : IMPOSSIBLE;
}

__device__ __forceinline__ u32 gap_weight(int gap) {
  u32 exponent = __umulhi((u32)gap << 11, 0xB8AA3B29u);
  u32 fraction = (exponent & ((1u << 25) - 1)) << 7, shift = exponent >> 25;
  u32 power = 39560409u - __umulhi(fraction, 4069712u);
  power = 237510004u - __umulhi(fraction, power);
  power = 1031563053u - __umulhi(fraction, power);
  power = 2977027382u - __umulhi(fraction, power);
  power = 4294967061u - __umulhi(fraction, power);
  return shift < 32 ? power >> shift : 0;
}

__device__ __forceinline__ double gumbel(u32 bits) {
  return -log(-log(((double)bits + 0.5) * 2.3283064365386962890625e-10));
}

// gumbel(bits) in single precision, within 1e-3.
__device__ __forceinline__ float rough_gumbel(u32 bits) {
  const float unit = 2.3283064e-10f;
  float below_one = (__uint2float_rn(~bits) + 0.5f) * unit;  // 1 - the uniform number
  float uniform = (__uint2float_rn(bits) + 0.5f) * unit;
  float exponential = below_one < 0.01f ? below_one + 0.5f * below_one * below_one : -__logf(uniform);
  return -__logf(exponential);
}

// Every thread of the warp gets the largest value.
__device__ __forceinline__ float warp_max(float value) {
  for (int offset = 16; offset; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
  return value;
}

// A score in double precision and its token. Of equal scores the lower token is the better.
struct Scored {
  double score;
  int token;
  __device__ __forceinline__ void take_better(double other, int other_token) {
    if (other > score || (other == score && other_token < token)) score = other, token = other_token;
  }
  __device__ __forceinline__ void take_best_of_warp() {
    for (int offset = 16; offset; offset >>= 1) {
      const double other = __shfl_xor_sync(ALL_LANES, score, offset);
      take_better(other, __shfl_xor_sync(ALL_LANES, token, offset));
    }
  }
};

struct Shared {
  // Tokens of this CTA in each bin, and the sums of their weights: low and high 32 bits. In turns: a
  // pass counts in one, other CTAs may still read the one before, the third is cleared.
  u32 counts[3][NUM_BINS];
  u32 masses[3][2][NUM_BINS];
  u64 sums[NUM_BINS];            // of counts or masses over the cluster, up to each bin, for each warp
  u32 warp_u32[WARPS];
  float warp_top[WARPS], warp_bottom[WARPS];
  Scored warp_best[WARPS];
  u32 bin;                       // first bin that reaches the limit
  int last_token, row_token;
  // Read by the other CTAs of the cluster.
  u32 top, bottom, has_nan;
  u32 best_token;
  u64 best_score;
  u64 mass, mass_before;         // of tokens that top-k keeps, and of those before the best
};
static_assert(sizeof(Shared) <= SHARED_STATE_BYTES, "");

__device__ __forceinline__ u64 load_peer64(const u64* variable, u32 rank) {
  const u32 low = load_peer((const u32*)variable, rank), high = load_peer((const u32*)variable + 1, rank);
  return (u64)high << 32 | low;
}

__device__ __forceinline__ u64 warp_sum(u64 value) {
  for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(ALL_LANES, value, offset);
  return value;
}

// The last kept token of a row: all with a smaller gap are kept, and this CTA keeps those with this gap up
// to `last_token`; -1: none of these.
struct Cut {
  int gap;
  int last_token;
  __device__ __forceinline__ bool keeps(int token, u32 token_gap) const {
    return (int)token_gap < gap || ((int)token_gap == gap && token <= last_token);
  }
};

// Returns the token of this CTA with the `rank`-th cell of this gap, counted from 1.
__device__ int find_tie(Shared& s, const u32* gaps, int first, int size, int gap, u32 rank) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  // Each thread counts consecutive cells. An odd number of them has no bank conflicts.
  const int length = (size + THREADS - 1) / THREADS | 1;
  const int start = min(tid * length, size), end = min(start + length, size);
  u32 ties = 0;
  for (int i = start; i < end; i++) ties += (int)gaps[i] == gap;
  u32 sum = ties;
  for (int offset = 1; offset < 32; offset <<= 1) {
    const u32 other = __shfl_up_sync(ALL_LANES, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) s.warp_u32[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; w++) sum += s.warp_u32[w];
  if (sum >= rank && sum - ties < rank) {
    u32 left = rank - (sum - ties);
    for (int i = start; left; i++)
      if ((int)gaps[i] == gap && !--left) s.last_token = first + i;
  }
  __syncthreads();
  return s.last_token;
}

// Returns the shortest beginning of the order (gap, token) whose sum of weights, or of ones, reaches
// `limit`; all possible tokens where none does. It counts gaps in bins that become smaller. Every CTA of
// the cluster finds the same gap.
//
// num_gaps   more than the largest gap of a possible token
template <bool BY_MASS>
__device__ Cut find_cut(Shared& s, u32* gaps, int first, int size, u32 rank, int num_gaps, u64 limit) {
  const int tid = threadIdx.x, lane = tid & 31;
  int low = 0, end = num_gaps;
  u64 before = 0;
  for (int i = tid; i < NUM_BINS; i += THREADS) s.counts[0][i] = s.masses[0][0][i] = s.masses[0][1][i] = 0;
  __syncthreads();
  for (int pass = 0;; pass++) {
    const int now = pass % 3, next = (pass + 1) % 3;
    const int shift = max(0, 32 - __clz(end - low - 1) - 8);  // at most 256 bins of 2^shift gaps
    for_each_cell(gaps, size, [&](int, u32 cell) {
      const int gap = (int)cell;
      if (gap < low || gap >= end) return;
      const int bin = (gap - low) >> shift;
      if (!BY_MASS || !shift) atomicAdd(&s.counts[now][bin], 1u);
      if (BY_MASS) {
        const u32 weight = gap_weight(gap);
        // Where the low half wraps, one is carried.
        if (weight && atomicAdd(&s.masses[now][0][bin], weight) > ~weight) atomicAdd(&s.masses[now][1][bin], 1u);
      }
    });
    for (int i = tid; i < NUM_BINS; i += THREADS) s.counts[next][i] = s.masses[next][0][i] = s.masses[next][1][i] = 0;
    if (!tid) s.bin = NUM_BINS;
    cluster_sync();

    // Sums over the cluster, then over the bins of each warp.
    for (int bin = tid; bin < NUM_BINS; bin += THREADS) {
      u32 values[CLUSTER], high_values[CLUSTER];  // all loads first: each takes as long as all of them
#pragma unroll
      for (u32 r = 0; r < CLUSTER; r++) {
        values[r] = load_peer(BY_MASS ? &s.masses[now][0][bin] : &s.counts[now][bin], r);
        high_values[r] = BY_MASS ? load_peer(&s.masses[now][1][bin], r) : 0;
      }
      u64 sum = 0;
#pragma unroll
      for (u32 r = 0; r < CLUSTER; r++) sum += values[r] + ((u64)high_values[r] << 32);
      for (int offset = 1; offset < 32; offset <<= 1) {
        const u64 other = __shfl_up_sync(ALL_LANES, sum, offset);
        if (lane >= offset) sum += other;
      }
      s.sums[bin] = sum;
    }
    __syncthreads();
    auto sum_through = [&](int bin) {
      u64 sum = bin < 0 ? 0 : s.sums[bin];
      for (int last = 31; last < (bin & ~31); last += 32) sum += s.sums[last];
      return sum;
    };
    for (int bin = tid; bin < NUM_BINS; bin += THREADS)
      if (before + sum_through(bin) >= limit) atomicMin(&s.bin, (u32)bin);
    __syncthreads();
    const int bin = (int)s.bin;
    if (bin == NUM_BINS) return {MAX_GAP, NO_TOKEN};
    before += sum_through(bin - 1);
    __syncthreads();  // the sums are read before the next pass writes them
    if (shift) {
      low += bin << shift;
      end = min(low + (1 << shift), end);
      continue;
    }
    const int gap = low + bin;
    const u64 weight = BY_MASS ? gap_weight(gap) : 1;
    const u64 num_ties = (limit - before + weight - 1) / weight;  // kept tokens with this gap
    const u64 ties_before = warp_sum((u32)lane < rank ? load_peer(&s.counts[now][bin], lane) : 0);
    if (ties_before >= num_ties) return {gap, -1};
    if (ties_before + s.counts[now][bin] <= num_ties) return {gap, first + size - 1};
    return {gap, find_tie(s, gaps, first, size, gap, (u32)(num_ties - ties_before))};
  }
}

// Samples a token for each row. Grid: CLUSTER CTAs a row. Shared memory: SHARED_STATE_BYTES, then `chunk`
// cells of 4 bytes, unless `scratch` has them.
//
// logits        [R, V] logit_t; rows are `row_stride` logits apart
// rows          [n] row of the logits of each row, or null: row i of n
// slots         [n] slot of each row
// positions     [n] position of the token to sample
// slot_table    [slots, 6] seed, and as doubles 1 / T, noise scale, top_k, top_p, max_gap
// raw_flags     [n] flags of the raw logits where these are adjusted ones, or null
// chunk         tokens of a CTA, a multiple of 8
// scratch       [n, chunk] cells in global memory, or null. Only with CLUSTER 1
// out_tokens    [n] 0 where the status is not STATUS_OK
// first_token   id of the first logit of a row
// out_scores    [n] or null. The score of each row's token; -inf where no token may be drawn
// out_cuts      [n, 2] or null. The cut of each row: its gap, and a token up to which those with this
//               gap are kept. Holds -1 before. Where it is given, tokens are not written
extern "C" __global__ void ROW_CLUSTER __launch_bounds__(THREADS, 1024 / THREADS)
sample(const logit_t* logits, i64 row_stride, const i64* rows, const int* slots, const int* positions,
       const i64* slot_table, const u32* raw_flags, int vocab_size, int chunk, u32* scratch,
       int* out_tokens, int* out_status, int* out_cuts, i64 first_token, double* out_scores) {
  DYNAMIC_SHARED(memory);
  Shared& s = *(Shared*)memory;
  const u32 rank = cluster_rank();
  const int row = blockIdx.x / CLUSTER, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int first = (int)rank * chunk, size = max(0, min(chunk, vocab_size - first));
  u32* cells = scratch ? scratch + (i64)row * chunk : (u32*)(memory + SHARED_STATE_BYTES);
  const logit_t* row_logits = logits + (rows ? rows[row] : row) * row_stride;
  const logit_t* source = row_logits + first;
  const i64* params = slot_table + slots[row] * NUM_SLOT_FIELDS;
  auto number = [&](int i) { return __longlong_as_double(params[1 + i]); };
  const double inverse_temperature = number(0), top_p = number(3);
  const bool is_random = number(1) != 0.0;
  const i64 top_k = (i64)number(2);
  const int max_gap = (int)number(4);
  const bool has_top_k = top_k < vocab_size, has_top_p = top_p < 1.0;
  const bool has_gaps = has_top_k || has_top_p || max_gap < MAX_GAP;
  // The winner without top-p is likely the one with it. So top-p is tested after the draw.
  const bool scores_all = !has_top_k && max_gap == MAX_GAP && !out_cuts;
  const float scale = (float)inverse_temperature;
  const u64 golden = 0x9E3779B97F4A7C15ull;
  const u64 key = mix(mix(mix((u64)params[0] + golden) + (u64)(i64)positions[row]));

  auto noise_bits = [&](int i) { return (u32)(mix(key + (u64)(first_token + first + i + 1) * golden) >> 32); };
  // The score in single precision; -inf only where the token is impossible.
  auto rough_score = [&](int i, float x) {
    if (!is_random) return x;
    const float score = fmaxf(-MAX_SINGLE, fminf(__fmul_rn(x, scale), MAX_SINGLE)) + rough_gumbel(noise_bits(i));
    return x > -INF ? score : -INF;
  };
  float rough_best = -INF, second = -INF;  // of this thread
  int candidate = -1;
  auto offer = [&](int i, float score) {
    second = fmaxf(second, fminf(score, rough_best));
    if (score > rough_best) rough_best = score, candidate = i;
  };

  // 1. Read the logits, and score them where all may be drawn.
  float top = -INF, bottom = INF;
  bool has_nan = false;
  for_each_logit(source, size, has_gaps ? (float*)cells : nullptr, [&](int i, float x) {
    has_nan |= x != x;
    top = fmaxf(top, x);  // drops NaN
    if (has_gaps && x > -INF) bottom = fminf(bottom, x);
    if (scores_all) offer(i, rough_score(i, x));
  });
  top = warp_max(top), bottom = -warp_max(-bottom);
  if (!lane) s.warp_top[warp] = top, s.warp_bottom[warp] = bottom;
  has_nan = __syncthreads_or(has_nan);
  for (int w = 0; w < WARPS; w++) top = fmaxf(top, s.warp_top[w]), bottom = fminf(bottom, s.warp_bottom[w]);
  if (!tid) s.top = __float_as_uint(top), s.bottom = __float_as_uint(bottom), s.has_nan = has_nan;

  // 2. From logits to gaps; then what top-k keeps.
  const int num_cells = (size + 3) & ~3;
  const u32 peer = lane % CLUSTER;  // a lane loads from one CTA
  int num_gaps = 0;
  Cut cut = {MAX_GAP, NO_TOKEN};
  if (has_gaps) {
    if (size + tid < num_cells) cells[size + tid] = __float_as_uint(-INF);
    cluster_sync();
    top = warp_max(__uint_as_float(load_peer(&s.top, peer)));
    bottom = -warp_max(-__uint_as_float(load_peer(&s.bottom, peer)));
    num_gaps = min(logit_gap(bottom, top, scale), MAX_GAP) + 1;
    for (int i = tid; i < num_cells; i += THREADS) cells[i] = (u32)logit_gap(__uint_as_float(cells[i]), top, scale);
    __syncthreads();
    if (has_top_k) cut = find_cut<false>(s, cells, first, num_cells, rank, num_gaps, (u64)top_k);
  }

  auto is_kept = [&](int i, u32 gap) { return (int)gap <= max_gap && cut.keeps(first + i, gap); };
  Scored best;
  bool is_scored = scores_all, tests_top_p = has_top_p && fabsf(top) < INF;
  int num_rejected = 0;
  u64 min_mass = 0;
  for (;;) {
    // 3. The best score. Only scores near it in single precision are computed in double precision.
    if (!is_scored) {
      rough_best = second = -INF, candidate = -1;
      for_each_cell(cells, num_cells, [&](int i, u32 gap) {
        if (is_kept(i, gap)) offer(i, rough_score(i, to_float(source[i])));
      });
    }
    float limit = warp_max(rough_best);
    __syncthreads();
    if (!lane) s.warp_top[warp] = limit;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) limit = fmaxf(limit, s.warp_top[w]);
    if (is_random) limit -= 0.01f + 4e-6f * fabsf(limit);
    best = {-(double)INF, NO_TOKEN};
    auto score_exactly = [&](int i) {
      double score = __dmul_rn((double)to_float(source[i]), inverse_temperature);
      if (is_random) score = __dadd_rn(score, gumbel(noise_bits(i)));
      best.take_better(score, first + i);
    };
    if (candidate >= 0 && rough_best >= limit) score_exactly(candidate);
    // Of equal logits without noise the thread's candidate is the first.
    if (__syncthreads_or(is_random && second >= limit && second > -INF)) {
      for (int i = tid; i < size; i += THREADS) {
        const float x = to_float(source[i]);
        if (x > -INF && (!has_gaps || is_kept(i, cells[i])) && rough_score(i, x) >= limit) score_exactly(i);
      }
    }
    best.take_best_of_warp();
    if (!lane) s.warp_best[warp] = best;
    __syncthreads();
    if (!warp) {
      best = s.warp_best[lane % WARPS];
      best.take_best_of_warp();
      if (!lane) s.best_score = (u64)__double_as_longlong(best.score), s.best_token = (u32)best.token;
    }
    cluster_sync();
    if (!warp && (!rank || tests_top_p)) {
      best = {__longlong_as_double((i64)load_peer64(&s.best_score, peer)), (int)load_peer(&s.best_token, peer)};
      best.take_best_of_warp();
      if (!lane) s.row_token = best.token;
    }
    if (!tests_top_p) break;

    // 4. top-p keeps the winner where the tokens before it have less than the least mass.
    if (!tid) s.mass = s.mass_before = 0;
    __syncthreads();
    best.token = s.row_token;
    const int best_gap = logit_gap(to_float(row_logits[best.token]), top, scale);
    u64 mass = 0, mass_before = 0;
    for_each_cell(cells, num_cells, [&](int i, u32 gap) {
      if (!cut.keeps(first + i, gap)) return;
      const u32 weight = gap_weight((int)gap);
      mass += weight;
      if ((int)gap < best_gap || ((int)gap == best_gap && first + i < best.token)) mass_before += weight;
    });
    mass = warp_sum(mass), mass_before = warp_sum(mass_before);
    if (!lane) atomicAdd(&s.mass, mass), atomicAdd(&s.mass_before, mass_before);
    cluster_sync();
    mass = warp_sum(lane < CLUSTER ? load_peer64(&s.mass, peer) : 0);
    mass_before = warp_sum(lane < CLUSTER ? load_peer64(&s.mass_before, peer) : 0);
    if (!num_rejected) min_mass = (u64)ceil(__dmul_rn(top_p, (double)mass));
    if (mass_before < min_mass && !out_cuts) break;
    if (++num_rejected < 3 && !out_cuts) {
      cut = {best_gap, best.token - 1};  // the next best is likely kept
    } else {
      cut = find_cut<true>(s, cells, first, num_cells, rank, num_gaps, min_mass);
      tests_top_p = false;
    }
    is_scored = false;
  }

  if (out_cuts) {
    if (max_gap < cut.gap) cut = {max_gap, NO_TOKEN};
    if (!tid && !rank) out_cuts[2 * row] = cut.gap;
    if (!tid) atomicMax(&out_cuts[2 * row + 1], cut.last_token);
  } else if (!rank && !warp) {
    top = warp_max(__uint_as_float(load_peer(&s.top, peer)));
    const u32 flags = (__ballot_sync(ALL_LANES, load_peer(&s.has_nan, peer)) ? HAS_NAN : 0) | logit_flags(top);
    const u32 raw = raw_flags ? raw_flags[row] : flags;
    const int status = raw & HAS_NAN            ? STATUS_NAN
                       : raw & HAS_POSITIVE_INF ? STATUS_POSITIVE_INF
                       : !(raw & HAS_FINITE)    ? STATUS_NEGATIVE_INF
                       : !(flags & HAS_FINITE)  ? STATUS_NOTHING_ALLOWED
                                                : STATUS_OK;
    if (!lane) {
      out_tokens[row] = status == STATUS_OK ? (int)first_token + best.token : 0;
      if (out_scores) out_scores[row] = best.score;
      out_status[row] = status;
    }
  }
  cluster_sync();  // no CTA ends while another one reads its shared memory
}

// Writes logits after the mask or the allowed ids, the bias and the penalties of each row, in this order.
// A changed logit is rounded to single precision. Grid: tiles of TILE tokens, rows. Shared memory: TILE
// floats. A list of row i is [offsets[i], offsets[i + 1]).
//
// logits, row_stride, rows   as in `sample`
// out             [n, V]
// raw_flags       [n] flags of the raw logits; 0 before
// mask_index      [n] row of mask_words, or -1
// mask_words      [., ceil(V / 64)] bit i of word w allows token 64 * w + i
// allowed_offsets [n + 1], allowed_tokens: an empty list allows all
// bias_offsets    [n + 1], bias_tokens, bias_values
// penalty_index   [n] index into the slots and strengths, or -1
// penalty_slots   [m] slot of the counts
// strengths       [m, 3] repetition, presence, frequency
// draft_offsets   [m + 1], draft_cells: drafts before the position, in the table of drafts
// prompt_mask, output_counts   [slots, V] tokens of the prompt; how often each is in the output
#define TILE 4096
extern "C" __global__ void __launch_bounds__(THREADS)
adjust(const logit_t* logits, i64 row_stride, const i64* rows, int vocab_size, float* out, u32* raw_flags,
       const i64* mask_index, const u64* mask_words, const i64* allowed_offsets, const i64* allowed_tokens,
       const i64* bias_offsets, const i64* bias_tokens, const double* bias_values, const i64* penalty_index,
       const i64* penalty_slots, const double* strengths, const i64* draft_offsets, const i64* draft_cells,
       const i64* draft_tokens, const unsigned char* prompt_mask, const int* output_counts) {
  DYNAMIC_SHARED(memory);
  float* x = (float*)memory;
  const int row = blockIdx.y, tid = threadIdx.x, first = blockIdx.x * TILE, size = min(TILE, vocab_size - first);
  const logit_t* source = logits + rows[row] * row_stride + first;
  const i64 mask = mask_index[row], penalty = penalty_index[row];
  const i64 allowed_first = allowed_offsets[row], allowed_end = allowed_offsets[row + 1];
  const u64* words = mask_words + (mask < 0 ? 0 : mask * ((vocab_size + 63) / 64));
  u32 flags = 0;
  for_each_logit(source, size, nullptr, [&](int i, float value) {
    const int token = first + i;
    flags |= logit_flags(value);
    const bool is_allowed = allowed_first == allowed_end && (mask < 0 || words[token >> 6] >> (token & 63) & 1);
    x[i] = is_allowed ? value : -INF;
  });
  if (flags) atomicOr(&raw_flags[row], flags);
  __syncthreads();
  for (i64 i = allowed_first + tid; i < allowed_end; i += THREADS) {
    const i64 at = allowed_tokens[i] - first;
    if (at >= 0 && at < size) x[at] = to_float(source[at]);
  }
  __syncthreads();
  for (i64 i = bias_offsets[row] + tid; i < bias_offsets[row + 1]; i += THREADS) {
    const i64 at = bias_tokens[i] - first;
    if (at >= 0 && at < size) x[at] = round_single(__dadd_rn((double)x[at], bias_values[i]));
  }
  __syncthreads();
  float* target = out + (i64)row * vocab_size + first;
  if (penalty < 0) {
    for (int i = tid; i < size; i += THREADS) target[i] = x[i];
    return;
  }
  const double repetition = strengths[penalty * 3], presence = strengths[penalty * 3 + 1], frequency = strengths[penalty * 3 + 2];
  const i64 draft_first = draft_offsets[penalty], draft_end = draft_offsets[penalty + 1];
  const int* counts = output_counts + penalty_slots[penalty] * vocab_size + first;
  const unsigned char* in_prompt = prompt_mask + penalty_slots[penalty] * vocab_size + first;
  auto penalize = [&](int i, int count, bool is_prompt) {
    for (i64 d = draft_first; d < draft_end; d++) count += draft_tokens[draft_cells[d]] == first + i;
    if (!count && !is_prompt) return x[i];
    double value = (double)x[i];
    value = value > 0 ? __ddiv_rn(value, repetition) : __dmul_rn(value, repetition);
    if (count) value = __dsub_rn(value, __dadd_rn(__dmul_rn(frequency, (double)count), presence));
    return round_single(value);
  };
  // Four tokens at once where the tables are aligned. Most tokens have no count.
  int done = 0;
  if (vocab_size % 4 == 0) {
    done = size;
    for (int i = tid * 4; i < size; i += THREADS * 4) {
      const uint4 count = *(const uint4*)(counts + i);
      const u32 prompt = *(const u32*)(in_prompt + i);
      float four[4] = {penalize(i, (int)count.x, prompt & 0xff), penalize(i + 1, (int)count.y, prompt & 0xff00),
                       penalize(i + 2, (int)count.z, prompt & 0xff0000), penalize(i + 3, (int)count.w, prompt >> 24)};
      *(uint4*)(target + i) = *(const uint4*)four;
    }
  }
  for (int i = done + tid; i < size; i += THREADS) target[i] = penalize(i, counts[i], in_prompt[i]);
}

#define MAX_TOP 32

struct LogprobShared {
  u64 warp_key[WARPS];
  float warp_top[WARPS];
  double warp_sum[WARPS];
  u64 keys[MAX_TOP];             // of this CTA, in descending order
  // Read by the other CTAs of the cluster, besides the keys.
  u32 top;
  u64 sum;                       // of exp(x - top), the bits of a double
};
static_assert(sizeof(LogprobShared) <= SHARED_STATE_BYTES, "");

// A number that orders logits, and of equal ones the lower token first. 0: no token.
__device__ __forceinline__ u64 order_key(float x, int token) {
  const u32 bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
  return (u64)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | (u32)~token;
}

__device__ __forceinline__ u64 warp_max_key(u64 key) {
  for (int offset = 16; offset; offset >>= 1) {
    const u64 other = __shfl_xor_sync(ALL_LANES, key, offset);
    if (other > key) key = other;
  }
  return key;
}

// Writes the log probability of each row's token and of its most likely tokens. Sums are in double
// precision. Grid, shared memory, chunk and scratch: as `sample`.
//
// rows      [n] rows of the logits, or null
// tokens    [n]
// num_top   at most MAX_TOP and the size of the vocabulary
// out       [n, 2 + 2 * num_top] token, its log probability, the most likely tokens, theirs; NaN where a
//           logit is NaN or +inf, or all are -inf
extern "C" __global__ void ROW_CLUSTER __launch_bounds__(THREADS, 1024 / THREADS)
logprobs(const logit_t* logits, i64 row_stride, const i64* rows, const i64* tokens, int vocab_size, int chunk,
         float* scratch, int num_top, double* out) {
  DYNAMIC_SHARED(memory);
  LogprobShared& s = *(LogprobShared*)memory;
  const u32 rank = cluster_rank();
  const int row = blockIdx.x / CLUSTER, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const u32 peer = lane % CLUSTER;
  const int first = (int)rank * chunk, size = max(0, min(chunk, vocab_size - first));
  float* cells = scratch ? scratch + (i64)row * chunk : (float*)(memory + SHARED_STATE_BYTES);
  const logit_t* row_logits = logits + (rows ? rows[row] : row) * row_stride;

  float top = -INF;
  for_each_logit(row_logits + first, size, cells, [&](int, float x) { top = fmaxf(top, x); });
  top = warp_max(top);
  if (!lane) s.warp_top[warp] = top;
  __syncthreads();
  for (int w = 0; w < WARPS; w++) top = fmaxf(top, s.warp_top[w]);
  if (!tid) s.top = __float_as_uint(top);
  cluster_sync();
  top = warp_max(__uint_as_float(load_peer(&s.top, peer)));

  double sum = 0;  // NaN where a logit is NaN or +inf, or all are -inf
  u64 best = 0;    // of this thread's cells that are not taken
  for (int i = tid; i < size; i += THREADS) {
    const float x = cells[i];
    sum += exp(__dadd_rn((double)x, -(double)top));
    const u64 key = order_key(x, first + i);
    if (key > best) best = key;
  }
  for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
  if (!lane) s.warp_sum[warp] = sum;

  // The CTA's most likely tokens, one after the other. The thread that has one looks for its next.
  for (int n = 0; n < num_top; n++) {
    const u64 warp_best = warp_max_key(best);
    if (!lane) s.warp_key[warp] = warp_best;
    __syncthreads();
    u64 key = 0;
    for (int w = 0; w < WARPS; w++) key = max(key, s.warp_key[w]);
    if (!tid) s.keys[n] = key;
    if (key && key == best) {
      best = 0;
      for (int i = tid; i < size; i += THREADS) {
        const u64 other = order_key(cells[i], first + i);
        if (other < key && other > best) best = other;
      }
    }
    __syncthreads();
  }
  __syncthreads();
  if (!tid) {
    sum = 0;
    for (int w = 0; w < WARPS; w++) sum += s.warp_sum[w];
    s.sum = (u64)__double_as_longlong(sum);
  }
  cluster_sync();

  // The first CTA merges them.
  if (!rank && !warp) {
    double total = 0;
    for (u32 r = 0; r < CLUSTER; r++) total += __longlong_as_double((i64)load_peer64(&s.sum, r));
    total = log(total) + (double)top;
    double* line = out + (i64)row * (2 + 2 * num_top);
    const i64 token = tokens[row];
    if (!lane) line[0] = (double)token, line[1] = (double)to_float(row_logits[token]) - total;
    int taken = 0;
    for (int n = 0; n < num_top; n++) {
      const u64 key = lane < CLUSTER && taken < num_top ? load_peer64(&s.keys[taken], peer) : 0;
      const u64 next = warp_max_key(key);
      if (key && key == next) {
        const int likely = (int)~(u32)next;
        taken++;
        line[2 + n] = (double)likely;
        line[2 + num_top + n] = (double)to_float(row_logits[likely]) - total;
      }
    }
  }
  cluster_sync();  // no CTA ends while another one reads its shared memory
}
