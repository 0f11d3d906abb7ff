// Entry point of the kernels of decode.cu on the CPU, for ctypes. Compiled after the emulator and decode.cu.
//
// Takes a seed of the order in which warps go on, the number of CTAs, what the kernel before writes, then the
// kernels' arguments: `decode_queries` where `cos` is null. Returns null, or what went wrong.

extern "C" const char* run_decode(
    unsigned seed, int num_blocks, int shared_bytes, void* late_target, const void* late_source, i64 late_bytes,
    const u16* q, i64 q_stride, const int* slots, const int* kv_lens, i64 num_rows, const int* block_tables,
    i64 table_stride, u16* blocks, double scale, u16* out, uint4* partials, u32* counters, const float* cos,
    const float* sin, const u16* q_weight, const u16* k_weight, double eps) {
  emulator::late_writes = {{late_target, late_source, (unsigned)late_bytes}};
  const char* error = emulator::run_whole_grid(num_blocks, 32 * WARPS, shared_bytes, seed, [&] {
    if (cos)
      decode_qkv(q, q_stride, slots, kv_lens, num_rows, block_tables, table_stride, blocks, (float)scale, out, partials,
                 counters, cos, sin, q_weight, k_weight, (float)eps);
    else
      decode_queries(q, q_stride, slots, kv_lens, num_rows, block_tables, table_stride, blocks, (float)scale, out,
                     partials, counters);
  });
  return error ? error : emulator::late_writes.empty() ? nullptr : "no wait for the kernel before";
}
