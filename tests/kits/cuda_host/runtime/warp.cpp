// Collectives of a warp: complete once every living lane that the mask names waits in the same one.
#include "runtime.h"

namespace host {
namespace {

// What a lane reads from one that has returned, is outside the mask or beyond the block: CUDA leaves it undefined.
constexpr uint64_t UNDEFINED = 0xDEADBEEFDEADBEEFull;

constexpr const char* NAMES[] = {
    "__syncwarp",         "__shfl_sync",       "__shfl_up_sync",    "__shfl_down_sync",  "__shfl_xor_sync",
    "__ballot_sync",      "__any_sync",        "__all_sync",        "__match_any_sync",  "__reduce_add_sync",
    "__reduce_max_sync",  "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_and_sync",
    "__reduce_or_sync",   "__reduce_xor_sync",
};

struct Lanes {
  Thread* first;   // lane 0
  unsigned count;  // 32, or fewer in the last warp of a block
  unsigned live;   // bit per lane that takes part

  bool takes_part(int lane) const { return lane >= 0 && lane < 32 && live >> lane & 1; }
};

template <class Visit>
void each(const Lanes& lanes, Visit visit) {
  for (unsigned lane = 0; lane < lanes.count; lane++)
    if (lanes.takes_part((int)lane)) visit(lanes.first[lane], lane);
}

int source_lane(const Thread& thread, int lane) {
  const int width = thread.width, first = lane & ~(width - 1), operand = thread.operand;
  switch (thread.collective) {
    case HOST_SHFL: return first + (operand & (width - 1));
    case HOST_SHFL_UP: return lane - operand < first ? lane : lane - operand;
    case HOST_SHFL_DOWN: return lane + operand >= first + width ? lane : lane + operand;
    default: return (lane ^ operand) >= first + width ? lane : lane ^ operand;
  }
}

void shuffle(const Lanes& lanes) {
  uint64_t values[32];
  each(lanes, [&](Thread& thread, unsigned lane) { values[lane] = thread.value; });
  each(lanes, [&](Thread& thread, unsigned lane) {
    const int source = source_lane(thread, (int)lane);
    thread.value = lanes.takes_part(source) ? values[source] : UNDEFINED;
  });
}

void match(const Lanes& lanes) {
  uint64_t equal[32] = {};
  each(lanes, [&](Thread& thread, unsigned lane) {
    each(lanes, [&](Thread& other, unsigned bit) { equal[lane] |= (uint64_t)(other.value == thread.value) << bit; });
  });
  each(lanes, [&](Thread& thread, unsigned lane) { thread.value = equal[lane]; });
}

uint32_t combined(HostCollective collective, uint32_t a, uint32_t b) {
  switch (collective) {
    case HOST_ADD: return a + b;
    case HOST_MAX_UNSIGNED: return a > b ? a : b;
    case HOST_MIN_UNSIGNED: return a < b ? a : b;
    case HOST_MAX_SIGNED: return (int32_t)a > (int32_t)b ? a : b;
    case HOST_MIN_SIGNED: return (int32_t)a < (int32_t)b ? a : b;
    case HOST_AND: return a & b;
    case HOST_OR: return a | b;
    default: return a ^ b;
  }
}

void vote_or_reduce(const Lanes& lanes, HostCollective collective) {
  uint32_t ballot = 0, reduced = 0;
  bool first = true;
  each(lanes, [&](Thread& thread, unsigned lane) {
    const uint32_t value = (uint32_t)thread.value;
    if (value) ballot |= 1u << lane;
    reduced = first ? value : combined(collective, reduced, value);
    first = false;
  });
  const uint64_t result = collective == HOST_BALLOT ? ballot
                          : collective == HOST_ANY  ? ballot != 0
                          : collective == HOST_ALL  ? ballot == lanes.live
                                                    : reduced;
  each(lanes, [&](Thread& thread, unsigned) { thread.value = result; });
}

bool meet(const Thread& a, const Thread& b) {
  return a.collective == b.collective && a.mask == b.mask && a.line == b.line;
}

void fail_apart(const Thread& a, const Thread& b) {
  fail(Error::divergence,
       "divergent warp collective: %s waits in %s, mask %08x, at %s:%d, %s in %s, mask %08x, at %s:%d",
       name(a).c_str(), NAMES[a.collective], a.mask, a.file, a.line, name(b).c_str(), NAMES[b.collective], b.mask,
       b.file, b.line);
}

}  // namespace

const char* collective_name(HostCollective collective) { return NAMES[collective]; }

bool complete_collective(Thread& last) {
  const unsigned first = last.warp() * 32;
  const unsigned count = std::min<unsigned>(32, (unsigned)grid.threads.size() - first);
  Lanes lanes = {&grid.threads[first], count, 0};
  const bool is_reverse = grid.order() == Order::reverse;
  for (unsigned i = 0; i < count; i++) {  // first the lanes that come last
    const unsigned lane = is_reverse ? i : count - 1 - i;
    const Thread& thread = lanes.first[lane];
    if (!(last.mask >> lane & 1) || thread.state == State::done) continue;
    if (thread.state != State::in_collective) return false;
    if (!meet(last, thread)) {
      fail_apart(last, thread);
      return false;
    }
    lanes.live |= 1u << lane;
  }
  const HostCollective collective = last.collective;
  if (collective == HOST_SYNCWARP) join_lanes(last.warp(), lanes.live);
  else if (collective <= HOST_SHFL_XOR) shuffle(lanes);
  else if (collective == HOST_MATCH_ANY) match(lanes);
  else vote_or_reduce(lanes, collective);
  each(lanes, [](Thread& thread, unsigned) { thread.state = State::ready; });
  return true;
}

}  // namespace host

using namespace host;

extern "C" uint64_t host_collective(HostCollective kind, unsigned mask, uint64_t value, int operand, int width,
                                    const char* file, int line) {
  Thread& thread = *grid.current;
  if (!(mask >> thread.lane() & 1))
    die(Error::divergence, "%s: mask %08x does not name the calling lane: %s at %s:%d", NAMES[kind], mask,
        name(thread).c_str(), file, line);
  if (width < 1 || width > 32 || width & (width - 1))
    die(Error::undefined, "%s: width %d is no power of two up to 32: %s at %s:%d", NAMES[kind], width,
        name(thread).c_str(), file, line);
  thread.collective = kind;
  thread.mask = mask;
  thread.value = value;
  thread.operand = operand;
  thread.width = width;
  thread.file = file;
  thread.line = line;
  thread.state = State::in_collective;
  // In forward order the last lane to come goes on without a switch.
  if (!complete_collective(thread) || grid.order() != Order::forward) suspend();
  return thread.value;
}

// Lanes run one at a time: all that have not returned count as active.
extern "C" unsigned host_active_mask() {
  const unsigned first = grid.current->warp() * 32;
  unsigned mask = 0;
  for (unsigned i = first; i < grid.threads.size() && i < first + 32; i++)
    if (grid.threads[i].state != State::done) mask |= 1u << (i - first);
  return mask;
}
