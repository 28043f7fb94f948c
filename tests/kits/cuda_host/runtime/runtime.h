// What the parts of the runtime share: the running grid, its threads, and how it fails.
//
//   launch.cpp    one grid: limits, order of the blocks, errors, the interface that Python calls
//   block.cpp     one block: which thread runs next, barriers
//   warp.cpp      collectives of a warp
//   fibers.cpp    a stack for each thread, switching between them
//   faults.cpp    signals (a wild access of the fast build) become errors
//   checker.cpp   the check build: every load and store is judged; unchecked.cpp stands in for it in the fast build
//
// One operating-system thread runs everything; nothing here is locked.
#pragma once
#include <random>
#include <string>
#include <vector>

#include "../abi.h"

namespace host {

struct Index3 {
  unsigned x, y, z;
};

// Numbers and order as in errors.py.
enum class Error {
  launch = 1,
  out_of_bounds,
  read_only,
  misaligned,
  race,
  uninitialised,
  divergence,
  livelock,
  undefined,
  trap,
};

enum class State { ready, at_barrier, in_collective, done };

constexpr size_t STACK = 256 << 10;  // bytes of each fiber
struct Fiber {
  void* stack_pointer;
  char* stack;  // lowest address; the first page is a guard
};

struct Thread {
  Index3 index;
  unsigned number;  // in the block, x fastest
  State state = State::ready;
  Fiber* fiber = nullptr;  // from the first run to the last
  unsigned spins = 0;

  // Where it waits, and with what.
  const char* file = nullptr;
  int line = 0;
  HostBarrier barrier = HOST_SYNC;
  HostCollective collective = HOST_SYNCWARP;
  unsigned mask = 0;
  uint64_t value = 0;  // in: its operand or predicate; out: its result
  int operand = 0;
  int width = 32;

  unsigned lane() const { return number % 32; }
  unsigned warp() const { return number / 32; }
};

enum class Order { forward, reverse, seed };

struct Options {  // mirrored in module.py
  int order;
  int seed;
  int check_races;
};

struct Grid {
  const HostKernel* kernel = nullptr;
  void** args = nullptr;
  Options options = {};
  std::mt19937 random;
  unsigned block_number = 0;  // x fastest
  uint32_t barriers = 0;      // passed by the running block
  unsigned long long yields = 0;
  bool failed = false;
  std::vector<Thread> threads;  // of the running block
  Thread* current = nullptr;    // null while the scheduler runs
  char* dynamic_shared = nullptr;

  Order order() const { return (Order)options.order; }
};
extern Grid grid;

// Records the first error only.
__attribute__((format(printf, 2, 3))) void fail(Error error, const char* format, ...);
// Fails and leaves the current thread for good.
__attribute__((format(printf, 2, 3))) [[noreturn]] void die(Error error, const char* format, ...);
// "thread (0,0,0) of block (1,0,0)", for messages.
std::string name(const Thread& thread, unsigned block_number = grid.block_number);
// "{pc:1f}", which Python replaces by file and line.
std::string place(uintptr_t module_offset);
uintptr_t module_offset(const void* return_address);

void run_block();
bool complete_collective(Thread& last);  // false: some lane is still missing
const char* collective_name(HostCollective collective);

void resume(Thread& thread);  // runs it until it waits or ends
void suspend();               // of the current thread: back to the scheduler
void abandon_fibers();        // after a failure
bool on_stack(const Fiber& fiber, const char* address);

class FaultGuard {  // while it lives, SIGSEGV and the like of this thread are errors of the kernel
 public:
  FaultGuard();
  ~FaultGuard();
};

// Memory that the kernel may touch.
struct Region {
  char* begin;
  size_t size;  // bytes
  bool shared;
  bool read_only;
  std::string name;

  const char* end() const { return begin + size; }
};
extern std::vector<Region> regions;  // of the running grid
void fill_shared_memory();
void count_spin(int access);  // a loop on atomics or volatiles lets others run now and then

// Empty in the fast build (unchecked.cpp).
void start_checking();  // a grid: the regions are complete
void start_checking_block();  // its threads are there
void join_lanes(unsigned warp, unsigned lanes);  // a bit for each: what they did comes before what they will do
void stop_checking();

}  // namespace host
