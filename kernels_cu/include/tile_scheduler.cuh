// Who works on which tile of a ragged batch: of queries, for kernels whose blocks stay on their SM and take one piece after the
// other; of keys, for those whose blocks take one piece each, the backward. Pieces are handed out one by one, the longest first,
// to whoever is ready. Nobody knows before how long the sequences are, nor how fast each SM is.
// Likewise who works on which query tile of a dense batch with a block map, of which nobody knows what it leaves.
//
//   const LongestFirst<QueryTiles> pieces(score);     or <KeyTiles>; by all lanes of a warp, as everything here
//   pieces.work_tile(number, heads, group)                the number-th; numbers come from a counter in memory, or are a block's own
//
// Heads come in sections, so that the keys and values that are read at one time stay in L2; the last section is up to
// two of them, whose short pieces then even out what long ones left uneven. Pieces count as equally long within two of the key tiles
// that they walk, or four query tiles, so that those of one sequence and head come together. (Of queries four sections, one key tile:
// 3% slower, for L2; of keys a head more in a section: 0 ... 4%.)
#pragma once
#include <hopper.cuh>
#include "score_mod.cuh"

#if RAGGED
struct WorkTile {  // a piece as one warp of a block tells the others, whom it saves looking up its sequence
    int b, row0, head;
    SeqlenOffsets extent;
    __device__ __forceinline__ bool none() const { return b < 0; }
    __device__ __forceinline__ int h() const { return head; }
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return {score, b, extent}; }
};

constexpr unsigned HEAD_GROUP_ROWS = (16 << 20) / ((HEAD_DIM + HEAD_DIM_V) * sizeof(dtype));  // of K and V, or of Q and dO: a third of L2

// Where a level begins. Where the first one would be of several tiles of a sequence, it is two: the very last pieces even out what
// others leave (16 x 512: +3%, of keys +0.5%). But where all sequences end within it: short pieces alone wait for each other (32 x 256: -4%).
template <class Tiles>
__device__ __forceinline__ int bucket_begin(int level) {
    return !Tiles::FIRST_BUCKET_HALVED ? level * Tiles::BUCKET : level > 1 ? (level - 1) * Tiles::BUCKET : level * Tiles::BUCKET / 2;
}

struct QueryTiles {  // of a sequence that lies so
    static constexpr int ROWS = BLOCK_M, BUCKET = 2 * BLOCK_N;  // keys
    int tiles, Sk, diagonal;
    __device__ __forceinline__ QueryTiles(const Score& score, const SeqlenOffsets& own)
        : tiles((own.Sq + BLOCK_M - 1) / BLOCK_M), Sk(own.Sk), diagonal(score.bottom_right ? own.Sk - own.Sq : 0) {}
    static constexpr bool FIRST_BUCKET_HALVED = BUCKET >= 2 * ROWS;
    // So many see keys of level `level` or beyond: the last ones. Of level -1: all there are.
    __device__ __forceinline__ int beyond(int level) const {
        const int key = bucket_begin<QueryTiles>(level);
        const int blind = CAUSAL ? max(key - diagonal, 0) / BLOCK_M : 0;
        return level < 0 ? tiles : Sk <= key ? 0 : max(tiles - blind, 0);
    }
    // The first of those of a level, beyond which there are none but so many.
    __device__ __forceinline__ int first(int, int last) const { return tiles - last; }
    // Whether a piece walks so little of its keys that the next one comes late unless it is dealt ahead (16 x 512: +1%).
    static __device__ __forceinline__ bool is_short(const Score& score, const WorkTile& piece) {
        const SeqlenOffsets& own = piece.extent;
        return CAUSAL && own.Sk > BUCKET && piece.row0 + ROWS + (score.bottom_right ? own.Sk - own.Sq : 0) <= BUCKET;
    }
    // How far levels go, of so many queries and keys; how many heads have a section.
    static __device__ __forceinline__ int most(int, int Sk) { return Sk; }
    static __device__ __forceinline__ unsigned section(const Score& score, unsigned group) {
        return HEAD_GROUP_ROWS * group / (score.rows_k + 1) + 1;
    }
};

