// Entry points of the kernels of skinny_gemm.cu on the CPU, for ctypes. Compiled after the kernels.
//
// Each takes a seed of the order in which warps go on, and two addresses of x: that of the launch, and that of
// what the kernel before writes there. Each returns null, or what went wrong.

static const char* run(unsigned seed, i64 num_ctas, u16* x, const u16* late_x, i64 num_cells,
                       const std::function<void()>& kernel) {
  constexpr int SHARED_BYTES = WARPS * ROWS * SUM_STRIDE * 4;
  emulator::late_write = {x, late_x, 2 * num_cells};
  const char* error = emulator::run_grid(num_ctas, 1, 1, 32 * WARPS, SHARED_BYTES, seed, kernel);
  return error ? error : emulator::late_write.bytes ? "no wait for the kernel before" : nullptr;
}

extern "C" const char* run_linear(unsigned seed, u16* x, const u16* late_x, const u16* w, const u16* bias, u16* out,
                                  i64 m, i64 k, i64 n) {
  return run(seed, n / 16, x, late_x, m * k, [&] { linear(x, w, bias, out, m, k, n); });
}

extern "C" const char* run_gate_up(unsigned seed, u16* x, const u16* late_x, const u16* w, u16* out, i64 m, i64 k,
                                   i64 n) {
  return run(seed, n / 8, x, late_x, m * k, [&] { gate_up(x, w, out, m, k, n); });
}
