// bwd_wgmma.cu with the ideas of its mainloop as switches: include/bwd_consumer.cuh replaces the header of that name.
// bwd_ladder.py defines the switches, run.py enables one after another.
#define bwd_wgmma bwd_ladder
#define bwd_wgmma_scheduler bwd_ladder_scheduler
#define bwd_wgmma_postprocess bwd_ladder_postprocess
#include "../bwd_wgmma.cu"  // relative to kernels_cu/include
