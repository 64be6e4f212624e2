"""The dropout mask: Philox, the fraction of kept elements, and the independence of neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from sandbox.reference import dropout_keep
from sandbox.reference.dropout import dropout_threshold, keep_tile, philox


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers of Random123's kat_vectors, philox4x32, 7 rounds
        ((0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822,
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)  # fmt: skip
def test_philox_gives_the_known_answers(counter: tuple, key: int, expected: tuple) -> None:
    assert tuple(int(word[0]) for word in philox(words(*counter), key)) == expected


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_fraction_of_kept_elements(p: float) -> None:
    kept = dropout_keep(7, 2, 5, 1000, 1000, p)
    spread = np.sqrt(p * (1 - p) / kept.size)
    assert abs(kept.mean() - (1 - p)) <= 5 * spread + 2**-17


@pytest.mark.parametrize("shift", [(0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 8, 0), (0, 0, 0, 8)])
def test_neighbours_are_independent(shift: tuple[int, int, int, int]) -> None:
    kept = dropout_keep(-3, 4, 4, 512, 512, 0.5).astype(np.float64) - 0.5
    here = kept[tuple(slice(0, n - s) for n, s in zip(kept.shape, shift, strict=True))]
    there = kept[tuple(slice(s, n) for n, s in zip(kept.shape, shift, strict=True))]
    assert abs((here * there).mean() * 4) <= 5 / np.sqrt(here.size)


def test_the_mask_depends_on_seed_and_position_only() -> None:
    whole = dropout_keep(11, 2, 3, 70, 90, 0.3)
    assert (whole[:1, :2, :33, :41] == dropout_keep(11, 1, 2, 33, 41, 0.3)).all()
    for other in (12, 11 + 2**32, -11):
        assert (whole != dropout_keep(other, 2, 3, 70, 90, 0.3)).any()


def test_keep_tile_is_a_part_of_the_mask() -> None:
    whole = dropout_keep(5, 2, 3, 70, 90, 0.3)
    for m0, n0, rows, cols in ((0, 0, 70, 90), (16, 32, 16, 16), (3, 17, 40, 1), (69, 89, 1, 1), (7, 8, 0, 5)):
        tile = keep_tile(5, 1, 2, m0, rows, n0, cols, 0.3)
        np.testing.assert_array_equal(tile, whole[1, 2, m0 : m0 + rows, n0 : n0 + cols])


def test_the_layout_of_the_definition() -> None:
    """Element by element, from the words of its Philox call."""
    seed, p = 2**40 + 9, 0.37
    kept = dropout_keep(seed, 2, 2, 35, 21, p)
    for b, h, i, j in np.ndindex(kept.shape):
        lane = 4 * (i % 8) + j % 8 // 2
        call = [int(word[0]) for word in philox(words(i // 16 * 32 + lane, j // 16, h, b), seed)]
        element = 4 * (j // 8 % 2) + 2 * (i // 8 % 2) + j % 2
        bits = call[element // 2] >> 16 * (element % 2) & 0xFFFF
        assert kept[b, h, i, j] == (bits >= dropout_threshold(p))


def test_probabilities_0_and_1() -> None:
    assert dropout_keep(1, 1, 1, 50, 50, 0.0).all()
    assert not dropout_keep(1, 1, 1, 50, 50, 1.0).any()
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="must be a probability"):
            dropout_threshold(p)
