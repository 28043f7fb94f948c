// Stands in for checker.cpp in the fast build: nothing is judged.
#include "runtime.h"

namespace host {
void start_checking() {}
void start_checking_block() {}
void join_lanes(unsigned, unsigned) {}
void stop_checking() {}
}  // namespace host

extern "C" void host_access(const void*, size_t, int) {}
extern "C" void host_access_from(const void*, size_t, int access, const void*) { host::count_spin(access); }
extern "C" bool host_is_global(const void*) { return true; }
