// The CPU twin of kernels_cu/include/team.cuh: the blocks of a team run side by side, each on an OS thread.
#pragma once
#include "common.cuh"

inline unsigned team_member() { return TEAM == 1 ? 0 : blockIdx.x % TEAM; }
inline void team_barrier(SANDBOX_SITE) {
    if (TEAM == 1) cpu::sandbox_barrier(site);
    else cpu::sandbox_team_barrier(site);
}
inline void team_begin() {}
inline void team_begun(SANDBOX_SITE) {  // waiting for it is saying it
    if (TEAM > 1) cpu::sandbox_team_barrier(site);
}
template <class T>
inline T* of_teammate(T* own, unsigned member) {
    if (TEAM == 1) return own;
    const char* const there = cpu::sandbox_of_teammate(reinterpret_cast<const char*>(own), member);
    return reinterpret_cast<T*>(const_cast<char*>(there));
}
