// The instructions of skinny_gemm.cu on the CPU. Included after cuda_emulator.h and before the kernel.
//
// Always true: x is NaN until a thread waits for the kernel before.

#pragma once

#define SHARED_SUMS(name) \
  auto name = (float(*)[ROWS][SUM_STRIDE])emulator::current->block->shared.data()

static uint4 load_weights(const unsigned short* source) {
  uint4 value;
  memcpy(&value, source, 16);
  return value;
}
static uint4 load_input(const unsigned short* source) { return load_weights(source); }

namespace emulator {
// x, which the kernel before writes, copied when a thread waits for it.
struct LateWrite { void* target; const void* source; long long bytes; };
static LateWrite late_write;
}  // namespace emulator

static void wait_for_previous_kernel() {
  auto& write = emulator::late_write;
  memcpy(write.target, write.source, write.bytes);
  write.bytes = 0;
}

static float from_half(unsigned short bits) {
#ifdef HALF_F16
  return half_to_float(bits);
#else
  return bits_of<float>((unsigned)bits << 16);
#endif
}
static unsigned short to_half(float x) {
#ifdef HALF_F16
  return bits_of<unsigned short>((_Float16)x);
#else
  const unsigned bits = bits_of<unsigned>(x);
  return bits + 0x7fff + (bits >> 16 & 1) >> 16;
#endif
}
// D = A B + C: A [16, 16] has registers a0 a2 in rows 0 to 7 and a1 a3 below, B [16, 8] has columns of b0 b1.
static void mma_m16n8k16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  auto& barrier = *emulator::current->warp_barrier;
  const int lane = emulator::lane(), group = lane / 4, quarter = lane % 4;
  unsigned long long a_top[32], a_bottom[32], b[32];
  auto gather = [&](unsigned long long* values, unsigned first, unsigned second) {
    memcpy(values, emulator::gather(barrier, lane, first | (unsigned long long)second << 32), sizeof a_top);
  };
  gather(a_top, a0, a2);
  gather(a_bottom, a1, a3);
  gather(b, b0, b1);
  auto element = [](const unsigned long long* values, int line, int column) {
    const auto registers = values[line * 4 + column % 8 / 2];
    return from_half(registers >> (column / 8 * 32 + column % 2 * 16));
  };
  for (int i = 0; i < 4; i++)
    for (int column = 0; column < 16; column++)
      c[i] += element(i < 2 ? a_top : a_bottom, group, column) * element(b, quarter * 2 + i % 2, column);
}
#define __expf expf
