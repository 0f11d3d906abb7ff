// CUDA kernels of GEMMs with few rows of x: out [m, n] = x [m, k] @ w [n, k].T, on tensor cores.
//
// Own the arithmetic and the order of sums. Compiled and launched by skinny_gemm.py.
//
//     linear    x @ w.T + bias
//     gate_up   silu(x @ gate.T) * (x @ up.T), where w is [gate; up]
//
//     CTA: 16 rows of w     warp 0           warp 1         ...    each has a part of the columns
//       w   memory ─►       [ 32 | 32 | ]    [ 32 | 32 | ]         from memory, once
//       x   caches ─►       [ 32 | 32 | ]    [ 32 | 32 | ]         all rows
//       sums                     └────── + ───────┘ ...            in shared memory, in the order of the warps
//
// A step is 32 columns. In the fragments of mma.m16n8k16 a thread has columns 2t, 2t + 1, 2t + 8 and 2t + 9 of
// 16. Which columns those are does not matter, as long as x and w agree: so thread t of a quad takes columns
// 8t to 8t + 7 of the step, one load of 16 bytes, for two products. Both operands go from memory straight to
// registers.
//
// Always true: before the wait for the kernel before, only weights are read, and nothing is written. A row's
// result depends on that row, on w, and on the number of warps.
//
// ROW_TILES   tiles of 8 rows of x; m is at most 8 * ROW_TILES
// STEPS       steps whose weights a thread requests ahead
// INPUT_STEPS steps whose part of x a thread requests ahead; it divides STEPS
// WARPS       warps of a CTA
// MIN_CTAS    CTAs that share a multiprocessor
// HALF_F16    x and w are float16; else bfloat16

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr int ROWS = 8 * ROW_TILES, STEP_COLUMNS = 32;

#ifdef __CUDACC__
#define SHARED_SUMS(name) __shared__ float name[WARPS][ROWS][SUM_STRIDE]
// A weight is read once: it takes no room in L1. In the order of the program, so before a wait that follows.
__device__ __forceinline__ uint4 load_weights(const u16* source) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(source));
  return value;
}
__device__ __forceinline__ uint4 load_input(const u16* source) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(source)
               : "memory");
  return value;
}
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef HALF_F16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u16 to_half(float x) {
  u16 bits;
#ifdef HALF_F16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#endif
  return bits;
}
__device__ __forceinline__ float from_half(u16 bits) {
#ifdef HALF_F16
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
#else
  return __uint_as_float((u32)bits << 16);
#endif
}
#endif

constexpr int SUM_STRIDE = 20;  // of 16 rows of w: a warp's stores go to different banks

__device__ __forceinline__ uint4 zeros() { return {0, 0, 0, 0}; }

// Adds to shared `sums` [warp][row of x][row of w] the products over each warp's part of the k columns. `low` and `high`
// are the rows g and g + 8 of the CTA's 16 rows of w.
__device__ __forceinline__ void multiply(float (*sums)[ROWS][SUM_STRIDE], const u16* x, const u16* low, const u16* high, int m, int k) {
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4, all_steps = k / STEP_COLUMNS;
  const int first_step = all_steps * warp / WARPS;
  int remaining = all_steps * (warp + 1) / WARPS - first_step;  // steps from the first of `low_weights` on
  const int first_column = first_step * STEP_COLUMNS + quarter * 8;
  low += first_column;
  high += first_column;
  uint4 low_weights[STEPS], high_weights[STEPS], inputs[INPUT_STEPS][ROW_TILES];
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    low_weights[step] = step < remaining ? load_weights(low + step * STEP_COLUMNS) : zeros();
    high_weights[step] = step < remaining ? load_weights(high + step * STEP_COLUMNS) : zeros();
  }
  const u16* rows[ROW_TILES];
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; tile++) rows[tile] = x + min(tile * 8 + group, m - 1) * k + first_column;
  wait_for_previous_kernel();
#pragma unroll
  for (int step = 0; step < INPUT_STEPS; step++)
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
      inputs[step][tile] = step < remaining ? load_input(rows[tile] + step * STEP_COLUMNS) : zeros();
  float c[ROW_TILES][4] = {};
#pragma unroll 1
  for (; remaining > 0; remaining -= STEPS) {
    low += STEPS * STEP_COLUMNS;
    high += STEPS * STEP_COLUMNS;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; tile++) {
        uint4& b = inputs[step % INPUT_STEPS][tile];
        mma_m16n8k16(c[tile], low_weights[step].x, high_weights[step].x, low_weights[step].y, high_weights[step].y, b.x, b.y);
        mma_m16n8k16(c[tile], low_weights[step].z, high_weights[step].z, low_weights[step].w, high_weights[step].w, b.z, b.w);
        b = step + INPUT_STEPS < remaining ? load_input(rows[tile] + (step + INPUT_STEPS) * STEP_COLUMNS) : zeros();
      }
      low_weights[step] = step + STEPS < remaining ? load_weights(low + step * STEP_COLUMNS) : zeros();
      high_weights[step] = step + STEPS < remaining ? load_weights(high + step * STEP_COLUMNS) : zeros();
    }
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) rows[tile] += STEPS * STEP_COLUMNS;
  }
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; tile++) {
    float(*target)[SUM_STRIDE] = &sums[warp][tile * 8 + quarter * 2];
    target[0][group] = c[tile][0];
    target[1][group] = c[tile][1];
    target[0][group + 8] = c[tile][2];
    target[1][group + 8] = c[tile][3];
  }
  __syncthreads();
}

// Sum of a row of x and a row of w over all warps.
__device__ __forceinline__ float add_warps(const float (*sums)[ROWS][SUM_STRIDE], int row, int output) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += sums[warp][row][output];
  return sum;
}

// A CTA has 16 rows of w. n is a multiple of 16, k of 32.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_CTAS)
linear(const u16* x, const u16* w, const u16* bias, u16* out, i64 num_rows, i64 num_columns, i64 num_outputs) {
  SHARED_SUMS(sums);
  const int m = num_rows, k = num_columns, n = num_outputs, first = blockIdx.x * 16;
  const u16* low = w + (i64)(first + threadIdx.x % 32 / 4) * k;
  multiply(sums, x, low, low + 8 * k, m, k);
  for (int i = threadIdx.x; i < m * 16; i += 32 * WARPS) {
    const int row = i / 16, output = first + i % 16;
    const float sum = add_warps(sums, row, i % 16);
    out[(i64)row * n + output] = to_half(bias ? sum + from_half(bias[output]) : sum);
  }
}

// As `linear`, with half as many outputs as w has rows. A CTA has 8 rows of gate and 8 of up.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_CTAS)
gate_up(const u16* x, const u16* w, u16* out, i64 num_rows, i64 num_columns, i64 num_outputs) {
  SHARED_SUMS(sums);
  const int m = num_rows, k = num_columns, n = num_outputs, first = blockIdx.x * 8;
  const u16* gate = w + (i64)(first + threadIdx.x % 32 / 4) * k;
  multiply(sums, x, gate, gate + (i64)n * k, m, k);
  for (int i = threadIdx.x; i < m * 8; i += 32 * WARPS) {
    const int row = i / 8, output = i % 8;
    const float gated = add_warps(sums, row, output), up = add_warps(sums, row, output + 8);
    out[(i64)row * n + first + output] = to_half(gated / (1.0f + __expf(-gated)) * up);
  }
}
