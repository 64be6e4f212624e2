// Fills the stack frame of each function before it runs (-DSANDBOX_SHADOW). Included by runtime.cpp.
#pragma once

#if defined(SANDBOX_SHADOW)
constexpr uint64_t STACK_NAN =
    0xfff5fff5fff5fff5;                     // a NaN as fp64, fp32, fp16 and bf16, and no number that kernels use
constexpr size_t FILLED_BYTES = 32 * 1024;  // filled at the top of a stack when a block begins
#if defined(__x86_64__)
// -mfentry calls this function before another function sets up its frame. It fills 512 bytes below the stack pointer,
// which earlier calls have used. Every register may contain an argument. The words pushed here are in the new frame
// too, so they are filled at the end.
asm(R"(
    .text
    .globl __fentry__
    .type __fentry__, @function
__fentry__:
    pushq %rax
    pushq %rcx
    pushq %rdi
    movq sandbox_stack_fill(%rip), %rax
    leaq -512(%rsp), %rdi
    movl $64, %ecx
    rep stosq
    popq %rdi
    popq %rcx
    movq %rax, -16(%rsp)
    movq %rax, -8(%rsp)
    popq %rax
    pushq sandbox_stack_fill(%rip)
    leaq 8(%rsp), %rsp
    ret
    .size __fentry__, . - __fentry__
)");
#endif
#endif
