// Launch of a grid: distributes blocks over OS threads. Included by runtime.cpp.
#pragma once

namespace {
struct Grid {
    const Launch& launch;
    uint64_t blocks;
    uint64_t workers, next = 0;  // the next block, taken atomically by the workers
    int failed = 0;
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    StoreOrder stores{};
    ClusterBlock* cluster_blocks = nullptr;  // all blocks, grouped by cluster
};

void* work(void* argument) {
    Grid& grid = *static_cast<Grid*>(argument);
    pthread_mutex_lock(&grid.lock);  // wait until the number of workers is known
    const uint64_t workers = grid.workers;
    pthread_mutex_unlock(&grid.lock);
    const dim3& extent = grid.launch.grid;
    Block block(grid.launch, grid.stores, grid.failed);
    uint64_t index = __atomic_fetch_add(&grid.next, 1, __ATOMIC_RELAXED);
    while (index < grid.blocks && !__atomic_load_n(&grid.failed, __ATOMIC_RELAXED)) {
        const uint64_t i = grid.launch.order ? grid.blocks - 1 - index : index;
        const dim3 at(i % extent.x, i / extent.x % extent.y, i / extent.x / extent.y);
        if (!block.run(at, grid.cluster_blocks + i / grid.launch.cluster * grid.launch.cluster)) {
            pthread_mutex_lock(&grid.lock);
            if (!grid.failed) snprintf(grid.launch.error, grid.launch.error_size, "%s", block.message);
            __atomic_store_n(&grid.failed, 1, __ATOMIC_RELAXED);
            pthread_mutex_unlock(&grid.lock);
        }
        // ThreadSanitizer: a fixed assignment. Blocks of one worker are ordered, so neighbouring blocks need different
        // workers.
        index = TSAN ? index + workers : __atomic_fetch_add(&grid.next, 1, __ATOMIC_RELAXED);
    }
    block.set_waits_for_blocks(true);  // it no longer delays stores of other blocks
    grid.stores.count(0, -1);
    acquire(&block.ended);  // orders the kernel's writes before the return of the launch
    return nullptr;
}
}  // namespace

extern "C" int sandbox_launch(const Launch* launch) {
    Grid grid{*launch, static_cast<uint64_t>(launch->grid.x) * launch->grid.y * launch->grid.z, 1};
    launch->error[0] = '\0';
    const uint64_t threads = static_cast<uint64_t>(launch->block.x) * launch->block.y * launch->block.z;
    // Blocks of a cluster are scheduled consecutively: with one worker per block of a cluster, all of them run and none
    // deadlocks.
    const uint64_t at_least = launch->workers < launch->cluster ? launch->cluster : launch->workers;
    uint64_t most = at_least < grid.blocks ? at_least : grid.blocks;
    if (most * threads > MAX_FIBERS) most = MAX_FIBERS / threads;
    grid.cluster_blocks = static_cast<ClusterBlock*>(calloc(grid.blocks, sizeof(ClusterBlock)));
    pthread_t* threads_of_workers = static_cast<pthread_t*>(calloc(most + 1, sizeof(pthread_t)));
    pthread_mutex_lock(&grid.lock);
    while (grid.workers < most && pthread_create(&threads_of_workers[grid.workers], nullptr, work, &grid) == 0)
        ++grid.workers;
    grid.stores.running = grid.stores.threads = grid.workers;
    if (grid.workers < launch->cluster) {
        snprintf(launch->error, launch->error_size, "no memory for the threads of a cluster of %u blocks",
                 launch->cluster);
        grid.failed = 1;
    }
    pthread_mutex_unlock(&grid.lock);
    work(&grid);
    for (uint64_t i = 1; i < grid.workers; ++i) pthread_join(threads_of_workers[i], nullptr);
    free(threads_of_workers);
    for (uint64_t i = 0; i < grid.blocks && !TSAN; ++i) free(grid.cluster_blocks[i].mail.items);
    free(grid.cluster_blocks);
    return grid.failed;
}
