// Per-block state of Hopper's asynchronous instructions: mbarriers, pending TMA loads, named barriers, registers,
// pending wgmmas. Included by runtime.cpp.
#pragma once

constexpr unsigned REGISTERS = 65536;  // of an SM

// An mbarrier's 64-bit word. A phase ends when no arrivals and no transaction bytes are pending.
struct Mbarrier {
    uint64_t magic : 4, parity : 1, expected : 12, missing : 12;
    uint64_t unseen : 2;                  // phases that have ended since the last wait returned, or NO_WAIT_YET
    int64_t bytes : 33;                   // expected minus received; negative if they are received before expect_tx
    static constexpr uint64_t MAGIC = 5;  // neither zeros nor poison
    static constexpr uint64_t NO_WAIT_YET = 3;
};
static_assert(sizeof(Mbarrier) == 8, "one word");

struct TmaLoad {  // one pending load to shared memory: a box of a tensor map, or `size` contiguous bytes at `from`
    char* to;
    const char* from;
    unsigned size;
    TensorMap map;
    int at[MAP_RANK];
    char* barrier;
    uint64_t due;       // the scheduling step in which it may complete
    bool may_complete;  // in this scheduling step, if it is due
    Site site;
    unsigned* copies = nullptr;  // of a copy from another block of the cluster: that block's number of pending copies
    uint64_t bytes() const { return from ? size : box_bytes(map); }
};

struct MbarrierInit {  // where an mbarrier was initialised
    const char* at;
    Site site;
};

struct NamedBarrier {
    unsigned threads, arrived, generation;
    bool any, result[2];
    char order[2];  // as Fiber::order
};

struct Accumulators {  // of one warp, while wgmmas are pending
    float* d[WARP];
    unsigned n, products;
    float values[16][WIDEST];
};

struct InFlight {  // one warp's part of a pending wgmma
    Product lane0;
    Accumulators* accumulators;
    const unsigned* a_at[WARP];
    uint16_t A[DEPTH][WIDEST], B[DEPTH][WIDEST];  // values at issue
    unsigned group;
    Site site;
};

struct WarpMma {
    List<InFlight*> in_flight;
    List<Accumulators*> open_accumulators;
    unsigned groups, issued;
    unsigned operations;  // maximum of Fiber::wgmma_operations
};

struct Hopper {
    uint64_t step;
    List<TmaLoad> tma_loads;
    List<ReadStore> read_stores;
    List<MbarrierInit> mbarrier_inits;
    NamedBarrier named[NAMED_BARRIERS];
    unsigned free_registers;
    WarpMma mma[1024 / WARP];
    uint16_t A[DEPTH][WIDEST], B[DEPTH][WIDEST];  // operands at completion of a wgmma
    Proxies proxies;

    Site init_of(const char* mbarrier) const {
        for (unsigned i = mbarrier_inits.count; i-- > 0;)
            if (mbarrier_inits.items[i].at == mbarrier) return mbarrier_inits.items[i].site;
        return {"?", 0};
    }
    void begin() {
        step = tma_loads.count = mbarrier_inits.count = free_registers = 0;
        drop_read_stores();
        memset(named, 0, sizeof named);
        proxies.begin();
        for (WarpMma& warp : mma) {
            drop(warp);
            warp.groups = warp.issued = warp.operations = 0;
        }
    }
    void free_all() {
        free(tma_loads.items);
        free(mbarrier_inits.items);
        drop_read_stores();
        free(read_stores.items);
        free(proxies.mbarriers.items);
        for (WarpMma& warp : mma) {
            drop(warp);
            free(warp.in_flight.items);
            free(warp.open_accumulators.items);
        }
    }
    void drop_read_stores() {
        while (read_stores.count) free(read_stores.items[--read_stores.count].numbers);
    }
    static void drop(WarpMma& warp) {
        while (warp.in_flight.count) delete warp.in_flight.items[--warp.in_flight.count];
        while (warp.open_accumulators.count) delete warp.open_accumulators.items[--warp.open_accumulators.count];
    }
};