struct KeyTiles {  // likewise
    static constexpr int ROWS = BLOCK_N, BUCKET = 4 * BLOCK_M;  // queries
    static constexpr bool FIRST_BUCKET_HALVED = BUCKET >= 2 * ROWS;
    int tiles, Sq, Sk, diagonal;
    __device__ __forceinline__ KeyTiles(const Score& score, const SeqlenOffsets& own)
        : tiles((own.all_keys + BLOCK_N - 1) / BLOCK_N), Sq(own.Sq), Sk(own.Sk),
          diagonal(score.bottom_right ? own.Sk - own.Sq : 0) {}
    // So many are seen by more than `level` levels of queries: the first ones, of keys that count.
    __device__ __forceinline__ int beyond(int level) const {
        const int rows = bucket_begin<KeyTiles>(level), keys = CAUSAL ? min(Sk, max(Sq - rows + diagonal, 0)) : Sk;
        return level < 0 ? tiles : Sq <= rows ? 0 : (keys + BLOCK_N - 1) / BLOCK_N;
    }
    __device__ __forceinline__ int first(int beyond, int) const { return beyond; }
    static __device__ __forceinline__ int most(int Sq, int) { return Sq; }
    static __device__ __forceinline__ unsigned section(const Score& score, unsigned group) {
        // L2 holds dQ's sums, too: a quarter of the heads (16 x 512: +1.9%, of lengths drawn up to 883 +2.7%; D = 64, with zeros
        // to be added to: -0.7%), but where so many fit that they are the whole batch, or half of it (4 x 512: +4.3%).
        const unsigned heads = HEAD_GROUP_ROWS / group / (score.rows_q + 1);
        return max(HEAD_DIM > 64 && heads < 7 ? heads / 4 : heads, 1u);
    }
};

// Little is kept from one piece to the next: three warpgroups of consumers leave a warp that deals 32 registers.
template <class Tiles>
struct LongestFirst {
    const Score& score;
    const SeqlenOffsets own;  // where the lane's sequence lies: few batches have more than 32

    __device__ __forceinline__ explicit LongestFirst(const Score& score) : score(score), own(extent(threadIdx.x % 32)) {}

    // Where sequence b lies; of one that there is not, nowhere.
    __device__ __forceinline__ SeqlenOffsets extent(int b) const {
        return b < score.sequences ? SeqlenInfo(score, b).extent() : SeqlenOffsets{};
    }
    // Of sequences b0 .. b0 + 32 the lane's. (The lane is asked for anew: addresses would be kept.)
    __device__ __forceinline__ SeqlenOffsets of(int b0) const { return b0 == 0 ? own : extent(b0 + thread_index_x() % 32); }

    // How many tiles of all sequences are of level `level` or beyond.
    __device__ __forceinline__ int count(int level) const {
        int tiles = 0;
#pragma unroll 1
        for (int b0 = 0; b0 < score.sequences; b0 += 32) tiles += Tiles(score, of(b0)).beyond(level);
        return __reduce_add_sync(0xffffffffu, tiles);
    }

