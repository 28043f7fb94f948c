// Loads and stores with a cache hint, assumptions and traps. Comes last: it redefines memcpy and assert.
#pragma once

#define HOST_LOAD(NAME)                                                                       \
  template <class T>                                                                          \
  inline __attribute__((always_inline)) T NAME(const T* address) {                            \
    return *address;                                                                          \
  }
#define HOST_STORE(NAME)                                                                      \
  template <class T>                                                                          \
  inline __attribute__((always_inline)) void NAME(T* address, std::common_type_t<T> value) {  \
    *address = value;                                                                         \
  }
HOST_LOAD(__ldg)
HOST_LOAD(__ldcs)
HOST_LOAD(__ldcg)
HOST_LOAD(__ldca)
HOST_LOAD(__ldlu)
HOST_LOAD(__ldcv)
HOST_STORE(__stcs)
HOST_STORE(__stcg)
HOST_STORE(__stwb)
HOST_STORE(__stwt)
#undef HOST_LOAD
#undef HOST_STORE

#define __trap() host_trap("__trap()", __FILE__, __LINE__)
#undef assert
#define assert(c) ((c) ? (void)0 : host_trap("assert failed: " #c, __FILE__, __LINE__))

#ifdef HOST_CHECK
// A wrong assumption is a silent miscompile on the GPU; here it is an error.
#define __builtin_assume(c) ((c) ? (void)0 : host_trap("__builtin_assume is false: " #c, __FILE__, __LINE__))
#define __isGlobal(address) host_is_global(address)
// g++ plants no hooks at memcpy and memset.
inline __attribute__((always_inline)) void* host_memcpy(void* to, const void* from, size_t size) {
  host_access(from, size, HOST_READS);
  host_access(to, size, HOST_WRITES);
  return __builtin_memcpy(to, from, size);
}
inline __attribute__((always_inline)) void* host_memset(void* to, int value, size_t size) {
  host_access(to, size, HOST_WRITES);
  return __builtin_memset(to, value, size);
}
#define memcpy host_memcpy
#define memset host_memset
#else
#define __builtin_assume(c) ((void)0)
#define __isGlobal(address) true
#endif
