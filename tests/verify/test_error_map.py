"""The error map recognises typical patterns of faults."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from project import check_stored, drawn, in_project

from sandbox.core import registry
from sandbox.reference import attention
from sandbox.spec import Problem, Tile
from sandbox.verify import error_map
from sandbox.verify.error_map import ErrorMap, locate

KERNEL, TILE = registry.get("fwd_minimal"), Tile(BLOCK_M=64, BLOCK_N=32)
PROBLEM = Problem(2, 3, 200, 200, 32)
BOUND = 1e-2


def non_finite(*where: object, value: float = 9.0, problem: Problem = PROBLEM, name: str = "O") -> ErrorMap:
    """The error map of random numbers, some of which are replaced by `value`."""
    rng = np.random.default_rng(1)
    ref = rng.standard_normal((problem.B, problem.H, problem.Sq, problem.D))
    got = ref.copy()
    got[where] = value  # type: ignore[index]
    found = locate(name, got, ref, BOUND, KERNEL, problem, TILE)
    assert found
    return found


every = slice(None)


def test_nothing_is_wrong() -> None:
    x = np.ones((1, 1, 4, 4))
    assert locate("O", x, x + BOUND / 2, BOUND, KERNEL, PROBLEM, TILE) is None
    assert locate("O", x, x, np.nan, KERNEL, PROBLEM, TILE) is not None  # a bound that is no number lets nothing pass


def test_one_element() -> None:
    found = non_finite(1, 2, 70, 5)
    assert (found.wrong, found.first, found.worst) == (1, (1, 2, 70, 5), (1, 2, 70, 5))
    assert "first at b 1, h 2, row 70, column 5: 9 instead of" in found.text
    assert "in 1 of 6 heads: (b 1, h 2)" in found.patterns
    assert found.heat.shape == (200, 32)
    assert (found.heat > 1).sum() == 1


@pytest.mark.parametrize(
    ("where", "phrase"),
    [
        ((every, every, slice(192, 200)), "the tail"),
        ((every, every, slice(64, 200, 64)), "a tile boundary: only the first row of a tile (BLOCK_M=64)"),
        ((every, every, slice(63, 192, 64)), "a tile boundary: only the last row"),
        ((every, every, slice(64, 128)), "only tiles 1 of 4"),
        ((every, every, slice(64, 96)), "a warp's rows: those of warp 0 of 2"),
        ((every, every, every, slice(16, 32)), "only columns 16-31 of 32"),
        ((every, every, every, slice(3, 32, 8)), "only columns c with c % 8 in 3"),
        ((every, slice(0, 1)), "in 2 of 6 heads: (b 0, h 0), (b 1, h 0)"),
        ((every,), "nearly everywhere"),
    ],
)
def test_shapes(where: tuple, phrase: str) -> None:
    found = non_finite(*where)
    assert any(said.startswith(phrase) for said in found.patterns), found.text
    assert phrase in found.text


def test_a_single_tile_has_no_tail() -> None:
    """With fewer rows than a tile, every row is in the partial tile."""
    problem = Problem(1, 1, 16, 16, 32)
    for where in ((every, every, slice(3, 5)), (every, every, 15), (every, every, every, 1)):
        found = non_finite(*where, problem=problem)
        assert not any("tail" in said or "warp" in said for said in found.patterns), found.text


def test_rows_of_keys_come_in_other_tiles() -> None:
    assert any("BLOCK_N=32" in said for said in non_finite(every, every, slice(32, 200, 32), name="dK").patterns)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 200), (2, 3, 200, 32), (1, 3, 1, 32), (1, 1, 200, 1), ()])
@pytest.mark.parametrize("causal", [False, "bottom-right"])
def test_an_output_of_any_shape(shape: tuple[int, ...], causal, tmp_path: Path) -> None:
    """The gradient of a sink has one element per head, that of a bias the shape of the bias."""
    problem = dataclasses.replace(PROBLEM, causal=causal)
    ref = np.random.default_rng(1).standard_normal(shape)
    got, last = ref.copy(), tuple(n - 1 for n in shape)
    got[last] = 9.0
    for name in ("dsink", "O"):
        found = locate(name, got, ref, BOUND, KERNEL, problem, TILE)
        assert found
        assert (found.wrong, found.of, found.first, found.worst) == (1, ref.size, last, last)
        assert found.heat.max() == found.heat[-1, -1] > 1
    if shape == (3,):
        assert "first at h 2: 9 instead of" in found.text
        assert "row" not in found.text.lower()
        pytest.importorskip("matplotlib")
        error_map.draw(found, "heads alone", tmp_path / "map")


@pytest.mark.parametrize(
    ("seeing", "worse", "factor", "wrong", "said"),
    [
        (40, 3, 3.0, 40, True),  # an eighth is five rows: three of them are most
        (40, 2, 3.0, 40, False),
        (40, 3, 2.05, 40, True),
        (40, 3, 1.95, 40, False),
        (40, 3, 3.0, 21, True),  # more than half of the rows are wrong
        (40, 3, 3.0, 20, False),
        (16, 2, 3.0, 16, True),  # at least 16 rows
        (15, 2, 3.0, 15, False),
    ],
)
def test_worst_where_a_row_sees_few_keys(seeing: int, worse: int, factor: float, wrong: int, said: bool) -> None:
    """Of 200 rows the last `seeing` see a key. The first `worse` of them have `factor` times the error of the other
    wrong ones, which are the last."""
    problem = Problem(1, 1, 200, seeing, 4, causal="bottom-right")
    ref = np.ones((1, 1, 200, 4))
    got = ref.copy()
    got[:, :, 200 - wrong + worse :] += 2 * BOUND
    got[:, :, 200 - seeing :] += BOUND / 2
    got[:, :, 200 - seeing :][:, :, :worse] = 1 + 2.5 * BOUND * factor
    found = locate("O", got, ref, BOUND, KERNEL, problem, TILE)
    assert found
    assert ("worst where a row sees few keys" in found.patterns) is said, found.text


def test_nan_is_named() -> None:
    assert f"{8 * 6 * 32} of them NaN" in non_finite(every, every, slice(192, 200), value=np.nan).text


def test_an_infinite_reference_is_no_error_by_itself() -> None:
    ref = np.full((1, 1, 8), -np.inf)
    bound = np.zeros_like(ref)
    problem = Problem(1, 1, 8, 0, 32)
    assert locate("LSE", ref, ref, bound, KERNEL, problem, TILE) is None
    got = ref.copy()
    got[0, 0, 3] = 0.0
    found = locate("LSE", got, ref, bound, KERNEL, problem, TILE)
    assert found
    assert found.first == found.worst == (0, 0, 3)
    assert "row 3: 0 instead of -inf" in found.text
    assert "Row 3" in found.text


MASKS = {"one more": "sees one key too many", "one less": "misses its last key", "none": "as without a causal mask",
         "other corner": "aligned top-left"}  # fmt: skip


@pytest.mark.parametrize("fault", [*MASKS, "scale", "sum", "first tile"])
@pytest.mark.parametrize("name", ["O", "LSE"])
def test_only_a_wrong_mask_is_reported_as_the_diagonal(fault: str, name: str) -> None:
    """Errors of a row sum that starts at 1, or of a wrong first key tile, are also largest in rows with few keys."""
    Sq, Sk = 170, 200
    problem = Problem(1, 2, Sq, Sk, 32, Hk=1, causal="bottom-right", alibi=(2,))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, h, n, 32)) for h, n in ((2, Sq), (1, Sk), (1, Sk)))
    slopes = np.array([0.1, 0.2])
    i, j = np.arange(Sq)[:, None] + Sk - Sq, np.arange(Sk)[None, :]
    seen = {"one more": j <= i + 1, "one less": j < i, "none": j < Sk, "other corner": j <= i + Sq - Sk}
    k_read, factor = k.copy(), 1.0
    if fault == "first tile":
        k_read[:, :, :32] = k[:, :, 32:64]
    ref = attention(q, k, v, causal=True, alibi=slopes)
    scale = 2 / np.sqrt(32) if fault == "scale" else None
    got_O, got_LSE = attention(q, k_read, v, mask=seen.get(fault, j <= i), scale=scale, alibi=slopes)
    if fault == "sum":
        factor = 1 / (1 + np.exp(-got_LSE))
        got_O, got_LSE = got_O * factor[..., None], np.logaddexp(got_LSE, 0)
    given = {"Q": q, "K": k, "V": v, "slopes": slopes}
    got, true = (got_O, ref[0]) if name == "O" else (got_LSE, ref[1])
    bound = BOUND if name == "O" else np.full_like(true, BOUND)
    found = locate(name, got, true, bound, KERNEL, problem, TILE, given)
    assert found
    said = [phrase for phrase in found.patterns if "diagonal" in phrase]
    assert [MASKS[fault] in phrase for phrase in said] == [True] * (fault in MASKS), found.text


def test_rows_that_see_no_key() -> None:
    problem = Problem(1, 2, 200, 150, 32, causal="bottom-right")
    found = non_finite(every, every, slice(0, 50), problem=problem)
    assert "only rows that see no key" in found.patterns


def test_a_whole_last_tile_is_no_tail() -> None:
    """If the number of rows is a multiple of BLOCK_M, no tile is partial."""
    problem = Problem(1, 1, 192, 192, 32)
    assert "only tiles 2 of 3 (BLOCK_M=64)" in non_finite(0, 0, slice(128, 192), problem=problem).patterns
    assert "only tiles 0 of 3 (BLOCK_M=64)" in non_finite(0, 0, slice(0, 64), problem=problem).patterns
    assert not any("tile" in said for said in non_finite(0, 0, slice(0, 192, 5), problem=problem).patterns)


@pytest.mark.parametrize(("Sq", "edges"), [(200, [63.5, 127.5, 191.5]), (192, [63.5, 127.5]), (40, [])])
def test_the_edges_of_tiles_are_drawn(Sq: int, edges: list[float], tmp_path: Path, monkeypatch) -> None:
    """The plot has a line between the last row of each tile and the first of the next."""
    axes = pytest.importorskip("matplotlib.axes")
    drawn: list[float] = []
    monkeypatch.setattr(axes.Axes, "axhline", lambda self, y, **style: drawn.append(y))
    error_map.draw(non_finite(0, 0, 5, problem=Problem(1, 1, Sq, Sq, 32)), "edges", tmp_path / "map")
    assert drawn == edges


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = non_finite(every, every, slice(192, 200), value=np.nan)
    paths = error_map.draw(found, "fwd_minimal", tmp_path / "new" / "map")
    assert [path.name for path in paths] == ["map.png", "map.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    text = paths[1].read_text()
    again = error_map.draw(found, "fwd_minimal", tmp_path / "again")
    assert again[1].read_text() == text  # the same faults give the same file


def test_stored_maps() -> None:
    """The whole text of maps, and what is drawn."""
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(3)
    scattered = tuple(rng.integers(0, n, 40) for n in (2, 3, 200, 32))
    faults = [
        non_finite(*where, name=name)
        for name in ("O", "dK")
        for where in (
            (1, 2, 70, 5), (every, every, slice(192, 200)), (every, every, slice(0, 200, 64)),
            (0, every, slice(70, 90)),
            (every, every, slice(63, 192, 64)), (every, every, every, slice(3, 32, 8)), (every, 1), (every,), scattered,
            (every, every, every, slice(16, 32)), (0, 1, [0, 63, 64, 199]), (0, 0, slice(0, 200, 3), 1),
        )
    ]  # fmt: skip
    lines = [f"{found.tile_rows} {found.text}" for found in faults]
    lines += drawn(lambda: error_map.draw(faults[0], "title", ""))[:7]
    rows = non_finite(0, 0, 5, value=1e9, problem=Problem(1, 1, 130, 130, 4))
    lines += drawn(lambda: error_map.draw(rows, "title", ""))[:6]
    check_stored("error_maps.txt", lines)


def test_the_command_line_says_where_and_draws(project_copy: Path) -> None:
    pytest.importorskip("matplotlib")
    source = project_copy / "kernels_cu" / "fwd_minimal.cu"
    text = source.read_text()
    source.write_text(text.replace("if (query_row >= head.Sq) return;", "if (query_row >= head.Sq - 1) return;"))
    assert source.read_text() != text
    arguments = ("fwd_minimal", "--shape", "1,1,130,40,16", "--backend", "cpu", "--map", str(project_copy / "map"))
    done = in_project(project_copy, "sandbox", "run", *arguments)
    assert done.returncode == 1, done.stderr
    assert "O is wrong in 16 of 2080 elements, 16 of them NaN (or never written)" in done.stdout
    assert "the tail" in done.stdout
    assert done.stderr.splitlines()[-2:] == [f"wrote {project_copy / 'map'}.{kind}" for kind in ("png", "svg")]
    (row,) = json.loads(in_project(project_copy, "sandbox", "run", *arguments, "--json").stdout)
    assert row["where"]["first"] == [0, 0, 129, 0]
    assert "heat" not in row["where"]


def test_a_factor_is_seen() -> None:
    rng = np.random.default_rng(1)
    ref = rng.standard_normal((1, 1, 64, 32))
    found = locate("O", 0.5 * ref, ref, BOUND, KERNEL, PROBLEM, TILE)
    assert found
    assert "0.5 times the expected values" in found.patterns


# ---- from where on a pattern is named


def where_wrong(*wrong: Any, shape: tuple[int, ...] = (1, 1, 200, 32), name: str = "O", tile: Tile = TILE) -> ErrorMap:
    """The map of zeros, some of which are 9."""
    got = np.zeros(shape)
    for index in wrong:
        got[index] = 9.0
    found = locate(name, got, np.zeros(shape), BOUND, KERNEL, Problem(1, 1, 200, 200, 32), tile)
    assert found
    return found


@pytest.mark.parametrize(
    ("rows", "phrase"),
    [
        (slice(192, 193), "the tail: only rows of the last, partial tile (BLOCK_M=64)"),
        ([190, 192], "only tiles 2-3 of 4 (BLOCK_M=64)"),
        ([191], "a tile boundary: only the last row of a tile (BLOCK_M=64)"),
        ([64], "a tile boundary: only the first row of a tile (BLOCK_M=64)"),
        ([63, 128], "a tile boundary: only the first or last row of a tile (BLOCK_M=64)"),
        ([64, 66], "only tiles 1 of 4 (BLOCK_M=64)"),
        ([0, 66, 199], "only tiles 0-1, 3 of 4 (BLOCK_M=64)"),
        ([0, 66, 130, 199], ""),
    ],
)
def test_rows_of_tiles(rows: Any, phrase: str) -> None:
    patterns = [said for said in where_wrong(np.s_[:, :, rows]).patterns if "tile" in said and "warp" not in said]
    assert patterns == ([phrase] if phrase else [])


@pytest.mark.parametrize(
    ("S", "row", "phrase"),
    [
        (64, 0, ""),  # a single tile
        (65, 64, "the tail"),
        (65, 0, "a tile boundary"),
        (63, 0, ""),
        (63, 62, ""),
        (128, 127, "a tile boundary"),
    ],
)
def test_rows_of_few_tiles(S: int, row: int, phrase: str) -> None:
    patterns = where_wrong(np.s_[:, :, row], shape=(1, 1, S, 32)).patterns
    assert [said.partition(":")[0] for said in patterns if "warp" not in said] == ([phrase] if phrase else [])


@pytest.mark.parametrize(
    ("rows", "phrase"),
    [
        (slice(32, 64), "a warp's rows: those of warp 1 of 2, if each has 32 rows of a tile"),
        ([*range(32, 48), *range(112, 128)], "a warp's rows: those of warp 1 of 2, if each has 32 rows of a tile"),
        ([*range(32, 48), *range(112, 127)], ""),  # not all of its rows
        ([0, 1, 31], ""),
        ([31, 32], ""),
        ([33], ""),  # one row is no pattern
    ],
)
def test_rows_of_warps(rows: Any, phrase: str) -> None:
    assert [said for said in where_wrong(np.s_[:, :, rows]).patterns if "warp" in said] == ([phrase] if phrase else [])


def test_warps_of_a_larger_block() -> None:
    """fwd_minimal has a thread for each row: one warp has no pattern, and of four two at most."""
    of = lambda rows, M: where_wrong(np.s_[:, :, rows], tile=Tile(BLOCK_M=M, BLOCK_N=32)).patterns  # noqa: E731
    assert "a warp's rows: those of warp 1-2 of 4, if each has 32 rows of a tile" in of(slice(32, 96), 128)
    assert not any("warp" in said for said in of(slice(20, 90), 128))
    assert not any("warp" in said for said in of(slice(3, 9), 32))


@pytest.mark.parametrize(
    ("columns", "phrase"),
    [
        (slice(0, 32), ""),
        ([5], "only columns 5 of 32"),
        (slice(5, 32), "only columns 5-31 of 32"),
        (slice(1, 32, 2), "only columns c with c % 2 in 1"),
        (slice(2, 32, 4), "only columns c with c % 4 in 2"),
        ([*range(0, 32, 8), *range(3, 32, 8)], "only columns c with c % 8 in 0, 3"),
        ([*range(4, 8), *range(20, 24)], "only columns c with c % 16 in 4-7"),
        ([3, 7, 9], "only columns 3, 7, 9"),
        ([0, 2, 4, 6, 8], "only columns 0, 2, 4, 6 and 1 more runs"),
        ([0, 1, 3, 4, 7, 9], "only columns 0-1, 3-4, 7, 9"),
    ],
)
def test_columns(columns: Any, phrase: str) -> None:
    patterns = [said for said in where_wrong(np.s_[..., columns]).patterns if "columns" in said]
    assert patterns == ([phrase] if phrase else [])


@pytest.mark.parametrize(
    ("heads", "phrase"),
    [
        ([(0, 1)], "in 1 of 6 heads: (b 0, h 1)"),
        ([(0, 1), (1, 0), (1, 2)], "in 3 of 6 heads: (b 0, h 1), (b 1, h 0), (b 1, h 2)"),
        ([(0, 0), (0, 1), (1, 0), (1, 2)], "in 4 of 6 heads: (b 0, h 0), (b 0, h 1), (b 1, h 0) …"),
        ([*np.ndindex(2, 3)], ""),
    ],
)
def test_heads(heads: list[tuple[int, int]], phrase: str) -> None:
    found = where_wrong(*((b, h, 5, 5) for b, h in heads), shape=(2, 3, 200, 32))
    assert [said for said in found.patterns if "heads" in said] == ([phrase] if phrase else [])


@pytest.mark.parametrize(("rows", "nearly"), [(181, True), (180, False)])
def test_nearly_everywhere(rows: int, nearly: bool) -> None:
    """More than nine of ten elements."""
    assert ("nearly everywhere" in where_wrong(np.s_[:, :, :rows]).patterns) is nearly


@pytest.mark.parametrize(
    ("wrong", "low", "named"),
    [(16, 2.0, True), (15, 2.0, False), (64, 1.795, True), (64, 1.785, False)],
)
def test_a_constant_factor(wrong: int, low: float, named: bool) -> None:
    """Of at least 16 elements, to a tenth."""
    ref = np.ones((1, 1, 64, 1))
    got = ref.copy()
    got[:, :, :wrong] = np.linspace(low, 2, wrong)[:, None]
    found = locate("O", got, ref, BOUND, KERNEL, PROBLEM, TILE)
    assert found
    factors = [said for said in found.patterns if "expected values" in said]
    assert bool(factors) is named


def test_small_elements_do_not_count_for_a_factor() -> None:
    """Less than a tenth of the largest."""
    ref = np.full((1, 1, 64, 1), 10.0)
    ref[:, :, 32:] = 0.9
    got = np.where(ref == 10, 3 * ref, -50)
    found = locate("O", got, ref, BOUND, KERNEL, PROBLEM, TILE)
    assert found
    assert "3 times the expected values" in found.patterns


# ---- which element is worst


def test_the_worst_element_is_that_with_the_largest_ratio() -> None:
    """Of those that are wrong; with a bound for each."""
    ref, bound = np.zeros((1, 1, 4, 2)), np.full((1, 1, 4, 2), 1.0)
    got = ref.copy()
    bound[0, 0, 0], got[0, 0, 0, 0] = 100, 90  # correct
    got[0, 0, 1, 1] = 5
    bound[0, 0, 2, 0], got[0, 0, 2, 0] = 0.5, 4
    bound[0, 0, 3, 1], got[0, 0, 3, 1] = 2, 9
    found = locate("O", got, ref, bound, KERNEL, PROBLEM, TILE)
    assert found
    assert (found.wrong, found.of, found.first, found.worst) == (3, 8, (0, 0, 1, 1), (0, 0, 2, 0))
    assert found.heat.tolist() == [[0.9, 0], [0, 5], [8, 0], [0, 4.5]]
    assert found.text.startswith(
        "O is wrong in 3 of 8 elements, first at b 0, h 0, row 1, column 1: 5 instead of 0; worst at b 0, h 0, row 2, "
        "column 0: 4 instead of 0. Rows 1-3."
    )


def test_a_bound_of_zero() -> None:
    """An element that is equal has ratio 0, another one infinity."""
    ref = np.zeros((1, 1, 2, 1))
    got = ref.copy()
    got[0, 0, 1] = 1
    found = locate("O", got, ref, 0.0, KERNEL, PROBLEM, TILE)
    assert found
    assert found.heat.tolist() == [[0], [np.inf]]


@pytest.mark.parametrize(
    ("at", "text"), [((), ""), ((3,), "h 3"), ((1, 3), "b 1, h 3"), ((1, 3, 5, 7), "b 1, h 3, row 5, column 7")]
)
def test_an_index_as_text(at: tuple[int, ...], text: str) -> None:
    assert error_map.index_text(at) == text


def test_nan_that_is_expected_is_not_unwritten() -> None:
    """Unless other wrong elements should be numbers."""
    ref = np.zeros((1, 1, 4, 1))
    ref[0, 0, 0] = np.nan
    got = np.zeros_like(ref)
    found = locate("O", got, ref, BOUND, KERNEL, PROBLEM, TILE)
    assert found
    assert "never written" not in found.text
    got[0, 0, 2] = np.nan
    found = locate("O", got, ref, BOUND, KERNEL, PROBLEM, TILE)
    assert found
    assert "in 2 of 4 elements, 1 of them NaN (or never written), first" in found.text
