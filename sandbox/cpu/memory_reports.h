// Memory errors: context of AddressSanitizer's reports; detection of unwritten memory (-DSANDBOX_SHADOW). Included by
// runtime.cpp.
#pragma once

#if defined(SANDBOX_ASAN)
namespace {
const Copy* pending_copy(const char* at, unsigned* thread) {
    for (*thread = 0; current && *thread < current->threads; ++*thread) {
        const Fiber& fiber = current->fibers[*thread];
        for (unsigned i = 0; i < fiber.copy_count; ++i) {
            if (fiber.copies[i].to <= at && at < fiber.copies[i].to + fiber.copies[i].bytes) return &fiber.copies[i];
        }
    }
    return nullptr;
}
}  // namespace

// AddressSanitizer calls this before it prints a report. Adds the CUDA thread and the distance to the nearest buffer.
extern "C" void __asan_on_error() {
    const char* const at = static_cast<char*>(__asan_get_report_address());
    unsigned thread;
    if (pending_copy(at, &thread)) {
        fprintf(stderr, "shared memory used while a cp.async to it by thread %u has not been waited for\n", thread);
        return;
    }
    if (!current) return;
    const char* const end = current->smem.dynamic + current->launch.smem_bytes;
    fprintf(stderr, "sandbox: ");
    if (end <= at && at < current->smem.dynamic + MAX_DYNAMIC_SMEM)
        fprintf(stderr, "%td bytes past the end of its %u bytes ", at - end, current->launch.smem_bytes);
    else if (!strcmp(__asan_get_report_description(), "heap-buffer-overflow"))  // a tensor, not an array of the kernel
        sandbox_print_place(at);
    const uint3 &t = self().thread_idx, &b = self().block_idx;
    fprintf(stderr, "in block (%u,%u,%u) thread (%u,%u,%u)\n", b.x, b.y, b.z, t.x, t.y, t.z);
}
#elif defined(SANDBOX_SHADOW)
namespace {
// The shared memory of the cluster that contains the address; this block's own if none does.
SharedMemory& owner_of(const char* at) {
    for (unsigned cta_rank = 0; cta_rank < current->launch.cluster; ++cta_rank) {
        SharedMemory* const smem = current->cluster[cta_rank].smem;
        if (smem && smem->contains(at)) return *smem;
    }
    return current->smem;
}
// Whether a local array's element is unwritten: it still contains the fill pattern of the stack.
bool unwritten_local(const char* at, size_t bytes) {
    const char* const stack = self().stack;
    if (current->launch.stack != REPORTED_NANS || bytes != 4) return false;
    if (at < stack || at >= stack + GUARD_BYTES + STACK_BYTES) return false;
    return !memcmp(at, &STACK_NAN, bytes);
}
void check_read(const char* at, size_t bytes, const void* where) {
    const bool local = unwritten_local(at, bytes);
    if (!local && owner_of(at).was_written(at, bytes)) return;
    void* calls[16];
    char stack[1024] = "";
    size_t used = 0;
    int depth = backtrace(calls, 16), i = 0;
    while (i < depth && calls[i] != where) ++i;
    for (; i < depth && used < sizeof stack; ++i) {
        Dl_info module{};
        if (!dladdr(calls[i], &module)) continue;
        used += snprintf(stack + used, sizeof stack - used, "\n    in %s+0x%zx", module.dli_fname,
                         static_cast<char*>(calls[i]) - static_cast<char*>(module.dli_fbase));
    }
    const uint3 &t = self().thread_idx, &b = self().block_idx;
    current->fail("%s read before anything was written there, in block (%u,%u,%u) thread (%u,%u,%u)%s",
                  local ? "a local array" : "shared memory", b.x, b.y, b.z, t.x, t.y, t.z, stack);
    pause(true);
}
void record_store(const char* at, size_t bytes) {
    owner_of(at).mark(at, bytes, true);
    if (current->hopper.proxies.used) sandbox_generic_write(at, static_cast<unsigned>(bytes));
}
}  // namespace

// -fsanitize=kernel-address calls these functions at each load and store.
#define SANDBOX_ACCESS(size)                                                                                           \
    extern "C" void __asan_load##size##_noabort(const char* at) { check_read(at, size, __builtin_return_address(0)); } \
    extern "C" void __asan_store##size##_noabort(const char* at) { record_store(at, size); }
SANDBOX_ACCESS(1)
SANDBOX_ACCESS(2)
SANDBOX_ACCESS(4)
SANDBOX_ACCESS(8)
SANDBOX_ACCESS(16)
extern "C" void __asan_loadN_noabort(const char* at, size_t bytes) {
    check_read(at, bytes, __builtin_return_address(0));
}
extern "C" void __asan_storeN_noabort(const char* at, size_t bytes) { record_store(at, bytes); }
extern "C" void __asan_handle_no_return() {}
#endif
