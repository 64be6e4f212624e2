// Reports where each thread of a deadlocked block waits. Included by runtime.cpp.
#pragma once

const char* collective_name(Collective what) {
    static const char* const names[] = {"?",
                                        "__syncwarp",
                                        "__shfl_sync",
                                        "__shfl_up_sync",
                                        "__shfl_down_sync",
                                        "__shfl_xor_sync",
                                        "__ballot_sync",
                                        "__any_sync",
                                        "__all_sync",
                                        "__match_any_sync",
                                        "__reduce_sync",
                                        "ldmatrix",
                                        "mma",
                                        "stmatrix",
                                        "wgmma",
                                        "wgmma_wait"};
    return names[static_cast<int>(what)];
}

bool waits_in_hopper(const Fiber& fiber) {
    return fiber.state == State::at_mbarrier || fiber.state == State::at_named_barrier ||
           fiber.state == State::for_registers;
}
void describe_wait(const Block& block, const Fiber& fiber, bool several, char* text, size_t size);

// Reports where each thread waits: "threads 0..31 wait at __syncthreads() file.cu:12", "threads 32..63 returned".
void Block::explain_deadlock(unsigned blocks) {
    char text[2560] = "";
    size_t used = 0;
    unsigned groups = 0;
    for (unsigned t = 0; t < threads;) {
        const Fiber& fiber = fibers[t];
        unsigned end = t + 1;
        while (end < threads && fibers[end].state == fiber.state &&
               (fiber.state == State::returned || same_site(fibers[end].site, fiber.site)) &&
               (fiber.state != State::at_mbarrier || fibers[end].mbarrier == fiber.mbarrier) &&
               (fiber.state != State::at_named_barrier || fibers[end].named_barrier == fiber.named_barrier) &&
               (fiber.state != State::in_collective || same_collective(fibers[end], fiber)))
            ++end;
        if (++groups <= 8) {
            const char* plural = end - t > 1 ? "s" : "";
            char who[48], where[512];
            if (end - t > 1) snprintf(who, sizeof who, "%u..%u", t, end - 1);
            else snprintf(who, sizeof who, "%u", t);
            if (fiber.state == State::returned) snprintf(where, sizeof where, "returned");
            else if (fiber.state == State::at_barrier)
                snprintf(where, sizeof where, "wait%s at __syncthreads() %s:%d", *plural ? "" : "s", fiber.site.file,
                         fiber.site.line);
            else if (fiber.state == State::ready)
                snprintf(where, sizeof where, "wait%s for another block %s:%d", *plural ? "" : "s", fiber.site.file,
                         fiber.site.line);
            else if (waits_in_hopper(fiber)) describe_wait(*this, fiber, end - t > 1, where, sizeof where);
            else
                snprintf(where, sizeof where, "wait%s in %s(mask 0x%08x) %s:%d", *plural ? "" : "s",
                         collective_name(fiber.what), fiber.mask, fiber.site.file, fiber.site.line);
            used += snprintf(text + used, sizeof text - used, "\n  thread%s %s %s", plural, who, where);
            if (used >= sizeof text) used = sizeof text - 1;
        }
        t = end;
    }
    const char* kind = "barrier not reached by every thread of the block";
    for (unsigned t = 0; t < threads; ++t) {
        if (waits_in_hopper(fibers[t])) kind = "deadlock: no remaining thread can complete these waits";
    }
    for (unsigned t = 0; t < threads; ++t) {
        if (fibers[t].state == State::in_collective) kind = "warp collective not reached by every lane of its mask";
    }
    char all_wait[80];
    snprintf(all_wait, sizeof all_wait, "deadlock: the %u block%s that run%s wait%s for others", blocks,
             blocks > 1 ? "s" : "", blocks > 1 ? "" : "s", blocks > 1 ? "" : "s");
    if (blocks) kind = all_wait;
    const uint3& b = fibers[0].block_idx;
    fail("%s, in block (%u,%u,%u):%s%s", kind, b.x, b.y, b.z, text, groups > 8 ? "\n  ..." : "");
}
