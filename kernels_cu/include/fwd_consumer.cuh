// What a consumer warpgroup of fwd_wgmma does in a work tile, apart from its MMAs and the epilogue: it waits for and
// releases the stages of the pipelines, takes turns (ping_pong.cuh), drains key tiles that only other consumers see,
// and turns S into masked raw scores.
#pragma once
#include "fwd_tiles.cuh"
#include "mask_wgmma.cuh"
#include "ping_pong.cuh"
#include "softmax.cuh"

// Release K after Q K^T instead of after P V, so that the next K tile loads during P V: up to +1% with two consumers;
// with three the additional wait costs 0.5%. For one and four consumers no measurement is recorded. K's stage also
// holds the list entry of a block map, and the bias tile, read later.
constexpr bool EARLY_K_RELEASE = CONSUMERS != 3 && !Head::HAS_BLOCK_MAP && !BIAS_TILES;
// Modify and mask scores while P V of the previous key tile is computed: up to +30% with a bias, +5% with ALiBi, +15%
// with SOFTCAP, +9% with a score_mod; without a modification up to 2% slower. Not in variants whose registers would
// spill (SCORE_MOD_SPILLS; it lacks two with ALiBi, which spill 12 and 80 bytes: fwd_wgmma.spills.json), nor
// with SOFTCAP where it is up to 5% slower: for D > 128, and with a tanh of several instructions (float16) for D > 96.
constexpr int MAX_SOFTCAP_COLUMNS = expression::TANH_IS_ONE_INSTRUCTION ? 128 : 96;
constexpr bool SCORE_MOD_SPILLS = (SOFTCAP && Head::HAS_BLOCK_MAP) || (CAUSAL && CONSUMERS == 3 && BLOCK_N == 96);
constexpr bool SCORE_MOD_OVERLAPS_PV = Head::HAS_SCORE_MOD && !SCORE_MOD_SPILLS &&
                                       !(SOFTCAP && (D_PAD > MAX_SOFTCAP_COLUMNS || DV_PAD > MAX_SOFTCAP_COLUMNS));

struct ConsumerState {  // of a consumer thread, kept from one work tile to the next
    char* const smem;
    const unsigned lane;
    const float scale_log2;  // factor of raw scores in exp2 (softmax.cuh)
    const int g, q;          // the thread has rows g and g + 8 of the warp's 16, and columns 2q and 2q + 1 of every 8
    const bool store_lane;
    unsigned next_pipe_index = 0;  // index of the next work tile's first key tile in the pipelines
    int tiles_to_drain = 0;        // postponed_tiles() of the previous work tile
    Scheduler::Reader scheduler;
    bool has_work_tile = false;  // scheduler.tile is valid
    __device__ __forceinline__ ConsumerState(char* smem, unsigned lane, const Score& score)
        : smem(smem), lane(lane), scale_log2(Head::softmax_scale_of(score) * Head::LOG2E), g(lane / 4), q(lane % 4),
          store_lane(lane == 0), scheduler(smem) {}
};

// A consumer thread in one work tile. Values from shared memory are uniform over the warp, which the compiler does not
// know. With uniform() it keeps addresses and descriptors in uniform registers: 60 instead of 84 instructions per turn
// (ping_pong.cuh; D = 128, causal).
struct WorkTileConsumer : ConsumerTiles {
    using FragmentS = float[BLOCK_N / 2];
    using FragmentP = unsigned[BLOCK_N / 16][4];

    ConsumerState& state;
    const Arguments& args;
    const SmemAddr base;
    const unsigned pipe_index;  // index of the work tile's first key tile in the pipelines
    const unsigned phase;       // parity of FullQ's phase
    const WarpSchedulerBarrier turn;
    const int turns_end;  // consumers take turns for the key tiles before this one
    const RowKeyRanges row_keys;
    int PV_n0 = 0;  // with a block map: first key of the tile whose P V comes next

    __device__ __forceinline__ WorkTileConsumer(ConsumerState& state, const Arguments& args)
        : ConsumerTiles(uniform(state.scheduler.tile), uniform(threadIdx.x / 32), args.score), state(state), args(args),
          base(uniform(smem_address(state.smem))), pipe_index(uniform(state.next_pipe_index)),
          phase(state.scheduler.phase()), turn(consumer), turns_end(ping_pong_end(*this)),
          row_keys(head, warp_row + state.g, /*keep=*/!SCORE_MOD_OVERLAPS_PV) {}

    // ---- stages of Q, K and V

    // Drains the key tiles that the previous work tile postponed, waits for Q, and drains those before this consumer's
    // first one.
    __device__ __forceinline__ void drain_first_tiles_and_wait_Q() {
        if (STAGGERED) {
#pragma unroll 1
            for (int j = -state.tiles_to_drain; j < 0; ++j) drain_tile(j);
        }
        TIMELINE(wait_Q);
        mbarrier_wait(FullQ::at(base, consumer), phase);
#pragma unroll 1
        for (int j = 0; j < first_own; ++j) drain_tile(j);
    }
    __device__ __forceinline__ void wait_K(int j) const { KPipeline::wait(base, pipe_index + j); }
    __device__ __forceinline__ void wait_V(int j) const { VPipeline::wait(base, pipe_index + j); }
    __device__ __forceinline__ void release_Q() const {
        if (SEPARATE_O && state.lane == 0) mbarrier_arrive(EmptyQ::at(base, consumer));
    }
    __device__ __forceinline__ void release_K(int j) const {
        if (state.lane == 0) KPipeline::release(base, pipe_index + j);
    }
    __device__ __forceinline__ void release_V(int j) const {
        if (state.lane == 0) VPipeline::release(base, pipe_index + j);
    }

