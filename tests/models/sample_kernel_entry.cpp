// Entry points of the kernels of sample.cu on the CPU, for ctypes. Compiled after cuda_emulator.h and sample.cu.
//
// Each takes a seed of the order in which warps go on, then the kernel's arguments; n is the number of
// rows. Each returns null, or what went wrong.

static const char* run_rows(int n, int chunk, const void* scratch, unsigned seed, const std::function<void()>& run) {
  const int shared_bytes = SHARED_STATE_BYTES + (scratch ? 0 : 4 * chunk);
  return emulator::run_grid(n * CLUSTER, 1, CLUSTER, THREADS, shared_bytes, seed, run);
}

extern "C" const char* run_sample(
    unsigned seed, int n, const logit_t* logits, i64 row_stride, const i64* rows, const int* slots,
    const int* positions, const i64* slot_table, const u32* raw_flags, int vocab_size, int chunk, u32* scratch,
    int* out_tokens, int* out_status, int* out_cuts, i64 first_token, double* out_scores) {
  return run_rows(n, chunk, scratch, seed, [&] {
    sample(logits, row_stride, rows, slots, positions, slot_table, raw_flags, vocab_size, chunk, scratch,
           out_tokens, out_status, out_cuts, first_token, out_scores);
  });
}

extern "C" const char* run_logprobs(
    unsigned seed, int n, const logit_t* logits, i64 row_stride, const i64* rows, const i64* tokens,
    int vocab_size, int chunk, float* scratch, int num_top, double* out) {
  return run_rows(n, chunk, scratch, seed, [&] {
    logprobs(logits, row_stride, rows, tokens, vocab_size, chunk, scratch, num_top, out);
  });
}

extern "C" const char* run_adjust(
    unsigned seed, int n, const logit_t* logits, i64 row_stride, const i64* rows, int vocab_size, float* out,
    u32* raw_flags, const i64* mask_index, const u64* mask_words, const i64* allowed_offsets,
    const i64* allowed_tokens, const i64* bias_offsets, const i64* bias_tokens, const double* bias_values,
    const i64* penalty_index, const i64* penalty_slots, const double* strengths, const i64* draft_offsets,
    const i64* draft_cells, const i64* draft_tokens, const unsigned char* prompt_mask, const int* output_counts) {
  const int num_tiles = (vocab_size + TILE - 1) / TILE;
  return emulator::run_grid(num_tiles, n, 1, THREADS, 4 * TILE, seed, [&] {
    adjust(logits, row_stride, rows, vocab_size, out, raw_flags, mask_index, mask_words, allowed_offsets,
           allowed_tokens, bias_offsets, bias_tokens, bias_values, penalty_index, penalty_slots, strengths,
           draft_offsets, draft_cells, draft_tokens, prompt_mask, output_counts);
  });
}
