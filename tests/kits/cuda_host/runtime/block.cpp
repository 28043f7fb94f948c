// One block: picks the next thread and releases barriers.
//
// A warp runs until all its lanes wait at the block's barrier or have returned, then the next one does: warps drift as
// far apart as CUDA allows. With a seed, order and drift are random.
#include <algorithm>
#include <numeric>

#include "runtime.h"

extern "C" host::Index3 blockDim;

namespace host {
namespace {

constexpr unsigned long long MAX_YIELDS = 1'000'000;
constexpr unsigned SPINS_PER_YIELD = 4096;
bool spun;  // the thread that ran last merely spun

void create_threads() {
  grid.threads.assign((size_t)blockDim.x * blockDim.y * blockDim.z, Thread{});
  unsigned number = 0;
  for (unsigned z = 0; z < blockDim.z; z++)
    for (unsigned y = 0; y < blockDim.y; y++)
      for (unsigned x = 0; x < blockDim.x; x++) {
        Thread& thread = grid.threads[number];
        thread.index = {x, y, z};
        thread.number = number++;
      }
}

struct Turns {  // the order in which warps, and lanes in them, take turns
  std::vector<unsigned> warps, lanes;

  explicit Turns(size_t num_warps) : warps(num_warps), lanes(32) {
    std::iota(warps.begin(), warps.end(), 0u);
    std::iota(lanes.begin(), lanes.end(), 0u);
    if (grid.order() == Order::reverse) {
      std::reverse(warps.begin(), warps.end());
      std::reverse(lanes.begin(), lanes.end());
    }
  }
  void next() {
    if (grid.order() != Order::seed) return;
    std::shuffle(warps.begin(), warps.end(), grid.random);
    std::shuffle(lanes.begin(), lanes.end(), grid.random);
  }
};

// Runs each ready lane of the warp once: `ran` if there was one, `progressed` if it did more than spin.
struct Turn {
  bool ran = false, progressed = false;
};
Turn run_warp(unsigned warp, const std::vector<unsigned>& lanes) {
  Turn turn;
  for (unsigned lane : lanes) {
    const size_t number = warp * 32 + lane;
    if (number >= grid.threads.size() || grid.threads[number].state != State::ready) continue;
    spun = false;
    resume(grid.threads[number]);
    turn.ran = true;
    turn.progressed |= !spun;
    if (grid.failed) break;
  }
  return turn;
}

bool run_ready_threads(const Turns& turns) {
  bool any = false;
  for (unsigned warp : turns.warps)
    for (bool again = true; again && !grid.failed;) {
      const Turn turn = run_warp(warp, turns.lanes);
      any |= turn.ran;
      again = turn.progressed && !(grid.order() == Order::seed && grid.random() % 2);
    }
  return any;
}

// A lane that returned may have been the last one that a collective waited for.
bool complete_collectives() {
  bool any = false;
  for (Thread& thread : grid.threads)
    if (thread.state == State::in_collective) any |= complete_collective(thread);
  return any;
}

void release_barrier() {
  Thread* first = nullptr;
  int count = 0;
  bool all = true;
  for (Thread& thread : grid.threads) {
    if (thread.state == State::in_collective)
      return fail(Error::divergence, "%s never completes, a lane of mask %08x does not reach it: %s waits at %s:%d",
                  collective_name(thread.collective), thread.mask, name(thread).c_str(), thread.file, thread.line);
    if (thread.state != State::at_barrier) continue;
    if (!first) first = &thread;
    if (thread.line != first->line || thread.barrier != first->barrier)
      return fail(Error::divergence, "divergent barrier: %s waits at %s:%d, %s at %s:%d", name(*first).c_str(),
                  first->file, first->line, name(thread).c_str(), thread.file, thread.line);
    count += thread.value != 0;
    all &= thread.value != 0;
  }
  for (Thread& thread : grid.threads) {
    if (thread.state != State::at_barrier) continue;
    thread.value = thread.barrier == HOST_SYNC_COUNT ? count : thread.barrier == HOST_SYNC_AND ? all : count != 0;
    thread.state = State::ready;
  }
  grid.barriers++;
}

bool all_done() {
  return std::all_of(grid.threads.begin(), grid.threads.end(), [](const Thread& t) { return t.state == State::done; });
}

}  // namespace

void count_spin(int access) {
  if (access & HOST_ATOMIC && ++grid.current->spins % SPINS_PER_YIELD == 0) host_spin();
}

void run_block() {
  create_threads();
  grid.barriers = 0;
  fill_shared_memory();
  start_checking_block();
  Turns turns((grid.threads.size() + 31) / 32);
  while (!grid.failed) {
    turns.next();
    if (run_ready_threads(turns) || complete_collectives()) continue;
    if (grid.failed || all_done()) return;
    release_barrier();
  }
}

}  // namespace host

using namespace host;

extern "C" int host_barrier(HostBarrier kind, int predicate, const char* file, int line) {
  Thread& thread = *grid.current;
  thread.barrier = kind;
  thread.value = (uint64_t)predicate;
  thread.file = file;
  thread.line = line;
  thread.state = State::at_barrier;
  suspend();
  return (int)thread.value;
}

extern "C" void host_spin() {
  if (++grid.yields > MAX_YIELDS)
    die(Error::livelock, "livelock: over %llu yields while spinning: %s; blocks run one after another here", MAX_YIELDS,
        name(*grid.current).c_str());
  spun = true;
  suspend();
}
