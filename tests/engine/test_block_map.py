"""The block map: every bit is correct, forward and backward use it, and a wrong map changes the result."""

from __future__ import annotations

import dataclasses
import pickle
import random

import numpy as np
import pytest
from project import SEED

import sandbox
from sandbox import Score
from sandbox.core import block_map, registry
from sandbox.core.errors import SpecError, UnsupportedProblem
from sandbox.core.score import TensorLike
from sandbox.launch import driver
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Problem, Tile
from sandbox.verify import cases, check
from sandbox.verify.cases import Case

FORWARD = {"fwd_mma": "BLOCK_M=64,BLOCK_N=64,SUB_N=32,WARPS=4,MIN_BLOCKS=2",
           "fwd_wgmma": "BLOCK_M=128,BLOCK_N=64,STAGES=2,BLOCKS=3"}  # fmt: skip
BACKWARD = {"bwd_mma": "BLOCK_M=64,BLOCK_N=64,WARPS=4,MIN_BLOCKS=2", "bwd_wgmma": "BLOCK_M=64,BLOCK_N=128,STAGES=2"}
S = 300
DOC = (np.arange(S) // 128).astype(np.int32)
# Tiles of 64 are hidden or fully visible; the last is partial.
DOCUMENTS = Score(mask="doc(i) == doc(j)", tensors={"doc": DOC})
# No tile is fully visible; in later rows some columns of 16 keys are visible in partly visible tiles.
UNEVEN = Score(
    mask="part(i) == part(j) || (i >= 128 && j % 100 < 40)",
    tensors={"part": (np.arange(S) * 7 // 400).astype(np.int32)},
)


@pytest.mark.parametrize("name", ["fwd_wgmma", "fwd_wgmma_invariant"])
def test_work_tiles_of_several_pairs_of_rows(name: str) -> None:
    """128 queries see other 512 keys than the next ones, and element bits of hidden rows are not written: every tile
    computes the right result, or is rejected."""
    rng, mask = np.random.default_rng(3), np.zeros((1, 1, 384, 1024), bool)
    q, k, v = (rng.standard_normal((1, 1, n, 32)).astype(np.float16) for n in (384, 1024, 1024))
    mask[..., :128, 512:600] = mask[..., 128:256, 7:40] = mask[..., 256:, 700:800] = True
    ref, _ = sandbox.reference.attention(q, k, v, mask=mask)
    tried: dict[bool, set[int]] = {False: set(), True: set()}
    for tile in registry.get(name).tiles:
        right = True
        try:
            out = sandbox.attention(q, k, v, mask=mask, kernel=name, tile=tile)
            assert abs(out - ref).max() < 2e-3, tile
        except UnsupportedProblem:
            right = False
        tried[right].add(tile.BLOCK_M)
    assert tried[True] - {64} == {128}
    assert {192, 256} <= tried[False]


@pytest.mark.parametrize(
    "options",
    [
        {"mask": (1, 1, 200, 300)},
        {"mask": (1, 2, 200, 300), "causal": "bottom-right"},
        {"mask": (1, 2, 200, 1104), "Sk": 1104},  # rows of words of 16 bytes; of one
        {"mask": (1, 1, 200, 299), "Sk": 299, "causal": "bottom-right"},
        {"mask": (1, 2, 260, 500), "Sq": 260, "Sk": 500, "window": (20, 10)},
        {"mask": (2, 1, 200, 304), "Sk": 304, "causal": "top-left", "key_lengths": True},
        {"mask": (2, 1, 200, 1), "window": (60, 20)},
        {"mask": (2, 1, 1, 300)},
        {"mask": (2, 1, 200, 300), "score": Score(mask="far(h) < j", tensors={"far": TensorLike((2,), "int32")})},
        {"score": Score(mask="j <= i + 30"), "key_lengths": True, "causal": "bottom-right"},
        {"mask": (1, 1, 200, 300), "kv_dtype": "float8_e4m3", "descale": (1.0, (1, 2), 0.5)},
        {},
    ],
    ids=str,
)  # fmt: skip
def test_every_bit(options: dict, device: Device) -> None:
    B = 2 if any(n == 2 for n in options.get("mask", (2,))[:1]) else 1
    problem = dataclasses.replace(Problem(B, 2, 200, 300, 32, dtype="float16"), **options)
    result = check.verify(registry.get("block_map"), Case("block map", problem), device)
    assert result.ok, result


@pytest.mark.parametrize("score", [DOCUMENTS, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
@pytest.mark.sampled(8)
def test_kernels_walk_by_it(name: str, score: Score, device: Device) -> None:
    """Hidden, partly visible and fully visible tiles; with a window, some rows see no key. For the even map the CPU
    backend runs one sampled case."""
    kernel = registry.get(name)
    plain = Problem(1, 2, S, S, 32, Hk=1, dtype="float16", score=score)
    variants: list[dict] = [{"causal": "top-left"}, {"window": (70, 10)}, {"key_lengths": True, "B": 2, "alibi": (2,)}]
    if device == HOST and score is DOCUMENTS:
        variants = [random.Random(f"{SEED} {name}").choice(variants)]
    for options in variants:
        problem = dataclasses.replace(plain, **options)
        inputs = "hidden" if "window" in options else "normal"
        result = check.verify(kernel, Case(f"block map {options}", problem, inputs), device)
        assert result.ok, result


@pytest.mark.parametrize("sees_more", [0, 1])
@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
@pytest.mark.sampled(6)
def test_each_head_of_a_group_has_bits_of_its_own(name: str, sees_more: int, device: Device) -> None:
    """One head of a group sees all that the other does not: whole tiles, and the rest of tiles seen in part."""
    kernel = registry.get(name)
    score = Score(mask=f"h == {sees_more} || doc(i) == doc(j)", tensors={"doc": (np.arange(S) // 100).astype(np.int32)})
    problem = Problem(1, 2, S, S, 32, Hk=1, dtype="float16", score=score)
    result = check.verify(kernel, Case("heads of a group", problem), device)
    assert result.ok or (result.ok is None and device != HOST), result


def test_more_query_tiles_than_bits_of_a_word(device: Device) -> None:
    """In the Hopper backward. Of the tiles of 64 rows, one head sees all keys or none, the other some or none."""
    hidden = np.arange(66) % 5 == np.arange(2)[:, None]
    ends = np.where(hidden, 0, [[100], [128]]).astype(np.int32).repeat(64, 1)
    score = Score(mask="j < (h == 0 ? first(i) : second(i))", tensors={"first": ends[0], "second": ends[1]})
    problem = Problem(1, 2, ends.shape[1], 128, 16, Hk=1, dtype="float16", score=score)
    tile = Tile.parse(BACKWARD["bwd_wgmma"])
    result = check.verify(registry.get("bwd_wgmma"), Case("many query tiles", problem), device, tile)
    assert result.ok, result


@pytest.mark.parametrize("name", ["fwd_wgmma", "bwd_wgmma"])
def test_kernels_read_the_pairs_of_a_mask(name: str, device: Device) -> None:
    """One bit per pair, with a mask per head and a window."""
    kernel = registry.get(name)
    problem = Problem(1, 2, S, S - 60, 32, Hk=1, dtype="float16", mask=(1, 2, S, S - 60), window=(170, 30))
    result = check.verify(kernel, Case("mask", problem), device)
    assert result.ok or (result.ok is None and device != HOST), result


@pytest.mark.parametrize("name", ["block_map", "fwd_wgmma", "bwd_wgmma"])
def test_pairs_that_are_not_written_are_not_read(name: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 512 keys that a row of the map sees fully, or that it and its neighbour do not see."""
    seen = np.random.default_rng(0).random((5, 3)) < 0.5
    mask = seen.repeat(64, 0)[:S].repeat(512, 1)[:, :1300]
    mask[70, 9] = ~mask[70, 9]
    monkeypatch.setattr(cases, "score_inputs", lambda problem, seed=0: {"mask": mask[None, None]})
    problem = Problem(1, 2, S, 1300, 32, Hk=1, dtype="float16", mask=(1, 1, S, 1300))
    result = check.verify(registry.get(name), Case("mask", problem), device)
    assert result.ok or (result.ok is None and device != HOST), result


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + shape[-2]).standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("name", FORWARD)
def test_what_it_hides_is_not_visited(name: str) -> None:
    """The map of DOCUMENTS with a mask that hides nothing: only the map determines the result."""
    q, k, v = drawn(1, 2, S, 32), drawn(1, 2, S, 32), drawn(1, 2, S, 32)
    tile_map = sandbox.block_map(DOCUMENTS, Problem(1, 2, S, S, 32))
    score = Score(mask="on(i) || on(j)", tensors={"on": np.ones(S, bool)}).with_blocks(tile_map)
    hidden = np.where((DOC == 2)[:, None], np.float16(np.nan), k), np.where((DOC == 2)[:, None], np.float16(np.nan), v)
    out, lse = sandbox.attention_forward(q, *hidden, score=score, kernel=name, tile=FORWARD[name])
    true, true_lse = sandbox.reference.attention(q, k, v, score=DOCUMENTS)
    assert np.abs(out[:, :, :256] - true[:, :, :256]).max() < 2e-3
    assert np.abs(lse[:, :, :256] - true_lse[:, :, :256]).max() < 1e-3
    assert np.isnan(out[:, :, 256:]).all()  # these rows see NaN


def test_lists_of_many_tiles(device: Device) -> None:
    """Tiles of 16 keys, so that a work tile needs several tile lists: with all tiles, none, one, few or many; and more
    work tiles than blocks."""
    if device != HOST and driver.device(device[1]).arch != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    rows, tiles = 6, 107
    on = np.random.default_rng(0).random((rows, tiles)) < np.linspace(0, 1, rows)[:, None] ** 2
    on[1], on[3, 40:], on[4] = np.arange(tiles) == 33, False, np.arange(tiles) % 50 < 33
    score = Score(mask="on(i / 128, j / 16)", tensors={"on": on})
    q, k, v = drawn(1, 2, 128 * rows - 5, 32), drawn(1, 2, 16 * tiles - 3, 32), drawn(1, 2, 16 * tiles - 3, 32)
    backend = "cpu" if device == HOST else "cuda"
    for causal in (False, "top-left"):
        out, lse = sandbox.attention_forward(
            q, k, v, score=score, causal=causal, kernel="fwd_wgmma", tile="BLOCK_M=128,BLOCK_N=16,STAGES=2,BLOCKS=5",
            backend=backend,
        )  # fmt: skip
        true, true_lse = sandbox.reference.attention(q, k, v, score=score, causal=causal)
        assert np.abs(out - true).max() < 2e-3
        np.testing.assert_allclose(lse, true_lse, atol=1e-3)


@pytest.mark.parametrize("name", BACKWARD)
def test_what_it_hides_has_no_gradient(name: str) -> None:
    q, k, v, dout = drawn(1, 4, S, 32), drawn(1, 2, S, 32), drawn(1, 2, S, 32), drawn(1, 4, S, 32)
    tile_map = sandbox.block_map(DOCUMENTS, Problem(1, 4, S, S, 32, Hk=2))
    score = Score(mask="on(i) || on(j)", tensors={"on": np.ones(S, bool)}).with_blocks(tile_map)
    out, lse = sandbox.reference.attention(q, k, v, score=DOCUMENTS)
    given = dout, q, k, v, out.astype(np.float16), lse.astype(np.float32)
    found = sandbox.attention_backward(*given, score=score, kernel=name, tile=BACKWARD[name])
    for gradient, true in zip(found, sandbox.reference.attention_backward(dout, q, k, v, score=DOCUMENTS), strict=True):
        assert np.abs(gradient - true).max() < 1e-2


def test_what_it_shows_whole_is_not_looked_up() -> None:
    q, k, v = drawn(1, 1, S, 32), drawn(1, 1, S, 32), drawn(1, 1, S, 32)
    every = np.full(Problem(1, 1, S, S, 32, score=DOCUMENTS).block_map, -1, np.int32)
    for name, tile in FORWARD.items():
        out, _ = sandbox.attention_forward(q, k, v, score=DOCUMENTS.with_blocks(every), kernel=name, tile=tile)
        # The last key tile is partial: there fwd_mma evaluates the mask, too.
        seen = np.arange(S)[None] < (256 if name == "fwd_mma" else S)
        true, _ = sandbox.reference.attention(q, k, v, mask=(seen | (DOC[:, None] == DOC[None]))[None, None])
        assert np.abs(out - true).max() < 2e-3, name


def test_one_map_serves_many_calls() -> None:
    """PyTorch tensors, forward and backward."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(drawn(1, 2, S, 32)).requires_grad_() for _ in range(3))
    score = Score(UNEVEN.score, UNEVEN.mask, {"part": torch.from_numpy(UNEVEN.tensors["part"])})
    tile_map = sandbox.block_map(score, Problem(1, 2, S, S, 32))
    assert tile_map.dtype == torch.int32
    results = []
    for variant in (score, score.with_blocks(tile_map)):
        out = sandbox.attention(q, k, v, score=variant, causal=True)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for own, given in zip(*results, strict=True):
        assert (own - given).abs().max() < 1e-2
    assert torch.equal(results[0][0], results[1][0])


def test_what_does_not_fit_is_refused() -> None:
    q = drawn(1, 2, S, 32)
    tile_map = sandbox.block_map(DOCUMENTS, Problem(1, 2, S, S, 32))
    score = DOCUMENTS.with_blocks(tile_map)
    with pytest.raises(UnsupportedProblem, match="omit mask="):
        sandbox.attention_forward(q, q, q, score=score, mask=np.ones((S, S), bool))
    with pytest.raises(UnsupportedProblem, match="block_map returns for"):
        sandbox.attention_forward(q, q, q, score=DOCUMENTS.with_blocks(tile_map[:, :, :-1]))
    with pytest.raises(UnsupportedProblem, match="not supported for a Score without a mask: pass the score without"):
        sandbox.attention_forward(q, q, q, score=Score("x + 1").with_blocks(tile_map))
    with pytest.raises(UnsupportedProblem, match=r"the block map of score must be the int32 array that sandbox\.block"):
        sandbox.attention_forward(q, q, q, score=DOCUMENTS.with_blocks(tile_map.astype(np.float64)))
    rows, table, ends = q[0].swapaxes(0, 1), np.zeros((1, 1), np.int32), np.array([0, S], np.int32)
    with pytest.raises(UnsupportedProblem, match="not supported for a ragged batch: pass the score without"):
        sandbox.attention_varlen(rows, rows, rows, ends, score=score)
    with pytest.raises(UnsupportedProblem, match="not supported for a paged batch: pass the score without"):
        sandbox.attention_paged(q, rows[None], rows[None], table, ends[1:], score=score)
    with pytest.raises(UnsupportedProblem, match="block_table must be int32: dtype float64"):
        sandbox.attention_paged(q, rows[None], rows[None], table * 1.0, ends[1:])
    with pytest.raises(SpecError, match=r"problem=\(1, 2, 300, 300, 32\) must be a sandbox\.Problem, such as"):
        sandbox.block_map(DOCUMENTS, (1, 2, S, S, 32))
    with pytest.raises(SpecError, match="score='j <= i' must be a sandbox"):
        sandbox.block_map("j <= i", Problem(1, 2, S, S, 32))
    with pytest.raises(UnsupportedProblem, match="like is of type int, not an array"):
        sandbox.block_map(Score(mask="j <= i"), Problem(1, 2, S, S, 32), like=3)
    with pytest.raises(UnsupportedProblem, match=r"score\.t is of type TensorLike, not an array"):
        sandbox.block_map(Score(mask="t(j)", tensors={"t": TensorLike((S,), "bool")}), Problem(1, 2, S, S, 32))
    with pytest.raises(SpecError, match="hides no keys"):
        sandbox.block_map(Score("x + 1"), Problem(1, 2, S, S, 32))


def drawn_for(problem: Problem) -> tuple[np.ndarray, ...]:
    B, H, D = problem.B, problem.H, problem.D
    return drawn(B, H, problem.Sq, D), drawn(B, H, problem.Sk, D), drawn(B, H, problem.Sk, D)


# (mask, fields of the problem that a map is made for, fields of problems that it does not fit)
OTHERS = {
    "Sk": ("j <= i + 30", {"Sk": S}, [{"Sk": S - 10}, {"Sk": S + 212}]),
    "Sq": ("j <= i + 30", {"Sq": S}, [{"Sq": S - 10}, {"Sq": S + 20}]),
    "Sq by name": ("j <= Sq / 2", {"Sq": S}, [{"Sq": S - 10}]),
    "B": ("j <= i + 30 * b", {"B": 2}, [{"B": 1}]),
    "H": ("j <= i + 30 * h", {"H": 2}, [{"H": 1}]),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("planned", [False, True], ids=["first", "after the right one"])
@pytest.mark.sampled(6)
def test_a_map_of_another_problem_is_refused(name: str, planned: bool) -> None:
    """Even if the shape of the map, rounded up to tiles, fits. Also if a plan with a map of that shape exists, through
    PyTorch's operators, and from a pickle."""
    torch = pytest.importorskip("torch")
    mask, own, others = OTHERS[name]
    right = dataclasses.replace(Problem(1, 1, S, S, 32, dtype="float16"), **own)
    sandbox.reload()
    tile_map = sandbox.block_map(Score(mask=mask), right)
    for other in others:
        wrong = dataclasses.replace(right, **other)
        fitting = Score(mask=mask).with_blocks(sandbox.block_map(Score(mask=mask), wrong))
        score = Score(mask=mask).with_blocks(tile_map)
        arrays = drawn_for(wrong)
        if planned:
            sandbox.attention_forward(*arrays, score=fitting)
        assert fitting.made_for == (wrong.B, wrong.H, wrong.Sq, wrong.Sk)
        elsewhere = Score(score.score, score.mask, score.tensors, "elsewhere", score.blocks)
        for variant in (score, pickle.loads(pickle.dumps(score)), elsewhere):
            with pytest.raises(UnsupportedProblem, match="score has a block map"):
                sandbox.attention_forward(*arrays, score=variant)
        tensors = [torch.from_numpy(x) for x in arrays]
        score = Score(mask=mask).with_blocks(sandbox.block_map(Score(mask=mask), right, like=tensors[0]))
        with pytest.raises(UnsupportedProblem, match="score has a block map"):
            torch.func.functionalize(lambda q, k, v, score=score: sandbox.attention(q, k, v, score=score))(*tensors)


def test_what_the_mask_does_not_name_may_differ() -> None:
    """One map serves all batch entries and heads; one of padding serves every number of queries."""
    for mask, sizes in (("j <= i + 30", {"B": 2, "H": 3}), ("j < 200", {"B": 2, "H": 3, "Sq": 70})):
        score = Score(mask=mask)
        given = score.with_blocks(sandbox.block_map(score, Problem(1, 1, S, S, 32)))
        arrays = drawn_for(dataclasses.replace(Problem(1, 1, S, S, 32), **sizes))
        found = sandbox.attention_forward(*arrays, score=given)[0]
        assert np.array_equal(found, sandbox.attention_forward(*arrays, score=score)[0])


def test_a_map_by_hand_goes_by_its_shape() -> None:
    """For a copy of a map, the original problem is unknown."""
    tile_map = sandbox.block_map(DOCUMENTS, Problem(1, 1, S, S, 32))
    assert DOCUMENTS.with_blocks(tile_map).made_for == (1, 1, S, S)
    assert DOCUMENTS.with_blocks(tile_map.copy()).made_for is None
    assert DOCUMENTS.with_blocks(tile_map).with_blocks(tile_map.copy()).made_for is None
    q, k, v = drawn_for(Problem(1, 1, S, S, 32))
    expected = sandbox.attention_forward(q, k, v, score=DOCUMENTS)[0]
    assert np.array_equal(sandbox.attention_forward(q, k, v, score=DOCUMENTS.with_blocks(tile_map.copy()))[0], expected)


def test_nothing_is_kept_of_maps_that_are_gone() -> None:
    before = len(block_map._made)
    tile_map = [sandbox.block_map(DOCUMENTS, Problem(1, 1, S, S, 32)) for _ in range(3)]
    assert len(block_map._made) == before + 3
    del tile_map
    assert len(block_map._made) == before


def test_key_lengths_with_a_mask_that_names_Sk() -> None:
    """With one batch entry the shapes agree, but the map was made for all keys."""
    score = Score(mask="j >= Sk - 40")
    tile_map = sandbox.block_map(score, Problem(1, 1, S, S, 32))
    q, k, v = drawn_for(Problem(1, 1, S, S, 32))
    lengths = np.array([100], np.int32)
    with pytest.raises(UnsupportedProblem, match="its mask reads Sk, which with key_lengths differs"):
        sandbox.attention_forward(q, k, v, score=score.with_blocks(tile_map), key_lengths=lengths)
    given = Score(mask="j >= 30").with_blocks(sandbox.block_map(Score(mask="j >= 30"), Problem(1, 1, S, S, 32)))
    found = sandbox.attention_forward(q, k, v, score=given, key_lengths=lengths)[0]
    true = sandbox.reference.attention(q, k, v, score=Score(mask="j >= 30"), key_lengths=lengths)[0]
    assert np.abs(found - true).max() < 2e-3


@pytest.mark.parametrize("kind", ["a row of a wider one", "every second", "Fortran's", "not aligned", "of int64"])
def test_a_map_that_lies_otherwise_is_refused(kind: str) -> None:
    """Kernels read the map in units of 16 bytes, without strides."""
    sandbox.reload()
    tile_map = sandbox.block_map(DOCUMENTS, Problem(1, 1, S, S, 32))
    memory = np.empty(tile_map.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + 4
    lying = {
        "a row of a wider one": np.concatenate([tile_map, tile_map], -1)[..., : tile_map.shape[-1]],
        "every second": tile_map.repeat(2, 2)[:, :, ::2],
        "Fortran's": np.asfortranarray(tile_map),
        "not aligned": memory[start : start + tile_map.nbytes].view(np.int32).reshape(tile_map.shape),
        "of int64": tile_map.astype(np.int64),
    }[kind]
    lying[...] = tile_map
    q, k, v = drawn_for(Problem(1, 1, S, S, 32))
    with pytest.raises(UnsupportedProblem, match=r"the array that sandbox\.block_map returns for .* contiguous"):
        sandbox.attention_forward(q, k, v, score=DOCUMENTS.with_blocks(lying))


def test_the_compiler_carries_a_map() -> None:
    """Together with the sizes that it was made for."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in drawn_for(Problem(1, 2, S, S, 32)))
    sandbox.attention(q, k, v)
    score = Score(mask="j <= i + 30")
    tile_map = sandbox.block_map(score, Problem(1, 2, S, S, 32), like=q)
    expected = sandbox.attention(q, k, v, score=score)
    given = score.with_blocks(tile_map)
    compiled = torch.compile(lambda q: sandbox.attention(q, k, v, score=given), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q), expected)
    short = k[:, :, :290], v[:, :, :290]
    compiled = torch.compile(lambda q: sandbox.attention(q, *short, score=given), backend="aot_eager", fullgraph=True)
    with pytest.raises(UnsupportedProblem, match="was made for Sk=300, and this problem has Sk=290"):
        compiled(q)
