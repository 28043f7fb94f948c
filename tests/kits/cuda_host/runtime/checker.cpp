// The check build. `g++ -fsanitize=thread` plants a call at each load and store, `-fsanitize=undefined` at wrong
// arithmetic; these functions answer them instead of libtsan and libubsan.
//
// Every byte of a region has a cell: the last writes to it and up to two reads. Accesses race by CUDA's rules: two of
// one byte, one a write, not both atomic (or volatile), with nothing between that orders them. What orders: the same
// thread; a barrier in a block; __syncwarp between its lanes. Blocks of a grid are never ordered, and shuffles order
// nothing.
#include <link.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <unordered_map>

#include "runtime.h"

extern "C" host::Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace host {
namespace {

struct Event {  // one access
  uint32_t block, barrier, clock;
  uint32_t pc;  // offset in the module
  uint16_t thread;
  bool atomic;
};

struct Cell {  // numbers of events, 0 for none
  uint32_t writer, plain_writer;  // the last one, and the last that was not atomic
  uint32_t reader, other_reader;

  bool operator==(const Cell& c) const {
    return writer == c.writer && plain_writer == c.plain_writer && reader == c.reader &&
           other_reader == c.other_reader;
  }
};

constexpr size_t PAGE = 4096;
using Page = std::array<Cell, PAGE>;

struct Clock {  // of a thread: the order within its warp
  uint32_t now = 1;        // counts its __syncwarps
  uint32_t seen[32] = {};  // seen[l] is the last clock of lane l that came before it
};

std::vector<Clock> clocks;     // of the threads of the running block
std::vector<Event> events;     // of this grid, from number 1
uint32_t first_of_block;       // events below are of earlier blocks
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;  // cells by address
uintptr_t last_page_number;
Page* last_page;
const Region* last_region;
const char *readonly_begin, *readonly_end;  // the module's code and constants

Cell& cell_at(const char* address) {
  const uintptr_t number = (uintptr_t)address / PAGE;
  if (!last_page || number != last_page_number) {
    std::unique_ptr<Page>& page = pages[number];
    if (!page) page = std::make_unique<Page>();
    last_page = page.get();
    last_page_number = number;
  }
  return (*last_page)[(uintptr_t)address % PAGE];
}

const Region* find(const char* address) {
  if (last_region && address >= last_region->begin && address < last_region->end()) return last_region;
  auto after = std::upper_bound(regions.begin(), regions.end(), address,
                                [](const char* a, const Region& region) { return a < region.begin; });
  if (after == regions.begin()) return nullptr;
  const Region& region = *(after - 1);
  return address < region.end() ? last_region = &region : nullptr;
}

const Region* nearest(const char* address) {
  const Region* best = nullptr;
  size_t least = SIZE_MAX;
  for (const Region& region : regions) {
    const size_t distance = address < region.begin   ? (size_t)(region.begin - address)
                            : address < region.end() ? 0
                                                     : (size_t)(address - region.end());
    if (distance < least) least = distance, best = &region;
  }
  return best;
}

struct Access {
  const char* address;
  size_t size;
  int kind;  // of HostAccess
  const void* pc;
  const Region* region;

  bool writes() const { return kind & HOST_WRITES; }
  const char* verb() const { return writes() ? "write" : "read"; }
  // "by thread .. at file:line"
  std::string author() const { return "by " + name(*grid.current) + " at " + place(module_offset(pc)); }
  // "argument 0 (kv) + 16"
  std::string target(const char* byte) const {
    return region->name + " + " + std::to_string(byte - region->begin);
  }
};

[[noreturn]] void out_of_bounds(const Access& access) {
  std::string where = "no buffer is known";
  if (const Region* region = nearest(access.address))
    where = region->name + " has " + std::to_string(region->size) + " bytes, this is offset " +
            std::to_string(access.address - region->begin);
  die(Error::out_of_bounds, "out-of-bounds %s of %zu bytes at %p %s; nearest: %s", access.verb(), access.size,
      (const void*)access.address, access.author().c_str(), where.c_str());
}

[[noreturn]] void race(const Access& access, const char* byte, const char* what, const Event& before) {
  const std::string other = name(grid.threads[before.thread], before.block);
  die(Error::race, "race (%s) on %s: %s, and %s at %s", what, access.target(byte).c_str(), access.author().c_str(),
      other.c_str(), place(before.pc).c_str());
}

bool ordered(const Event& before) {
  const Thread& now = *grid.current;
  if (before.block != grid.block_number) return false;
  if (before.thread == now.number || before.barrier < grid.barriers) return true;
  return before.thread / 32 == now.warp() && clocks[now.number].seen[before.thread % 32] >= before.clock;
}

bool same_warp(uint32_t number, const Event& now) {
  const Event& before = events[number];
  return before.block == now.block && before.thread / 32 == now.thread / 32;
}

// Reads that come before this one add nothing: what races with them races with it. Of more than two that are not
// ordered, two of different warps are enough, since no write can come after both without a barrier.
void record_read(Cell& cell, uint32_t number) {
  const Event& now = events[number];
  if (now.atomic && cell.reader && !events[cell.reader].atomic) return;  // the plain read races with more
  if (cell.other_reader && ordered(events[cell.other_reader])) cell.other_reader = 0;
  if (cell.reader && ordered(events[cell.reader])) cell.reader = cell.other_reader, cell.other_reader = 0;
  if (cell.reader && (!cell.other_reader || same_warp(cell.other_reader, now))) cell.other_reader = cell.reader;
  cell.reader = number;
}

// Judges an access of one byte; the cell after it.
Cell judged(Cell cell, const Access& access, const char* byte, uint32_t number) {
  if (access.region->shared) {  // new in every block
    for (uint32_t* event : {&cell.writer, &cell.plain_writer, &cell.reader, &cell.other_reader})
      if (*event < first_of_block) *event = 0;
    if (access.kind & HOST_READS && !cell.writer)
      die(Error::uninitialised, "read of uninitialised shared memory %s %s", access.target(byte).c_str(),
          access.author().c_str());
  }
  if (grid.options.check_races) {
    auto races = [&](uint32_t before) {
      return before && !(events[before].atomic && events[number].atomic) && !ordered(events[before]);
    };
    for (uint32_t writer : {cell.writer, cell.plain_writer})
      if (races(writer))
        race(access, byte, access.writes() ? "write after write" : "read after write", events[writer]);
    if (access.writes())
      for (uint32_t reader : {cell.reader, cell.other_reader})
        if (races(reader)) race(access, byte, "write after read", events[reader]);
  }
  if (!access.writes()) record_read(cell, number);
  else if (access.kind & HOST_ATOMIC) cell.writer = number;
  else cell = {number, number, 0, 0};
  return cell;
}

// Locals, threadIdx and the like, constants of the module.
bool is_private(const Access& access) {
  if (on_stack(*grid.current->fiber, access.address)) return true;
  if (access.writes()) return false;
  for (const Index3* index : {&threadIdx, &blockIdx, &blockDim, &gridDim})
    if ((size_t)(access.address - (const char*)index) < sizeof(Index3)) return true;
  return access.address >= readonly_begin && access.address + access.size <= readonly_end;
}

void check(Access access, bool aligned) {
  if (!grid.current || !access.size) return;
  access.region = find(access.address);
  if (!access.region && is_private(access)) return;
  if (!access.region || access.address + access.size > access.region->end()) out_of_bounds(access);
  if (access.writes() && access.region->read_only)
    die(Error::read_only, "write of %zu bytes to read-only %s %s", access.size, access.target(access.address).c_str(),
        access.author().c_str());
  if (aligned && (uintptr_t)access.address % access.size)
    die(Error::misaligned, "misaligned %s of %zu bytes at %s %s", access.verb(), access.size,
        access.target(access.address).c_str(), access.author().c_str());
  const Thread& thread = *grid.current;
  const uint32_t number = (uint32_t)events.size();
  events.push_back({grid.block_number, grid.barriers, clocks[thread.number].now, (uint32_t)module_offset(access.pc),
                    (uint16_t)thread.number, (access.kind & HOST_ATOMIC) != 0});
  Cell before = {~0u, ~0u, ~0u, ~0u}, after = before;  // neighbouring bytes mostly have equal cells
  for (const char* byte = access.address; byte < access.address + access.size; byte++) {
    Cell& cell = cell_at(byte);
    if (!(cell == before)) {
      before = cell;
      after = judged(cell, access, byte, number);
    }
    cell = after;
  }
  count_spin(access.kind);
}

int find_readonly(dl_phdr_info* module, size_t, void*) {
  const char *begin = (const char*)~0ull, *end = begin;
  bool mine = false;
  for (int i = 0; i < module->dlpi_phnum; i++) {
    const ElfW(Phdr)& segment = module->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    const char* first = (const char*)module->dlpi_addr + segment.p_vaddr;
    begin = std::min(begin, first);
    if (segment.p_flags & PF_W) end = std::min(end, first);
    mine |= (const char*)&regions >= first && (const char*)&regions < first + segment.p_memsz;
  }
  if (mine) readonly_begin = begin, readonly_end = end;
  return mine;
}

}  // namespace

void start_checking() {
  if (!readonly_begin) dl_iterate_phdr(find_readonly, nullptr);
  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.begin < b.begin; });
  events.assign(1, Event{});
  last_region = nullptr;
}

