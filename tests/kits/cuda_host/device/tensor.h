// What cuda/tensor.cuh does by PTX on a GPU: products of small matrices, and floats rounded to 16 bits.
#pragma once

inline float host_from_bfloat16(unsigned bits) { return host_bit_cast<float>(bits << 16); }
inline float host_from_float16(unsigned bits) { return (float)host_bit_cast<_Float16>((unsigned short)bits); }

inline unsigned host_bfloat16(float v) {
  const unsigned bits = host_bit_cast<unsigned>(v);
  return v != v ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
inline unsigned host_pack_bfloat16(float low, float high) { return host_bfloat16(low) | host_bfloat16(high) << 16; }
inline unsigned host_float16(float v) { return host_bit_cast<unsigned short>((_Float16)v); }
inline unsigned host_pack_float16(float low, float high) { return host_float16(low) | host_float16(high) << 16; }

struct HostFragments {
  unsigned a[4], b[2];
};
inline HostFragments host_fragments[32][32];  // by warp, then thread

HOST_UNSEEN inline void host_put_fragments(const unsigned (&a)[4], unsigned b0, unsigned b1) {
  host_fragments[threadIdx.x / 32][threadIdx.x % 32] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
}
HOST_UNSEEN inline void host_add_products(float (&sum)[4], float (*number)(unsigned)) {
  const HostFragments* const warp = host_fragments[threadIdx.x / 32];
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; i++) {
    const int half = i / 2, column = 2 * t + i % 2;
    double total = sum[i];
    for (int k = 0; k < 16; k++) {
      const int holder = k % 8 / 2, shift = 16 * (k % 2);
      const unsigned a = warp[4 * g + holder].a[k / 8 * 2 + half] >> shift & 0xffffu;
      const unsigned b = warp[4 * column + holder].b[k / 8] >> shift & 0xffffu;
      total += (double)number(a) * number(b);
    }
    sum[i] = (float)total;
  }
}
// sum += a * b, as mma.m16n8k16 spreads the three over the threads of a warp, all of which must call it.
inline void host_multiply(
    float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, float (*number)(unsigned),
    const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  host_put_fragments(a, b0, b1);
  host_syncwarp(file, line);
  host_add_products(sum, number);
  host_syncwarp(file, line);
}
