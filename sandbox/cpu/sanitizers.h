// Functions of the sanitizers that the runtime calls. Included by runtime.cpp.
#pragma once

#if defined(SANDBOX_TSAN)
extern "C" void* __tsan_get_current_fiber(void);
extern "C" void* __tsan_create_fiber(unsigned flags);
extern "C" void __tsan_destroy_fiber(void* fiber);
extern "C" void __tsan_switch_to_fiber(void* fiber, unsigned flags);
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
extern "C" void __tsan_read_range(void* address, unsigned long size);
extern "C" void __tsan_write_range(void* address, unsigned long size);
extern "C" void __tsan_func_entry(void* called_from);
extern "C" void __tsan_func_exit(void);
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
#elif defined(SANDBOX_ASAN)
extern "C" void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* size);
extern "C" void __asan_poison_memory_region(const volatile void* address, size_t size);
extern "C" void __asan_unpoison_memory_region(const volatile void* address, size_t size);
extern "C" void* __asan_region_is_poisoned(void* address, size_t size);
extern "C" void __asan_loadN(const void* address, size_t size);
extern "C" void __asan_storeN(void* address, size_t size);
extern "C" void* __asan_get_report_address(void);
extern "C" const char* __asan_get_report_description(void);
extern "C" void sandbox_print_place(const char* at);  // of main.cpp
#endif
#if defined(SANDBOX_SHADOW)
#include <dlfcn.h>
#include <execinfo.h>
#endif
