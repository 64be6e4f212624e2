// Switching between stacks: saves the callee-saved registers on the old stack and restores them from the new stack.
// Assembly for x86-64 (System V ABI) and AArch64 (AAPCS64), about 10 ns per switch; ucontext elsewhere (or with
// -DSANDBOX_PORTABLE_FIBERS), about 200 ns.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cpu {

#if defined(__x86_64__) && !defined(SANDBOX_PORTABLE_FIBERS)

using Context = void*;  // a stack pointer, with the saved registers above it

extern "C" void sandbox_switch(Context* from, Context to);
asm(R"(
    .text
    .globl sandbox_switch
    .hidden sandbox_switch
    .type sandbox_switch, @function
sandbox_switch:
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
    .size sandbox_switch, .-sandbox_switch
)");

inline void prepare(Context* context, char* stack, size_t size, void (*entry)()) {
    // The ABI requires rsp = 8 mod 16 at function entry, as after a call. The word above the return address ends a
    // backtrace.
    uintptr_t* top = reinterpret_cast<uintptr_t*>(stack + size) - 1;
    *--top = reinterpret_cast<uintptr_t>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = 0;
    top[7] = 0;
    *context = top;
}

inline void switch_context(Context* from, Context* to) { sandbox_switch(from, *to); }

#elif defined(__aarch64__) && !defined(SANDBOX_PORTABLE_FIBERS)

using Context = void*;

extern "C" void sandbox_switch(Context* from, Context to);
asm(R"(
    .text
    .globl sandbox_switch
    .hidden sandbox_switch
    .type sandbox_switch, %function
sandbox_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size sandbox_switch, .-sandbox_switch
)");

inline void prepare(Context* context, char* stack, size_t size, void (*entry)()) {
    uintptr_t* saved = reinterpret_cast<uintptr_t*>(stack + size) - 20;
    for (int i = 0; i < 20; ++i) saved[i] = 0;
    saved[11] = reinterpret_cast<uintptr_t>(entry);  // x30: target of `ret`
    *context = saved;
}

inline void switch_context(Context* from, Context* to) { sandbox_switch(from, *to); }

#else

}  // namespace cpu
#include <ucontext.h>
namespace cpu {

using Context = ucontext_t;

inline void prepare(Context* context, char* stack, size_t size, void (*entry)()) {
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = size;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}

inline void switch_context(Context* from, Context* to) { swapcontext(from, to); }

#endif

}  // namespace cpu