    struct Found {
        RowTile rows;
        SeqlenOffsets extent;
    };
    // The number-th tile of a head.
    __device__ __forceinline__ Found tile(int number) const {
        int most = __reduce_max_sync(0xffffffffu, Tiles::most(own.Sq, own.Sk));
        if (score.sequences > 32) most = Tiles::most(score.Sq, score.Sk);
        // More than `number` reach `level`, not `end`.
        int level = -1, end = (most + Tiles::BUCKET - 1) / Tiles::BUCKET + Tiles::FIRST_BUCKET_HALVED, at_end = 0;
        const bool whole = Tiles::FIRST_BUCKET_HALVED && most <= Tiles::BUCKET;
#pragma unroll 1
        while (end - level > (whole && level == 0 ? 2 : 1)) {
            const int middle = (level + end) / 2, reach = count(middle);
            if (reach > number) level = middle;
            else end = middle, at_end = reach;
        }
        number -= at_end;
#pragma unroll 1
        for (int b0 = 0;; b0 += 32) {  // those of the level, one sequence after the other
            const SeqlenOffsets lies = of(b0);
            const Tiles tiles(score, lies);
            const int last = tiles.beyond(level), beyond = tiles.beyond(Tiles::FIRST_BUCKET_HALVED ? end : level + 1);
            const int here = last - beyond, lane = threadIdx.x % 32;
            int upto = here;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int more = __shfl_up_sync(0xffffffffu, upto, step);
                upto += lane >= step ? more : 0;
            }
            const unsigned found = __ballot_sync(0xffffffffu, upto > number);
            if (found) {
                const int who = __ffs(found) - 1, row0 = (tiles.first(beyond, last) + number - (upto - here)) * Tiles::ROWS;
                const auto his = [&](int x) { return __shfl_sync(0xffffffffu, x, who); };
                return {{b0 + who, his(row0)},
                        {his(lies.first_query), his(lies.Sq), his(lies.first_key), his(lies.all_keys), his(lies.Sk)}};
            }
            number -= __shfl_sync(0xffffffffu, upto, 31);
        }
    }

    __device__ __forceinline__ bool is_short(const WorkTile& piece) const { return Tiles::is_short(score, piece); }

    // The number-th piece of all heads: of queries, of which `group` at a time share keys and values; or of keys, each shared by
    // a group. None when there is no such.
    __device__ __forceinline__ WorkTile work_tile(unsigned number, unsigned heads, unsigned group) const {
        const unsigned all = count(-1);
        if (number >= all * heads) return {-1};
        const unsigned section = min(Tiles::section(score, group), heads);
        unsigned first = 0;
#pragma unroll 1
        while (heads - first > 2 * section && number >= section * all) first += section, number -= section * all;
        const unsigned width = heads - first > 2 * section ? section : heads - first;
        const Found found = tile(number / width);
        return {found.rows.b, found.rows.row0, static_cast<int>(first + number % width), found.extent};
    }
};
#else
struct WorkTile {  // likewise of a dense batch, whom it saves divisions: head `head` of all is head_of_b of batch entry b
    int b = -1, row0 = 0, head = 0, head_of_b = 0;
    WorkTile() = default;
    __device__ __forceinline__ WorkTile(unsigned row0, unsigned head, unsigned H)
        : b(head / H), row0(row0), head(head), head_of_b(head % H) {}
    __device__ __forceinline__ bool none() const { return b < 0; }
    __device__ __forceinline__ int h() const { return head_of_b; }
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return {score, b}; }
};
#endif

#if BLOCK_MAP && !RAGGED
struct QueryTiles;
template <class Tiles>
struct LongestFirst {  // as far as causality tells; heads in sections, as for_each_work_tile has them
    const unsigned tiles, H;
    __device__ __forceinline__ LongestFirst(const Score& score, unsigned H) : tiles(query_tiles<BLOCK_M>(score)), H(H) {}
    __device__ __forceinline__ bool is_short(const WorkTile&) const { return false; }  // nobody knows
    __device__ __forceinline__ WorkTile work_tile(unsigned number, unsigned heads, unsigned) const {
        if (number >= tiles * heads) return {};
        const unsigned section = CAUSAL ? max(2 * gridDim.x / tiles, 1) : 1, first = number / (section * tiles) * section;
        const unsigned width = min(section, heads - first), i = number - first * tiles;
        return {(tiles - 1 - i / width) * BLOCK_M, first + i % width, H};
    }
};
#endif

// Who works on which query tile of a dense batch, and which key tiles it visits, for kernels whose blocks stay on their SM and
// take one piece after the other. Pieces of ragged batches, and by a block map: tile_scheduler.cuh.

