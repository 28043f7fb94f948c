// Bit tricks, bit casts and single-precision functions that CUDA has without a header.
#pragma once

template <class To, class From>
inline To host_bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; i++) reversed |= (v >> i & 1u) << (31 - i);
  return reversed;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned order) {
  const unsigned long long bytes = (unsigned long long)b << 32 | a;
  unsigned chosen = 0;
  for (int i = 0; i < 4; i++) chosen |= (unsigned)(bytes >> 8 * (order >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}

inline int __float_as_int(float v) { return host_bit_cast<int>(v); }
inline unsigned __float_as_uint(float v) { return host_bit_cast<unsigned>(v); }
inline float __int_as_float(int v) { return host_bit_cast<float>(v); }
inline float __uint_as_float(unsigned v) { return host_bit_cast<float>(v); }
inline long long __double_as_longlong(double v) { return host_bit_cast<long long>(v); }
inline double __longlong_as_double(long long v) { return host_bit_cast<double>(v); }

// Round to nearest on the CPU is what these ask for; the build contracts no multiply-add.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float v) { return std::sqrt(v); }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }
inline float __exp10f(float v) { return std::pow(10.0f, v); }
inline float __logf(float v) { return std::log(v); }
inline float __log2f(float v) { return std::log2(v); }
inline float __powf(float a, float b) { return std::pow(a, b); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __saturatef(float v) { return v < 0.0f ? 0.0f : v > 1.0f ? 1.0f : v; }
inline int __float2int_rn(float v) { return (int)std::nearbyint(v); }
inline long long __float2ll_rn(float v) { return (long long)std::nearbyint(v); }
inline int __float2int_rz(float v) { return (int)v; }
inline int __float2int_rd(float v) { return (int)std::floor(v); }
inline float __int2float_rn(int v) { return (float)v; }
inline float __uint2float_rn(unsigned v) { return (float)v; }

// NOTE: for floats CUDA's min and max are fminf and fmaxf: a NaN operand gives the other one.
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin((T)a, (T)b);
  else return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax((T)a, (T)b);
  else return (T)a < (T)b ? (T)b : (T)a;
}
