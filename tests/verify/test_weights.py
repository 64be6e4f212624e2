"""The causes that follow from attention weights: from where on each is named, and with which numbers."""

from __future__ import annotations

import numpy as np
import pytest

from sandbox.verify import weights
from sandbox.verify.weights import Cause, Weights

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN: not compared
Array = np.ndarray
N = 32  # keys of a tile
STAGE = "stage, its address or its barrier is that of another tile"


def softmax(x: Array, seen: Array) -> tuple[Array, Array]:
    x = np.where(seen, x, -np.inf)
    lse = np.log(np.exp(x).sum(1))
    return np.exp(x - lse[:, None]), lse


def sample(Sq: int = 64, Sk: int = 128, causal: bool = False, tile: int = N, steps: int = 0) -> Weights:
    """The weights of a correct kernel for random scores: sums of `steps` products with random parts."""
    rng = np.random.default_rng(0)
    parts = 0.7 * rng.standard_normal((steps, steps, Sq, Sk))
    scores = np.einsum("ssij->ij", parts) if steps else rng.standard_normal((Sq, Sk))
    seen = np.arange(Sk)[None] <= np.arange(Sq)[:, None] + (Sk - Sq if causal else Sk)
    P, lse = softmax(scores, seen)
    return Weights(P.copy(), P, lse.copy(), lse, scores, parts, seen, tile, tile)


def said(cause: Cause | None) -> str:
    return cause.what if cause else ""


# ---- masks


def with_hidden(w: Weights, seen: Array) -> Weights:
    """The kernel applies the mask `seen`."""
    got, lse = softmax(w.scores, seen)
    return w._replace(got=got, lse=lse)


ROW, KEY = np.arange(64)[:, None], np.arange(128)[None]
DIAGONAL = ROW + 64  # the last key of each row
ALL_BUT_ONE = ROW + KEY > 0
HIDDEN = "keys that the mask hides have a weight"


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (KEY <= DIAGONAL + 1, "each row sees one key too many, the one after its last"),
        (KEY <= DIAGONAL + 2,
         f"{HIDDEN} (row 0 reads key 66): the mask is not applied in the tile on the diagonal"),
        (KEY // N <= DIAGONAL // N,
         f"{HIDDEN} (row 0 reads key 95): the mask is not applied in the tile on the diagonal"),
        (KEY < 128,
         f"{HIDDEN} (row 0 reads key 127): the mask is not applied in the row"),
        ((KEY <= DIAGONAL) | (ROW >= 40),  # the tile on the diagonal is the last one
         f"{HIDDEN} (row 40 reads key 127): the mask is not applied in the row"),
        ((KEY <= DIAGONAL) | (KEY == 127) & (ROW < 9),
         f"{HIDDEN} (row 0 reads key 127): the mask is not applied in the row"),
        (KEY <= DIAGONAL, ""),
    ],
)  # fmt: skip
def test_hidden_keys(seen: Array, expected: str) -> None:
    found = weights.hidden_keys_have_weight(with_hidden(sample(causal=True), seen))
    assert said(found) == expected
    assert found is None or found.lines == weights.MASK
