// Atomics and fences. Fibers never run at the same time: a plain read-modify-write is atomic.
#pragma once

inline void __threadfence_block() { asm volatile("" ::: "memory"); }
inline void __threadfence() { asm volatile("" ::: "memory"); }
inline void __threadfence_system() { asm volatile("" ::: "memory"); }
inline void __nanosleep(unsigned) { host_spin(); }

#define HOST_ATOMIC_OPERATION(NAME, ACCESS, NEW)                                              \
  template <class T>                                                                          \
  HOST_UNSEEN T NAME(T* address, std::common_type_t<T> operand) {                             \
    host_access_from(address, sizeof(T), ACCESS, __builtin_return_address(0));                \
    const T old = *address;                                                                   \
    *address = (T)(NEW);                                                                      \
    return old;                                                                               \
  }
#define HOST_UPDATE (HOST_READS | HOST_WRITES | HOST_ATOMIC)
HOST_ATOMIC_OPERATION(atomicAdd, HOST_UPDATE, old + operand)
HOST_ATOMIC_OPERATION(atomicSub, HOST_UPDATE, old - operand)
HOST_ATOMIC_OPERATION(atomicExch, HOST_WRITES | HOST_ATOMIC, operand)
HOST_ATOMIC_OPERATION(atomicMin, HOST_UPDATE, operand < old ? operand : old)
HOST_ATOMIC_OPERATION(atomicMax, HOST_UPDATE, operand > old ? operand : old)
HOST_ATOMIC_OPERATION(atomicAnd, HOST_UPDATE, old & operand)
HOST_ATOMIC_OPERATION(atomicOr, HOST_UPDATE, old | operand)
HOST_ATOMIC_OPERATION(atomicXor, HOST_UPDATE, old ^ operand)
HOST_ATOMIC_OPERATION(atomicInc, HOST_UPDATE, old >= operand ? 0 : old + 1)
HOST_ATOMIC_OPERATION(atomicDec, HOST_UPDATE, old == 0 || old > operand ? operand : old - 1)
#undef HOST_ATOMIC_OPERATION

template <class T>
HOST_UNSEEN T atomicCAS(T* address, std::common_type_t<T> compare, std::common_type_t<T> value) {
  host_access_from(address, sizeof(T), HOST_UPDATE, __builtin_return_address(0));
  const T old = *address;
  if (old == compare) *address = value;
  return old;
}
#undef HOST_UPDATE
