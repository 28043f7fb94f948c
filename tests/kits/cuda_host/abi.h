// The contract between a kernel compiled for the CPU (device/*.h) and the runtime it is linked with (runtime/*.cpp).
#pragma once
#include <cstddef>
#include <cstdint>

// Kinds: p pointer, i signed, u unsigned, f floating point, v void, s anything else.
struct HostParameter {
  unsigned size;  // bytes
  char kind;
  unsigned pointee_size;  // bytes; 0 unless kind is p and the pointee is no void
  char pointee_kind;
};

struct HostKernel {
  const char* name;
  void (*call)(void** args);
  unsigned num_parameters;
  const HostParameter* parameters;
};

enum HostBarrier { HOST_SYNC, HOST_SYNC_COUNT, HOST_SYNC_AND, HOST_SYNC_OR };

enum HostCollective {
  HOST_SYNCWARP,
  HOST_SHFL,
  HOST_SHFL_UP,
  HOST_SHFL_DOWN,
  HOST_SHFL_XOR,
  HOST_BALLOT,
  HOST_ANY,
  HOST_ALL,
  HOST_MATCH_ANY,
  HOST_ADD,
  HOST_MAX_UNSIGNED,
  HOST_MIN_UNSIGNED,
  HOST_MAX_SIGNED,
  HOST_MIN_SIGNED,
  HOST_AND,
  HOST_OR,
  HOST_XOR,
};

// What an access does; the checker's races and reads of uninitialised memory follow from it.
enum HostAccess { HOST_READS = 1, HOST_WRITES = 2, HOST_ATOMIC = 4 };

extern "C" {
int host_barrier(HostBarrier kind, int predicate, const char* file, int line);
uint64_t host_collective(HostCollective kind, unsigned mask, uint64_t value, int operand, int width,
                         const char* file, int line);
unsigned host_active_mask();
void* host_dynamic_shared();
// Accesses that g++ plants no hook at: of the caller, or of the one who returns to pc.
void host_access(const void* address, size_t size, int access);
void host_access_from(const void* address, size_t size, int access, const void* pc);
void host_spin();  // lets other threads run
bool host_is_global(const void* address);
[[noreturn]] void host_trap(const char* what, const char* file, int line);
}