void start_checking_block() {
  first_of_block = (uint32_t)events.size();
  clocks.assign(grid.threads.size(), Clock{});
}

void join_lanes(unsigned warp, unsigned lanes) {
  Clock* const first = &clocks[warp * 32];
  uint32_t joined[32] = {};
  for (int lane = 0; lane < 32; lane++) {
    if (!(lanes >> lane & 1)) continue;
    first[lane].seen[lane] = first[lane].now;
    for (int other = 0; other < 32; other++) joined[other] = std::max(joined[other], first[lane].seen[other]);
  }
  for (int lane = 0; lane < 32; lane++) {
    if (!(lanes >> lane & 1)) continue;
    std::copy(joined, joined + 32, first[lane].seen);
    first[lane].now++;
  }
}

void stop_checking() {
  events.clear();
  pages.clear();
  last_page = nullptr;
}

}  // namespace host

using namespace host;

#define API extern "C" __attribute__((visibility("default")))
#define PC __builtin_return_address(0)

extern "C" void host_access(const void* address, size_t size, int access) {
  check({(const char*)address, size, access, PC, nullptr}, false);
}
extern "C" void host_access_from(const void* address, size_t size, int access, const void* pc) {
  check({(const char*)address, size, access, pc, nullptr}, true);
}
extern "C" bool host_is_global(const void* address) {
  const Region* region = find((const char*)address);
  return region && !region->shared;
}

