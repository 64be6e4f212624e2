// cp.async. Included by runtime.cpp.
#pragma once

extern "C" void sandbox_cp_async(void* to, const void* from, unsigned bytes, unsigned valid) {
    Fiber& fiber = self();
#if defined(SANDBOX_ASAN)  // bad addresses are reported now, with this call's stack
    if (valid) __asan_loadN(from, valid);
    const char* bad = static_cast<char*>(__asan_region_is_poisoned(to, bytes));
    unsigned thread;
    if (bad && !pending_copy(bad, &thread)) __asan_storeN(to, bytes);
#endif
    if (fiber.copy_count == fiber.copy_room) {
        fiber.copy_room = fiber.copy_room ? 2 * fiber.copy_room : 16;
        fiber.copies = static_cast<Copy*>(realloc(fiber.copies, fiber.copy_room * sizeof(Copy)));
    }
    fiber.copies[fiber.copy_count++] = {static_cast<char*>(to), static_cast<const char*>(from), bytes, valid,
                                        fiber.copy_group,       __builtin_return_address(0)};
    poison_destination(fiber.copies[fiber.copy_count - 1]);
}

extern "C" void sandbox_cp_async_commit() { ++self().copy_group; }

extern "C" void sandbox_cp_async_wait(unsigned pending) {
    Fiber& fiber = self();
    unsigned done = 0;
    while (done < fiber.copy_count && fiber.copies[done].group + pending < fiber.copy_group) {
        const Copy& copy = fiber.copies[done++];
        unpoison_destination(copy);
        current->smem.mark(copy.to, copy.bytes, true);
#if defined(SANDBOX_TSAN)
        __tsan_func_entry(copy.issued);
#endif
        memcpy(copy.to, copy.from, copy.valid);
        memset(copy.to + copy.valid, 0, copy.bytes - copy.valid);
        if (current->hopper.proxies.used) sandbox_generic_write(copy.to, copy.bytes);
#if defined(SANDBOX_TSAN)
        __tsan_func_exit();
#endif
    }
    fiber.copy_count -= done;
    memmove(fiber.copies, fiber.copies + done, fiber.copy_count * sizeof(Copy));
}
