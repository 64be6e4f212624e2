// Warpgroup MMA. Included by runtime.cpp.
#pragma once

namespace {

WarpMma& warp_mma() { return current->hopper.mma[thread_of(self()) / WARP]; }

// Whether this lane is the first of its warp to reach this call. It then performs the operation of the whole warp.
bool first_lane_to_arrive() {
    WarpMma& warp = warp_mma();
    if (++self().wgmma_operations <= warp.operations) return false;
    warp.operations = self().wgmma_operations;
    return true;
}

void read_operand(uint16_t (&to)[DEPTH][WIDEST], uint64_t bits, bool k_major, unsigned first, unsigned count,
                  bool issued, Site site) {
    const SharedMemory& smem = current->smem;
    const MatrixDescriptor place(bits);
    if (place.swizzle != 1 || place.base_offset)
        trap(site, "a wgmma descriptor without 128-byte swizzle, or with a base offset, is not supported");
    const ByteRange read =
        read_matrix(to, smem.dynamic, smem.dynamic_bytes, place, k_major, first, count, [&](uint64_t offset) {
            check_written(smem.dynamic + offset, 16, "wgmma reads", site);
            if (issued) check_fenced(offset, offset + 16, "wgmma reads", site);
        });
    if (read.end > smem.dynamic_bytes)
        trap(site, "out of bounds: wgmma reads up to byte %llu of dynamic shared memory, which has %u",
             static_cast<unsigned long long>(read.end), smem.dynamic_bytes);
    report_read(smem.dynamic + read.begin, read.end - read.begin);
}

// The current values of both operands. Register fragments: see include/ptx.cuh.
void read_operands(const InFlight& product, uint16_t (&A)[DEPTH][WIDEST], uint16_t (&B)[DEPTH][WIDEST], bool issued,
                   Site site) {
    const unsigned warp = thread_of(self()) / WARP % 4;
    read_operand(B, product.lane0.b_descriptor, product.lane0.b_k_major, 0, product.lane0.n, issued, site);
    if (!product.lane0.a)
        return read_operand(A, product.lane0.a_descriptor, product.lane0.a_k_major, 16 * warp, 16, issued, site);
    for (unsigned lane = 0; lane < WARP; ++lane)
        for (unsigned i = 0; i < 8; ++i)
            A[i / 4 * 8 + lane % 4 * 2 + i % 2][i / 2 % 2 * 8 + lane / 4] =
                static_cast<uint16_t>(product.a_at[lane][i / 2] >> 16 * (i % 2));
}

bool same(const uint16_t (&a)[DEPTH][WIDEST], const uint16_t (&b)[DEPTH][WIDEST], unsigned count) {
    for (unsigned k = 0; k < DEPTH; ++k)
        if (memcmp(a[k], b[k], 2 * count)) return false;
    return true;
}

// Calls f(register, matrix element) for each accumulator of each lane.
template <class F>
void for_accumulators(Accumulators& a, F f) {
    for (unsigned lane = 0; lane < WARP; ++lane)
        for (unsigned i = 0; i < a.n / 2; ++i)
            f(a.d[lane][i], a.values[i / 2 % 2 * 8 + lane / 4][i / 4 * 8 + lane % 4 * 2 + i % 2]);
}

Accumulators* accumulators_of(WarpMma& warp, const uint64_t* lanes, const Product& lane0) {
    for (unsigned i = 0; i < warp.open_accumulators.count; ++i)
        if (warp.open_accumulators.items[i]->d[0] == lane0.d) return warp.open_accumulators.items[i];
    Accumulators* fresh = warp.open_accumulators.add() = new Accumulators;
    for (unsigned lane = 0; lane < WARP; ++lane) fresh->d[lane] = reinterpret_cast<const Product*>(lanes[lane])->d;
    fresh->n = lane0.n;
    fresh->products = 0;
    for_accumulators(*fresh, [](float& d, float& value) {
        value = d;
        memset(&d, 0xff, sizeof d);
    });
    return fresh;
}

// The operands must not change between issue and wait.
void complete(const InFlight& product, Site waiting) {
    auto &A = current->hopper.A, &B = current->hopper.B;
    read_operands(product, A, B, false, product.site);
    if (!same(A, product.A, 16) || !same(B, product.B, product.lane0.n))
        trap(product.site, "an operand of this wgmma changed before the wait for it at line %d", waiting.line);
    Accumulators& d = *product.accumulators;
    multiply(d.values, A, B, d.n, product.lane0.accumulate, product.lane0.format);
    if (--d.products) return;
    for_accumulators(d, [](float& to, float& value) { to = value; });
}

}  // namespace

extern "C" void sandbox_wgmma(const Product* mine, Site site) {
    if (!self().wgmma_fenced) trap(site, "wgmma without wgmma_fence since the last wgmma_wait");
    const uint64_t* lanes = sandbox_collective(Collective::wgmma, 0xffffffffu, reinterpret_cast<uint64_t>(mine), site);
    if (!first_lane_to_arrive()) return;
    WarpMma& warp = warp_mma();
    InFlight* product = new InFlight;
    product->lane0 = *reinterpret_cast<const Product*>(lanes[0]);
    for (unsigned lane = 0; lane < WARP; ++lane) product->a_at[lane] = reinterpret_cast<const Product*>(lanes[lane])->a;
    product->accumulators = accumulators_of(warp, lanes, product->lane0);
    product->group = warp.groups;
    product->site = site;
    read_operands(*product, product->A, product->B, true, site);
    ++product->accumulators->products;
    ++warp.issued;
    warp.in_flight.add() = product;
}

extern "C" void sandbox_wgmma_fence() { self().wgmma_fenced = true; }

extern "C" void sandbox_wgmma_commit() {
    if (first_lane_to_arrive()) ++warp_mma().groups;
}

extern "C" void sandbox_wgmma_wait(unsigned pending, Site site) {
    sandbox_collective(Collective::wgmma_wait, 0xffffffffu, 0, site);
    self().wgmma_fenced = false;
    if (!first_lane_to_arrive()) return;
    WarpMma& warp = warp_mma();
    unsigned done = 0;
    while (done < warp.in_flight.count && warp.in_flight.items[done]->group + pending < warp.groups) {
        complete(*warp.in_flight.items[done++], site);
    }
    for (unsigned i = 0; i < done; ++i)
        delete warp.in_flight.items[i];  // only now: after a trap the list still owns them
    warp.in_flight.count -= done;
    memmove(warp.in_flight.items, warp.in_flight.items + done, warp.in_flight.count * sizeof(InFlight*));
    unsigned open_accumulators = 0;
    for (unsigned i = 0; i < warp.open_accumulators.count; ++i) {
        Accumulators* const d = warp.open_accumulators.items[i];
        if (d->products) warp.open_accumulators.items[open_accumulators++] = d;
        else delete d;
    }
    warp.open_accumulators.count = open_accumulators;
}

extern "C" void sandbox_wgmma_settled(const float* d, Site site) {
    const WarpMma& warp = warp_mma();
    for (unsigned i = 0; i < warp.open_accumulators.count; ++i)
        if (warp.open_accumulators.items[i]->d[self().lane] == d)
            trap(site, "accumulators used before the wait for their wgmma");
}
