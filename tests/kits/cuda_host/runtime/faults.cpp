// A kernel of the fast build may crash (wild pointer, movaps on a misaligned address, integer division by zero).
// The handler lets the thread go on in `crashed`, on its own stack, which reports the fault and abandons the launch.
#include <pthread.h>
#include <signal.h>
#include <ucontext.h>

#include "runtime.h"

namespace host {
namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr size_t ALTERNATE_STACK = 64 << 10;  // bytes
struct sigaction before[4];
stack_t stack_before;
alignas(16) char alternate_stack[ALTERNATE_STACK];
pthread_t launching;
int fault_signal;
const void* fault_address;
const char* fault_pc;

[[noreturn]] void crashed() {
  const std::string at = place(module_offset(fault_pc + 1)), who = name(*grid.current);
  if (fault_signal == SIGFPE) die(Error::undefined, "integer division by zero by %s at %s", who.c_str(), at.c_str());
  die(Error::out_of_bounds, "crash (signal %d) on an access of %p, wild or misaligned, by %s at %s", fault_signal,
      fault_address, who.c_str(), at.c_str());
}

void on_signal(int signal, siginfo_t* info, void* context) {
  if (!grid.current || !pthread_equal(pthread_self(), launching)) {  // not the kernel's: let it fault again
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &before[i], nullptr);
    return;
  }
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  fault_signal = signal;
  fault_address = info->si_addr;
  fault_pc = (const char*)registers[REG_RIP];
  // The fiber is lost anyway: start at the top of its stack, which may have overflowed.
  registers[REG_RSP] = (greg_t)(grid.current->fiber->stack + STACK - 8);
  registers[REG_RIP] = (greg_t)crashed;
}

}  // namespace

FaultGuard::FaultGuard() {
  launching = pthread_self();
  stack_t stack = {};
  stack.ss_sp = alternate_stack;
  stack.ss_size = ALTERNATE_STACK;
  sigaltstack(&stack, &stack_before);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &action, &before[i]);
}

FaultGuard::~FaultGuard() {
  for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
}

}  // namespace host
