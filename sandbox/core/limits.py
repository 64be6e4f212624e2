"""The largest numbers of rows, heads and pages that kernels support, and the largest head dimension of a backward."""

from __future__ import annotations

from .errors import UnsupportedProblem

# Kernels hold row numbers in int32 and form row + Sk - Sq + window bound, at most Sk + (Sq + Sk) and a tile:
# 3 * MOST_ROWS and a tile stay below 2^31.
MOST_ROWS = 2**29
MOST_INT32 = 2**31 - 1
GRADIENT_D = 256  # the largest head dimension of a backward kernel


def check_sizes(B: int, H: int, Sq: int, Sk: int) -> None:
    """Raises UnsupportedProblem for numbers of batch entries, heads or rows beyond the range of the kernels' int32."""
    for name, rows in (("Sq", Sq), ("Sk", Sk)):
        if rows > MOST_ROWS:
            raise UnsupportedProblem(
                f"{name}={rows} is not supported: kernels add row indices and the window's bound in int32, so the "
                f"limit is 2^29 = {MOST_ROWS} rows per batch entry; split the sequence and combine the partial outputs "
                "by their LSE"
            )
    check_count("B * H", B * H, "heads are counted in int32")


def check_count(name: str, count: int, why: str) -> None:
    """Raises UnsupportedProblem for a count beyond int32."""
    if count > MOST_INT32:
        raise UnsupportedProblem(f"{name} = {count} is not supported: {why}, at most 2^31 - 1; split the batch")
