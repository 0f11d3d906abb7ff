// Entry points of the kernels of skinny_gemm.cu on the CPU, for ctypes. Compiled after the kernels.
//
// Each takes a seed of the order in which warps go on. Each returns null, or what went wrong.

constexpr int SHARED_BYTES = WARPS * ROWS * SUM_STRIDE * 4;

extern "C" const char* run_linear(unsigned seed, const u16* x, const u16* w, const u16* bias, u16* out, i64 m, i64 k,
                                  i64 n) {
  return emulator::run_grid(n / 16, 1, 1, 32 * WARPS, SHARED_BYTES, seed, [&] { linear(x, w, bias, out, m, k, n); });
}

extern "C" const char* run_gate_up(unsigned seed, const u16* x, const u16* w, u16* out, i64 m, i64 k, i64 n) {
  return emulator::run_grid(n / 8, 1, 1, 32 * WARPS, SHARED_BYTES, seed, [&] { gate_up(x, w, out, m, k, n); });
}
