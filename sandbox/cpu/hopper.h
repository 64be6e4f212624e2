// What a block keeps for Hopper's asynchronous instructions: mbarriers, boxes on their way in, named barriers, registers,
// wgmmas under way. Included by runtime.cpp.
#pragma once

constexpr unsigned REGISTERS = 65536;  // of an SM

// An mbarrier's 64-bit word. Bytes that are announced and have not come keep a phase open, as arrivals do.
struct Mbarrier {
    uint64_t magic : 4, parity : 1, expected : 14, missing : 14;
    int64_t bytes : 31;  // announced and not come; negative where they came before they were announced
    static constexpr uint64_t MAGIC = 5;  // neither zeros nor poison
};
static_assert(sizeof(Mbarrier) == 8, "one word");

struct Requested {  // one box on its way into shared memory
    char* to;
    TensorMap map;
    int at[MAP_RANK];
    char* barrier;
    uint64_t due;  // the scheduling step in which it comes
    Site site;
};

struct NamedBarrier {
    unsigned threads, arrived, generation;
    bool any, result[2];
    char order[2];  // as Fiber::order
};

struct Accumulators {  // of one warp, while wgmmas write them
    float* d[WARP];
    unsigned n, products;
    float values[16][WIDEST];
};

struct UnderWay {  // one warp's part of a wgmma
    Product lane0;
    Accumulators* accumulators;
    const unsigned* a_at[WARP];
    uint16_t A[DEPTH][WIDEST], B[DEPTH][WIDEST];  // as they were when it was issued
    unsigned group;
    Site site;
};

struct WarpMma {
    List<UnderWay*> under_way;
    List<Accumulators*> open;
    unsigned groups, issued;
    unsigned turn;  // of the lane that is furthest, as Fiber::wgmma_turn
};

struct Hopper {
    uint64_t step;
    List<Requested> requested;
    List<Departed> departed;
    NamedBarrier named[NAMED_BARRIERS];
    unsigned free_registers;
    WarpMma mma[1024 / WARP];
    uint16_t A[DEPTH][WIDEST], B[DEPTH][WIDEST];  // operands as they are when a wgmma ends
    Proxies proxies;

    void begin() {
        step = requested.count = free_registers = 0;
        drop_departed();
        memset(named, 0, sizeof named);
        proxies.begin();
        for (WarpMma& warp : mma) {
            drop(warp);
            warp.groups = warp.issued = warp.turn = 0;
        }
    }
    void free_all() {
        free(requested.items);
        drop_departed();
        free(departed.items);
        free(proxies.mbarriers.items);
        for (WarpMma& warp : mma) {
            drop(warp);
            free(warp.under_way.items);
            free(warp.open.items);
        }
    }
    void drop_departed() {
        while (departed.count) free(departed.items[--departed.count].numbers);
    }
    static void drop(WarpMma& warp) {
        while (warp.under_way.count) delete warp.under_way.items[--warp.under_way.count];
        while (warp.open.count) delete warp.open.items[--warp.open.count];
    }
};