// NOTE: the unaligned hooks are of accesses that g++ knows to be so (memcpy of a few bytes): CUDA does those bytewise.
#define HOOK(NAME, SIZE, ACCESS, ALIGNED) \
  API void __tsan_##NAME##SIZE(void* p) { check({(char*)p, SIZE, ACCESS, PC, nullptr}, ALIGNED); }
#define HOOKS(SIZE)                                            \
  HOOK(read, SIZE, HOST_READS, true)                           \
  HOOK(write, SIZE, HOST_WRITES, true)                         \
  HOOK(unaligned_read, SIZE, HOST_READS, false)                \
  HOOK(unaligned_write, SIZE, HOST_WRITES, false)              \
  HOOK(volatile_read, SIZE, HOST_READS | HOST_ATOMIC, true)    \
  HOOK(volatile_write, SIZE, HOST_WRITES | HOST_ATOMIC, true)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
API void __tsan_read_range(void* p, size_t size) { check({(char*)p, size, HOST_READS, PC, nullptr}, false); }
API void __tsan_write_range(void* p, size_t size) { check({(char*)p, size, HOST_WRITES, PC, nullptr}, false); }
API void __tsan_init() {}
API void __tsan_func_entry(void*) {}
API void __tsan_func_exit() {}

// The data that g++ hands to each handler starts with the place in the source.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeMismatch {
  SourceLocation location;
  const void* type;
  unsigned char log_alignment, kind;
};

[[noreturn]] static void undefined(Error error, const char* what, const SourceLocation& at) {
  die(error, "%s by %s at %s:%u", what, name(*grid.current).c_str(), at.file, at.line);
}
#define UNDEFINED(NAME, ERROR, WHAT) \
  API void __ubsan_handle_##NAME(const SourceLocation* at) { undefined(Error::ERROR, WHAT, *at); }
UNDEFINED(add_overflow, undefined, "signed integer overflow (+)")
UNDEFINED(sub_overflow, undefined, "signed integer overflow (-)")
UNDEFINED(mul_overflow, undefined, "signed integer overflow (*)")
UNDEFINED(negate_overflow, undefined, "signed integer overflow (negation)")
UNDEFINED(divrem_overflow, undefined, "integer division by zero or overflow (/)")
UNDEFINED(shift_out_of_bounds, undefined, "shift by a negative count or by the width or more")
UNDEFINED(out_of_bounds, out_of_bounds, "index out of the bounds of its array")
API void __ubsan_handle_type_mismatch_v1(const TypeMismatch* mismatch, const void* address) {
  die(Error::misaligned, "misaligned access of %p, which must be a multiple of %u, by %s at %s:%u", address,
      1u << mismatch->log_alignment, name(*grid.current).c_str(), mismatch->location.file, mismatch->location.line);
}
