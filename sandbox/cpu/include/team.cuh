// The CPU twin of kernels_cu/include/team.cuh: the blocks of a team run side by side, each on an OS thread.
#pragma once
#include "common.cuh"

inline unsigned team_member() { return TEAM == 1 ? 0 : blockIdx.x % TEAM; }
inline void team_barrier(SANDBOX_SITE) {
    if (TEAM == 1) cpu::sandbox_barrier(site);
    else cpu::sandbox_team_barrier(site);
}
template <class T>
inline const T* of_teammate(const T* own, unsigned member) {
    if (TEAM == 1) return own;
    return reinterpret_cast<const T*>(cpu::sandbox_of_teammate(reinterpret_cast<const char*>(own), member));
}