    // Whether this consumer takes a turn for key tile j, which is the first one of this consumer or of a range of keys.
    // No consumer takes a turn for key tile 0: none has exponentials yet that could overlap with MMAs. With STAGGERED
    // none takes a turn for its first tile, because the consumers' first tiles differ.
    __device__ __forceinline__ bool first_tile_has_turn(int j) const { return !STAGGERED && j > 0 && j < turns_end; }

    // ---- scores and mask

    // Key tile j. To be called after mma_PV of the previous one, which reads PV_n0. With a block map it must be called
    // before K is released: the entry is in K's stage.
    __device__ __forceinline__ KeyTile read_key_tile(int j) {
        // uniform(), a redux.sync, also synchronises the warp: all lanes have read the word before one releases K.
        const KeyTile tile =
            key_tile(j, Head::HAS_BLOCK_MAP ? uniform(KeyTileEntries::entry(state.smem, stage_of(pipe_index + j))) : 0);
        if (Head::HAS_BLOCK_MAP) PV_n0 = tile.n0;
        return tile;
    }
    __device__ __forceinline__ ElementBits load_element_bits(KeyTile tile) const {
        ElementBits element_bits;
        if (Head::HAS_ELEMENT_BITS) element_bits.load(head, warp_row + state.g, tile.n0, tile.mask_allows_all);
        return element_bits;
    }
    // S becomes the raw scores: by apply_score_mod (mask_wgmma.cuh), or with BIAS_TILES by BiasTiles::score_mod, which
    // reads the bias from K's stage. Both call Head::raw for each element, which calls Head::apply_score_mod.
    __device__ __forceinline__ void score_mod(FragmentS& S, int j, KeyTile tile) {
        const int row = warp_row + state.g, column = tile.n0 + 2 * state.q;
        if (BIAS_TILES)
            Bias::score_mod(S, head, base, stage_of(pipe_index + j), consumer, row, column, warp, state.lane);
        else apply_score_mod(S, head, row, column);
    }
    // S becomes -INF where masked.
    __device__ __forceinline__ void mask(FragmentS& S, KeyTile tile, ElementBits element_bits) {
        apply_mask(S, head, warp_row + state.g, tile.n0, state.q, row_keys, fully_visible_keys, tile.mask_allows_all,
                   element_bits);
    }
    // Waits for S = Q K^T of key tile j, releases K, and turns S into masked raw scores. IN_FLIGHT: later MMAs that may
    // be running. releases_last_Q: Q is released here if j is the last tile. False for the consumer's first tile: if
    // that is also its last one, `consume` releases Q.
    template <int IN_FLIGHT>
    __device__ __forceinline__ KeyTile masked_scores(FragmentS& S, int j, bool releases_last_Q = true) {
        const KeyTile tile = read_key_tile(j);
        const ElementBits visible_bits = load_element_bits(tile);
        wgmma_wait<IN_FLIGHT>();
        warpgroup_fence_operand(S);
        TIMELINE(softmax);
        if (!BIAS_TILES) release_K(j);
        if (releases_last_Q && j == last) release_Q();  // read_key_tile may have set last
        score_mod(S, j, tile);
        if (BIAS_TILES) release_K(j);  // K's stage also holds the bias, which score_mod has read
        mask(S, tile, visible_bits);
        return tile;
    }

    // ---- key tiles that only other consumers see, and the next work tile

    // Waits for and releases the stages of key tile j, and takes its turn: the barriers count the arrivals of all
    // consumers.
    __device__ __forceinline__ void drain_tile(int j) {
        if (!STAGGERED && j > 0 && j < turns_end) {
            turn.wait();
            turn.pass();
        }
        wait_K(j);
        __syncwarp();  // all lanes have waited: one that waited after the stage is filled again would wait forever
        release_K(j);
        wait_V(j);
        __syncwarp();
        release_V(j);
    }
    // Reads the next work tile into state.scheduler.tile and sets state.has_work_tile, the condition of the loop over
    // work tiles. The current work tile stays valid: ConsumerTiles has copies of its data. With SCHEDULE_LATE, if key
    // tiles are left to drain, drain_last_tiles reads the next work tile instead, after it has drained them
    // (SCHEDULE_LATE says why).
    __device__ __forceinline__ void fetch_next_work_tile() {
        if (!SCHEDULE_LATE || last + 1 >= pipeline_tiles()) state.has_work_tile = state.scheduler.next();
    }
    // Drains the key tiles after the last own one; STAGGERED: some of them in the next work tile.
    __device__ __forceinline__ void drain_last_tiles() {
        state.tiles_to_drain = postponed_tiles();
#pragma unroll 1
        for (int j = last + 1; j < pipeline_tiles() - state.tiles_to_drain; ++j) drain_tile(j);
        if (SCHEDULE_LATE && last + 1 < pipeline_tiles()) state.has_work_tile = state.scheduler.next();
        state.next_pipe_index += pipeline_tiles();
    }
};
