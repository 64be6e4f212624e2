"""Everything that a spec in `kernels_cu/` may import from `sandbox`. No third-party package is imported."""

from .core import decode_tiles, head_groups, query_splits, wgmma_tiles
from .core.dtypes import ITEMSIZE
from .core.estimates import decode_us, keys_of_row, stream_k_us
from .core.kernel import (
    BLOCK_SMEM,
    COMPUTATIONS,
    HOPPER_SMS,
    ROW_INDEPENDENT,
    SM_SMEM,
    Arch,
    BoxRows,
    Computation,
    Dim3,
    Entry,
    Kernel,
)
from .core.key_splits import (
    ascending_from_0,
    best_splits,
    fields_of_splits,
    key_ranges,
    split_blocks,
    split_floats,
    split_us,
    splits_by_range,
)
from .core.normalise import Causal, cdiv, normalise_causal
from .core.operation import Operation, OperationProblem, Tensor
from .core.packed_gqa import packs, tiles_of_heads, work_tiles
from .core.problem import Problem
from .core.score import Score
from .core.stream_k import fields_of_stream_k, pays_to_split_last_wave, tiles_of_full_waves
from .core.tile import Tile
from .core.unsupported import (
    mask_of,
    unsupported_by_cp_async,
    unsupported_by_sm,
    unsupported_by_wgmma,
    unsupported_unless,
)

__all__ = [
    "BLOCK_SMEM",
    "COMPUTATIONS",
    "HOPPER_SMS",
    "ITEMSIZE",
    "ROW_INDEPENDENT",
    "SM_SMEM",
    "Arch",
    "BoxRows",
    "Causal",
    "Computation",
    "Dim3",
    "Entry",
    "Kernel",
    "Operation",
    "OperationProblem",
    "Problem",
    "Score",
    "Tensor",
    "Tile",
    "ascending_from_0",
    "best_splits",
    "cdiv",
    "decode_tiles",
    "decode_us",
    "fields_of_splits",
    "fields_of_stream_k",
    "head_groups",
    "key_ranges",
    "keys_of_row",
    "mask_of",
    "normalise_causal",
    "packs",
    "pays_to_split_last_wave",
    "query_splits",
    "split_blocks",
    "split_floats",
    "split_us",
    "splits_by_range",
    "stream_k_us",
    "tiles_of_full_waves",
    "tiles_of_heads",
    "unsupported_by_cp_async",
    "unsupported_by_sm",
    "unsupported_by_wgmma",
    "unsupported_unless",
    "wgmma_tiles",
    "work_tiles",
]
