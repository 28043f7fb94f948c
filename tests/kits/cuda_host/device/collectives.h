// Block barriers and warp collectives: each hands its .cu line to the runtime, which switches threads.
#pragma once

#define __syncthreads() ((void)host_barrier(HOST_SYNC, 0, __FILE__, __LINE__))
#define __syncthreads_count(p) host_barrier(HOST_SYNC_COUNT, !!(p), __FILE__, __LINE__)
#define __syncthreads_and(p) host_barrier(HOST_SYNC_AND, !!(p), __FILE__, __LINE__)
#define __syncthreads_or(p) host_barrier(HOST_SYNC_OR, !!(p), __FILE__, __LINE__)

template <class T>
inline uint64_t host_bits(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
inline T host_from_bits(uint64_t bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline void host_syncwarp(const char* file, int line, unsigned mask = 0xffffffffu) {
  host_collective(HOST_SYNCWARP, mask, 0, 0, 32, file, line);
}
template <class T>
inline T host_shuffle(HostCollective kind, const char* file, int line, unsigned mask, T value, int operand,
                      int width = 32) {
  return host_from_bits<T>(host_collective(kind, mask, host_bits(value), operand, width, file, line));
}
#define __syncwarp(...) host_syncwarp(__FILE__, __LINE__, ##__VA_ARGS__)
#define __shfl_sync(...) host_shuffle(HOST_SHFL, __FILE__, __LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) host_shuffle(HOST_SHFL_UP, __FILE__, __LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) host_shuffle(HOST_SHFL_DOWN, __FILE__, __LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) host_shuffle(HOST_SHFL_XOR, __FILE__, __LINE__, __VA_ARGS__)

inline uint64_t host_vote(HostCollective kind, unsigned mask, uint64_t value, const char* file, int line) {
  return host_collective(kind, mask, value, 0, 32, file, line);
}
#define __ballot_sync(mask, p) ((unsigned)host_vote(HOST_BALLOT, mask, !!(p), __FILE__, __LINE__))
#define __any_sync(mask, p) ((int)host_vote(HOST_ANY, mask, !!(p), __FILE__, __LINE__))
#define __all_sync(mask, p) ((int)host_vote(HOST_ALL, mask, !!(p), __FILE__, __LINE__))
#define __match_any_sync(mask, v) ((unsigned)host_vote(HOST_MATCH_ANY, mask, host_bits(v), __FILE__, __LINE__))
#define __activemask() host_active_mask()

template <class T>
inline T host_reduce(HostCollective unsigned_kind, HostCollective signed_kind, unsigned mask, T value,
                     const char* file, int line) {
  static_assert(sizeof(T) == 4 && std::is_integral_v<T>, "__reduce_*_sync takes int or unsigned");
  const HostCollective kind = std::is_signed_v<T> ? signed_kind : unsigned_kind;
  return (T)host_collective(kind, mask, (uint32_t)value, 0, 32, file, line);
}
#define __reduce_add_sync(mask, v) host_reduce(HOST_ADD, HOST_ADD, mask, v, __FILE__, __LINE__)
#define __reduce_max_sync(mask, v) host_reduce(HOST_MAX_UNSIGNED, HOST_MAX_SIGNED, mask, v, __FILE__, __LINE__)
#define __reduce_min_sync(mask, v) host_reduce(HOST_MIN_UNSIGNED, HOST_MIN_SIGNED, mask, v, __FILE__, __LINE__)
#define __reduce_and_sync(mask, v) host_reduce(HOST_AND, HOST_AND, mask, v, __FILE__, __LINE__)
#define __reduce_or_sync(mask, v) host_reduce(HOST_OR, HOST_OR, mask, v, __FILE__, __LINE__)
#define __reduce_xor_sync(mask, v) host_reduce(HOST_XOR, HOST_XOR, mask, v, __FILE__, __LINE__)
