// A program that executes one launch, described by a file, under a sanitizer. Every buffer is allocated with its exact
// size, so an access one element past its end is out of bounds. Linked with the runtime; loads the kernel library.
//
// The file, all numbers int64: grid[3], block[3], cluster, smem_bytes, workers, order, stack, buffer count, argument
// count; for each argument: size, bytes; for each buffer: index of the argument that contains its pointer, offset of
// the pointer in the argument, size, bytes. After the launch the program overwrites the file with the contents of the
// buffers.
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "runtime.h"

namespace {

void read(void* to, size_t bytes, FILE* file) {
    if (bytes && fread(to, bytes, 1, file) != 1) {
        fprintf(stderr, "the launch file is truncated\n");
        exit(2);
    }
}

int64_t read_number(FILE* file) {
    int64_t number;
    read(&number, sizeof number, file);
    return number;
}

char** buffer;
int64_t *size_of, buffers;

dim3 read_dim3(FILE* file) {
    const unsigned x = read_number(file), y = read_number(file), z = read_number(file);
    return {x, y, z};
}

void* function_of(void* kernel, const char* prefix, const char* entry) {
    char name[512];
    snprintf(name, sizeof name, "%s%s", prefix, entry);
    void* const found = dlsym(kernel, name);
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    return found;
}

}  // namespace

// Prints the index of the buffer nearest to the address, and the distance.
extern "C" void sandbox_print_place(const char* at) {
    int64_t nearest = -1, least = 0;
    bool behind = false;
    for (int64_t i = 0; i < buffers; ++i) {
        const bool past = at >= buffer[i];
        const int64_t distance = past ? at - (buffer[i] + size_of[i]) : buffer[i] - at;
        if (buffer[i] && distance >= 0 && (nearest < 0 || distance < least))
            nearest = i, least = distance, behind = past;
    }
    if (nearest < 0) return;
    fprintf(stderr, "%lld bytes %s buffer %lld ", static_cast<long long>(least), behind ? "past the end of" : "before",
            static_cast<long long>(nearest));
}

int main(int argc, char** argv) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // an endless kernel ends with the parent process
    FILE* file = argc == 4 ? fopen(argv[3], "rb") : nullptr;
    void* kernel = file ? dlopen(argv[1], RTLD_NOW) : nullptr;
    if (!kernel) {
        fprintf(stderr, "usage: %s KERNEL_LIBRARY ENTRY LAUNCH_FILE\n%s\n", argv[0], file ? dlerror() : "");
        return 2;
    }
    static char error[4096];
    cpu::Launch launch{};
    launch.entry = reinterpret_cast<void (*)(void**)>(function_of(kernel, "sandbox_entry_", argv[2]));
    launch.dynamic_smem = reinterpret_cast<char* (*)()>(dlsym(kernel, "sandbox_dynamic_smem_address"));
    launch.grid = read_dim3(file);
    launch.block = read_dim3(file);
    const unsigned threads = launch.block.x * launch.block.y * launch.block.z;
    const unsigned most = reinterpret_cast<unsigned (*)()>(function_of(kernel, "sandbox_max_threads_", argv[2]))();
    if (most && threads > most) {  // same message as sandbox/launch/parameters.py
        fprintf(stderr,
                "%s: a block of %u threads exceeds its __launch_bounds__(%u), and a GPU rejects such a launch\n",
                argv[2], threads, most);
        return 3;
    }
    launch.cluster = read_number(file);
    launch.smem_bytes = read_number(file);
    launch.workers = read_number(file);
    launch.order = read_number(file);
    launch.stack = read_number(file);
    launch.error = error;
    launch.error_size = sizeof error;
    buffers = read_number(file);
    const int64_t arguments = read_number(file);
    launch.args = static_cast<void**>(calloc(arguments, sizeof(void*)));
    for (int64_t i = 0; i < arguments; ++i) {
        const int64_t size = read_number(file);
        launch.args[i] = malloc(size);
        read(launch.args[i], size, file);
    }
    buffer = static_cast<char**>(calloc(buffers, sizeof(char*)));
    size_of = static_cast<int64_t*>(calloc(buffers, sizeof(int64_t)));
    for (int64_t i = 0; i < buffers; ++i) {
        const int64_t argument = read_number(file), offset = read_number(file);
        size_of[i] = read_number(file);
        buffer[i] = static_cast<char*>(malloc(size_of[i]));
        read(buffer[i], size_of[i], file);
        memcpy(static_cast<char*>(launch.args[argument]) + offset, &buffer[i], sizeof(char*));
    }
    fclose(file);
    if (cpu::sandbox_launch(&launch)) {
        fprintf(stderr, "%s\n", error);
        return 3;
    }
    file = fopen(argv[3], "wb");
    for (int64_t i = 0; i < buffers; ++i) fwrite(buffer[i], 1, size_of[i], file);
    return fclose(file) ? 2 : 0;
}