// The key tiles that some of the rows m0 .. m1 see anything of.
__device__ __forceinline__ Range n_block_range(const Head& head, int m0, int m1) {
    const Range keys = head.keys(m0, m1);
    const int end = (max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N;
    return {Head::FIRST ? min(keys.begin / BLOCK_N, end) : 0, end};
}

// Calls f(i) with each i below `many` that is the block's: a round of all blocks from `begin` on, the next one backwards. Of
// several `heads`, i being of head i % heads, a block takes of its two of these two rounds the one of the earlier head first.
template <class F>
__device__ __forceinline__ void serpentine(unsigned begin, unsigned many, unsigned heads, F f) {
#pragma unroll 1
    for (unsigned first = 0, i = begin; first < many; first += gridDim.x, i = 2 * first - 1 - i) {
        unsigned own = i;
        if (heads > 1) {
            const bool back = first / gridDim.x % 2;
            const unsigned other = 2 * (back ? first : first + gridDim.x) - 1 - i;
            const unsigned there = back ? other : i, then = back ? i : other;
            if (then < many && then % heads < there % heads) own = other;
        }
        if (own >= many) continue;
        f(own);
    }
}

// Calls f(query tile, head) with each piece of the block, of so many query tiles a head.
//
// Causal: heads in sections of two rounds of the blocks, so that few heads at a time stay in L2, longest pieces first. The
// second round goes backwards: two pieces together are as long as any other two. What is left uneven evens out: the blocks
// begin each section at another place, and heads too few for a section of their own join the last one, of long rows as many as
// L2 bears with, of float8 twice as many (B8 H12 S1024 D64: 0.79 of the blocks' time was work, now 0.95; B1 H16 S8191 D128: 0.95,
// 0.97). Heads of four rounds and more are even on their own, and blocks that drift apart on one head share keys longer than on
// many (B1 H16 D128, S 128k: +4%, 256k: +9%, 512k: +10%). In a window most pieces are alike and read few keys: one section, in which
// the short pieces of all heads come last (fwd_wgmma, window 1024: +5%).
//
// TOGETHER: of its two pieces of two rounds a block takes the one of the earlier head first, so that all pieces of half of the
// heads are under way at one time. At D = 256 two rounds of Q, K, V and O are more than L2 holds: S = 512 +9%, 1k +3%, 2k +1%,
// D = 64 and 128 -0.3 ... +0.9%; float8, of half as many bytes, up to -3%.
template <bool TOGETHER = false, class F>
__device__ __forceinline__ void for_each_work_tile(unsigned tiles, unsigned heads, F f) {
    constexpr bool HEAD_GROUPS = CAUSAL && !Head::FIRST;
    const unsigned section = HEAD_GROUPS ? max(2 * gridDim.x / tiles, 1) : heads;
    constexpr unsigned L2_HEADS = (HEAD_DIM <= 128 ? 28 : 8) / sizeof(dtype);  // heads, by L2
    const unsigned joined = HEAD_GROUPS && tiles >= 4 * gridDim.x ? 0 : max(section / 2, L2_HEADS);
    const unsigned last = section + joined;
#pragma unroll 1
    for (unsigned head = 0, size; head < heads; head += size) {
        size = heads - head < last ? heads - head : section;
        const unsigned begin = (blockIdx.x + 17 * (head % gridDim.x)) % gridDim.x;
        serpentine(begin, size * tiles, HEAD_GROUPS && TOGETHER ? size : 1, [&](unsigned i) {
            CAUSAL ? f(tiles - 1 - i / size, head + i % size) : f(i % tiles, i / tiles);
        });
    }
}

// Likewise of a causal window: the pieces that are alike come one head after the other, so that blocks which work side by side
// share keys; then, the longest first, those of all heads that the first key shortens.
template <class F>
__device__ __forceinline__ void for_each_window_work_tile(const Score& score, unsigned tiles, unsigned heads, F f) {
    const unsigned shortened = max(-Head(score, 0, 0).first_key(0), 0);  // rows of a head
    const unsigned is_short = min((shortened + BLOCK_M - 1) / BLOCK_M, tiles), alike = tiles - is_short;
    serpentine(blockIdx.x, heads * tiles, 1, [&](unsigned i) {
        const bool late = i >= heads * alike;
        const unsigned j = late ? i - heads * alike : i, by = late ? heads : alike;
        f(late ? is_short - 1 - j / by : tiles - 1 - j % by, late ? j % by : j / by);
    });
}

// A block's pieces of work, one after the other: one warp finds them and tells everybody else through shared memory. For kernels
// whose blocks stay on their SM.
//
//   using Next = SchedulerPipeline<AT>;                   at byte AT of shared memory, BYTES of them
//   Next::SchedulerProducer teller{smem};                  the warp that finds them:   teller.tell(piece), or all of them: produce_all
//   Next::Pieces pieces(smem);                  everybody else:             while (pieces.take()) ... pieces.dealt ...
//
// Two mbarriers: that the next piece is told, and that everybody has asked for it; then the piece.

template <unsigned AT>
struct SchedulerPipeline {
    static constexpr unsigned TOLD = AT, ASKED = AT + 8, PIECE = AT + 16, BYTES = 48;
    static_assert(sizeof(WorkTile) <= BYTES - 16, "a piece finds room");

    // So many are told, each of whom asks.
    static __device__ __forceinline__ void init_barriers(SmemAddr base, unsigned many) {
        mbarrier_init(base + TOLD, 1);
        mbarrier_init(base + ASKED, many);
    }

    struct SchedulerProducer {
        char* const smem;
        unsigned round = 0;
        // Tells the next piece, when everybody has asked for it.
        __device__ __forceinline__ void tell(const WorkTile& piece) {
            await_asked();
            write(piece);
        }
#if RAGGED || BLOCK_MAP
        // All pieces that the block gets, by all lanes of a warp: the first is its own, each other one comes from the counter
        // `dealt`, when everybody has asked for it and no sooner, or after a brief one while that is still told. Of each, when it
        // is told, f(piece).
        template <class F>
        __device__ __forceinline__ void produce_all(const LongestFirst<QueryTiles>& pieces, unsigned heads, unsigned group,
                                                      unsigned* dealt, F f) {
            const bool leader = threadIdx.x % 32 == 0;
            bool ahead = true;
#pragma unroll 1
            for (unsigned number = blockIdx.x;;) {
                const WorkTile piece = pieces.work_tile(number, heads, group);
                if (leader) {
                    if (ahead) await_asked();
                    write(piece);
                }
                griddepcontrol_wait();  // which clears the counter
                if (piece.none()) return;
                f(piece);
                ahead = pieces.is_short(piece);
                if (leader) {
                    if (!ahead) await_asked();
                    number = atomicAdd(dealt, 1u);
                }
                number = __shfl_sync(0xffffffffu, number, 0) + grid_size_x();
            }
        }
#endif

      private:
        // Nobody asks for the first piece.
        __device__ __forceinline__ void await_asked() { mbarrier_wait(smem_address(smem) + ASKED, round++ % 2 ^ 1); }
        __device__ __forceinline__ void write(const WorkTile& piece) {
            *reinterpret_cast<WorkTile*>(smem + PIECE) = piece;
            mbarrier_arrive(smem_address(smem) + TOLD);
        }
    };

    struct Pieces {
        const char* const smem;
        unsigned round = 0;
        WorkTile dealt;
        __device__ __forceinline__ explicit Pieces(const char* smem) : smem(smem) {}
        // The next one; whether there is any. Asks for the one after, unless the caller does, later.
        __device__ __forceinline__ bool take(bool asks = true) {
            const SmemAddr base = smem_address(smem);
            mbarrier_wait(base + TOLD, round++ % 2);
            dealt = *reinterpret_cast<const WorkTile*>(smem + PIECE);
            if (dealt.none()) return false;
            if (asks) mbarrier_arrive(base + ASKED);
            return true;
        }
        __device__ __forceinline__ void ask() const { mbarrier_arrive(smem_address(smem) + ASKED); }
        // Of the mbarriers that each piece uses once.
        __device__ __forceinline__ unsigned parity() const { return (round - 1) % 2; }
    };
};

// The same piece, by all lanes of a warp: so the compiler knows that all were told the same.
__device__ __forceinline__ WorkTile uniform(WorkTile piece) {
    unsigned* const words = reinterpret_cast<unsigned*>(&piece);
#pragma unroll
    for (unsigned i = 0; i < sizeof(WorkTile) / 4; ++i) words[i] = uniform(words[i]);
    return piece;
}
