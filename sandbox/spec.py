"""What a spec in `kernels_cu/` may import, and all that it imports: nothing behind it is third-party code."""

from .core.dtypes import ITEMSIZE
from .core.integers import cdiv
from .core.kernel import COMPUTATIONS, Arch, Computation, Dim3, Entry, Kernel
from .core.normalise import Causal, normalise_causal
from .core.problem import Problem
from .core.refusals import refused_by_copies, refused_by_wgmma
from .core.score import Score
from .core.tile import Tile

__all__ = [
    "COMPUTATIONS",
    "ITEMSIZE",
    "Arch",
    "Causal",
    "Computation",
    "Dim3",
    "Entry",
    "Kernel",
    "Problem",
    "Score",
    "Tile",
    "cdiv",
    "normalise_causal",
    "refused_by_copies",
    "refused_by_wgmma",
]
