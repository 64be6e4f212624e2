"""NumPy attention: the dense float64 reference, error bounds, and FlashAttention's tiled loops."""

from .bounds import GRADIENT_FACTOR, OUTPUT_FACTOR, errors, gradient_bound, lse_bound, max_error, output_bound
from .dense import attention, attention_backward, backward_magnitudes, naive, naive_backward, output_rounding
from .dropout import dropout_keep
from .flash import flash1, flash2
from .flash_backward import flash2_backward
from .gradients import Gradients
from .io_model import HbmBytes, hbm_bytes, paper_block_sizes
from .pages import gather_pages
from .rounding import round_to, ulp
from .score import Expressions, Options, Part, ScoreOptions
from .semantics import Shape, visible

__all__ = [
    "GRADIENT_FACTOR",
    "OUTPUT_FACTOR",
    "Expressions",
    "Gradients",
    "HbmBytes",
    "Options",
    "Part",
    "ScoreOptions",
    "Shape",
    "attention",
    "attention_backward",
    "backward_magnitudes",
    "dropout_keep",
    "errors",
    "flash1",
    "flash2",
    "flash2_backward",
    "gather_pages",
    "gradient_bound",
    "hbm_bytes",
    "lse_bound",
    "max_error",
    "naive",
    "naive_backward",
    "output_bound",
    "output_rounding",
    "paper_block_sizes",
    "round_to",
    "ulp",
    "visible",
]
