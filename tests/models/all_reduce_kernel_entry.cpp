// Entry point of the kernels of all_reduce.cu on the CPU, for ctypes. Compiled after the emulator and the kernels.
//
// Takes a seed of the order in which warps go on and stores arrive, the calls, and for each call and rank its arrays.
// Every rank makes all calls. Returns null, or what went wrong.

// The kernel is an index of `kernels`, or the number of those: gather_packets.
struct Call { i64 kernel, has_flags, num_ctas, num_threads, num_vectors, chunk_vectors, num_bytes; double eps; };
// Late x and residual are what the kernel before writes to x and residual.
struct Arrays { const void *late_x, *late_residual; uint4 *x, *residual, *weight, *out, *normed; };
struct Region { i64 slots_offset, slot_bytes, flags_offset; };

using emulator::Reached;

constexpr decltype(&reduce_packets) kernels[] = {reduce_packets, reduce_packets_wide, reduce_flagged, reduce_flagged_wide};

extern "C" const char* run_calls(unsigned seed, i64 store_delay, i64 num_calls, const Call* calls, const Arrays* arrays,
                                 const u64* buffers, u32* const* counters, const Region* regions, i64 max_ctas,
                                 i64 max_threads, Reached* reached) {
  using namespace emulator;
  random_state = seed;
  emulator::store_delay = store_delay;
  emulator::max_threads = max_threads;
  blocks_of_rank = max_ctas;
  pending.clear();
  call_of_rank.assign(WORLD, -1);
  emulator::reached = {};
  num_stores = num_polls = 0;
  calls_of_thread.assign(WORLD * max_ctas * max_threads, nullptr);
  rank_barriers.clear();
  for (int rank = 0; rank < WORLD; rank++) rank_barriers.push_back(std::make_unique<Barrier>(max_ctas * max_threads));
  std::vector<RankCall> rank_calls;
  for (i64 i = 0; i < num_calls; i++)
    for (int rank = 0; rank < WORLD; rank++) {
      const Arrays& each = arrays[i * WORLD + rank];
      RankCall call = {{(unsigned)calls[i].num_ctas}, {(unsigned)calls[i].num_threads}, i, {}};
      call.late_writes.push_back({each.x, each.late_x, calls[i].num_bytes});
      if (each.residual) call.late_writes.push_back({each.residual, each.late_residual, calls[i].num_bytes});
      rank_calls.push_back(call);
    }
  const char* error = run_grid(WORLD * max_ctas, 1, WORLD * max_ctas, max_threads, sizeof(float) * 2 * MAX_THREADS / 32, seed, [&] {
    const int rank = current->block_index.x / max_ctas;
    current->block_index.x %= max_ctas;
    for (i64 i = 0; i < num_calls; i++) {
      const Call& call = calls[i];
      const Arrays& each = arrays[i * WORLD + rank];
      call_of_current() = &rank_calls[i * WORLD + rank];
      if (current->block_index.x >= call.num_ctas || current->thread_index.x >= call.num_threads) {
        wait_for_previous_kernel();
        continue;
      }
      const Region& region = regions[call.kernel];
      u32* own_counters = counters[rank * 2 + call.has_flags];
      if (call.kernel == std::size(kernels))
        gather_packets(buffers, own_counters, region.slots_offset, region.slot_bytes, region.flags_offset, rank, max_ctas,
                       each.x, each.out, call.num_vectors, call.chunk_vectors);
      else
        kernels[call.kernel](
            buffers, own_counters, region.slots_offset, region.slot_bytes, region.flags_offset, rank, max_ctas, each.x,
            each.residual, each.weight, each.out, each.normed, call.num_vectors, call.chunk_vectors, call.eps);
    }
  });
  *reached = emulator::reached;
  if (error) return error;
  for (const RankCall& each : rank_calls)
    if (!each.late_writes.empty()) return "no wait for the kernel before";
  return nullptr;
}
