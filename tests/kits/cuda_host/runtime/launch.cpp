// One grid: limits, the blocks in order, errors, and the interface that module.py calls through ctypes.
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "runtime.h"

#define API extern "C" __attribute__((visibility("default")))

extern "C" host::Index3 blockIdx, blockDim, gridDim;

namespace host {

Grid grid;
std::vector<Region> regions;

namespace {

std::vector<Region> variables;  // of the module
std::vector<Region> buffers;    // of the next launch
constexpr unsigned char POISON = 0xA5;  // shared memory at the start of a block
Error error;
std::string message;

uintptr_t module_base() {
  Dl_info info;
  return dladdr((const void*)&module_base, &info) ? (uintptr_t)info.dli_fbase : 0;
}

Index3 block_index(unsigned number) {
  return {number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y};
}

// NOTE: inside a fiber an exception or a large frame would be fatal; messages are short.
void record(Error kind, const char* format, va_list args) {
  if (grid.failed) return;
  char text[1500];
  vsnprintf(text, sizeof text, format, args);
  grid.failed = true;
  error = kind;
  message = text;
}

bool within_limits(const unsigned* g, const unsigned* b) {
  const unsigned long long threads = 1ull * b[0] * b[1] * b[2], blocks = 1ull * g[0] * g[1] * g[2];
  if (threads == 0 || threads > 1024 || b[2] > 64) fail(Error::launch, "invalid block (%u,%u,%u)", b[0], b[1], b[2]);
  else if (blocks == 0 || blocks > 0x7fffffff || g[1] > 65535 || g[2] > 65535)
    fail(Error::launch, "invalid grid (%u,%u,%u)", g[0], g[1], g[2]);
  return !grid.failed;
}

std::vector<unsigned> block_order() {
  std::vector<unsigned> order(gridDim.x * gridDim.y * gridDim.z);
  std::iota(order.begin(), order.end(), 0u);
  if (grid.order() == Order::reverse) std::reverse(order.begin(), order.end());
  if (grid.order() == Order::seed) std::shuffle(order.begin(), order.end(), grid.random);
  return order;
}

void run_grid() {
  FaultGuard guard;
  start_checking();
  for (unsigned number : block_order()) {
    grid.block_number = number;
    blockIdx = block_index(number);
    run_block();
    if (grid.failed) break;
  }
  abandon_fibers();
  grid.current = nullptr;
  stop_checking();
}

}  // namespace

void fail(Error kind, const char* format, ...) {
  va_list args;
  va_start(args, format);
  record(kind, format, args);
  va_end(args);
}

void die(Error kind, const char* format, ...) {
  va_list args;
  va_start(args, format);
  record(kind, format, args);
  va_end(args);
  suspend();
  abort();  // after a failure no thread is resumed
}

std::string name(const Thread& thread, unsigned block_number) {
  char text[120];
  const Index3 t = thread.index, b = block_index(block_number);
  snprintf(text, sizeof text, "thread (%u,%u,%u) of block (%u,%u,%u)", t.x, t.y, t.z, b.x, b.y, b.z);
  return text;
}

std::string place(uintptr_t offset) {
  char text[40];
  snprintf(text, sizeof text, "{pc:%zx}", (size_t)offset);
  return text;
}

uintptr_t module_offset(const void* return_address) {
  static const uintptr_t base = module_base();
  return (uintptr_t)return_address - 1 - base;
}

void fill_shared_memory() {
  for (const Region& region : regions)
    if (region.shared) memset(region.begin, POISON, region.size);
}

}  // namespace host

using namespace host;

extern "C" void* host_dynamic_shared() { return grid.dynamic_shared; }

extern "C" void host_trap(const char* what, const char* file, int line) {
  die(Error::trap, "%s: %s at %s:%d", what, name(*grid.current).c_str(), file, line);
}

// A variable of the module, by its offset in the file.
API void host_add_variable(size_t offset, size_t size, int shared, const char* name) {
  if (size) variables.push_back({(char*)(module_base() + offset), size, shared != 0, false, name});
}

API void host_clear_buffers() { buffers.clear(); }

API void host_add_buffer(void* begin, size_t size, int read_only, const char* name) {
  if (size) buffers.push_back({(char*)begin, size, false, read_only != 0, name});
}

API const char* host_error(int* kind) {
  *kind = (int)error;
  return message.c_str();
}

// 0, or -1 and host_error tells why.
API int host_launch(const HostKernel* kernel, void** args, const unsigned* grid_size, const unsigned* block_size,
                    size_t shared_bytes, const Options* options) {
  grid.kernel = kernel;
  grid.args = args;
  grid.options = *options;
  if (grid.order() == Order::seed) grid.random.seed((unsigned)options->seed);
  grid.yields = 0;
  grid.failed = false;
  if (!within_limits(grid_size, block_size)) return -1;
  gridDim = {grid_size[0], grid_size[1], grid_size[2]};
  blockDim = {block_size[0], block_size[1], block_size[2]};
  std::vector<uint64_t> shared((shared_bytes + 31) / 8);
  grid.dynamic_shared = (char*)(((uintptr_t)shared.data() + 15) & ~(uintptr_t)15);
  regions = variables;
  regions.insert(regions.end(), buffers.begin(), buffers.end());
  if (shared_bytes) regions.push_back({grid.dynamic_shared, shared_bytes, true, false, "dynamic shared memory"});
  run_grid();
  return grid.failed ? -1 : 0;
}
