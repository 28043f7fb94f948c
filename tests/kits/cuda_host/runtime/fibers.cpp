// A fiber for each CUDA thread: its own stack, switched by saving the callee-saved registers (x86-64, System V).
#include <sys/mman.h>

#include <cstdlib>
#include <new>

#include "runtime.h"

extern "C" void host_switch(void** save, void* to);
asm(R"(
.text
.hidden host_switch
.globl host_switch
.type host_switch, @function
host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size host_switch, .-host_switch
)");

extern "C" {
host::Index3 threadIdx, blockIdx, blockDim, gridDim;
}

namespace host {
namespace {

constexpr size_t GUARD = 4096;  // bytes
std::vector<Fiber*> idle;
void* scheduler;  // its stack pointer while a thread runs

Fiber* take_fiber() {
  if (idle.empty()) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stack == MAP_FAILED) throw std::bad_alloc();
    mprotect(stack, GUARD, PROT_NONE);
    return new Fiber{nullptr, (char*)stack};
  }
  Fiber* fiber = idle.back();
  idle.pop_back();
  return fiber;
}

[[noreturn]] void thread_main() {
  grid.kernel->call(grid.args);
  grid.current->state = State::done;
  suspend();
  abort();  // a thread that is done is not resumed
}

void start(Thread& thread) {
  thread.fiber = take_fiber();
  void** top = (void**)(thread.fiber->stack + STACK) - 1;  // rsp % 16 == 8 on entry, as after a call
  *--top = (void*)thread_main;
  for (int saved = 0; saved < 6; saved++) *--top = nullptr;
  thread.fiber->stack_pointer = top;
}

void release(Thread& thread) {
  idle.push_back(thread.fiber);
  thread.fiber = nullptr;
}

}  // namespace

void resume(Thread& thread) {
  if (!thread.fiber) start(thread);
  grid.current = &thread;
  threadIdx = thread.index;
  host_switch(&scheduler, thread.fiber->stack_pointer);
  grid.current = nullptr;
  if (thread.state == State::done) release(thread);
}

void suspend() { host_switch(&grid.current->fiber->stack_pointer, scheduler); }

void abandon_fibers() {
  for (Thread& thread : grid.threads)
    if (thread.fiber) release(thread);
}

bool on_stack(const Fiber& fiber, const char* address) {
  return address >= fiber.stack && address < fiber.stack + STACK;
}

}  // namespace host
