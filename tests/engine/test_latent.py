"""fwd_latent_wgmma: v is a view of the first columns of k."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from project import SEED, skip_without_wgmma

import sandbox
from sandbox.core import registry
from sandbox.core.limits import GRADIENT_D
from sandbox.engine import choose
from sandbox.launch.dlpack import Device
from sandbox.launch.tensor_maps import box_of
from sandbox.spec import Problem, Tile
from sandbox.verify import check, trial
from sandbox.verify.cases import Case, inputs_of

KERNEL = registry.get("fwd_latent_wgmma")
ABSORBED = Problem(2, 16, 1, 300, 576, Hk=1, Dv=512, dtype="bfloat16", latent=True)
CAUSAL: dict[str, Any] = {"Sq": 9, "causal": "bottom-right"}


@pytest.fixture(autouse=True)
def hopper(device: Device) -> None:
    skip_without_wgmma(KERNEL, ABSORBED, device)


def tile_of(blocks: int, Q_slabs: int = 6, stages: int = 5, cluster: int = 1) -> Tile:
    return Tile(BLOCK_M=64, BLOCK_N=64, STAGES=stages, Q_SLABS=Q_slabs, BLOCKS=blocks, CLUSTER=cluster)


def right(problem: Problem, device: Device, inputs: str = "normal", tile: Tile | None = None) -> None:
    result = check.verify(KERNEL, Case(inputs, problem, inputs), device, tile)
    assert result.ok, result


@pytest.mark.parametrize(
    ("inputs", "fields"),
    [
        ("normal", {"H": 128, "Sq": 2, "Sk": 500}),  # four row tiles
        ("large", {"Sk": 65, "dtype": "float16"}),
        ("rising", {"Sk": 640}),
        ("normal", {**CAUSAL, "H": 12, "Hk": 2, "Sk": 333, "key_lengths": True, "B": 3}),
        ("hidden", {**CAUSAL, "Sk": 256, "page_size": 64, "pages": 11}),
        ("hidden", {"Sk": 512, "page_size": 256, "B": 4, "sink": True}),
        ("inf", CAUSAL),
        ("hidden", {**CAUSAL, "window": (70, 0), "sink": True, "Sk": 150}),
        ("normal", {"Sk": 0}),
        ("normal", {**CAUSAL, "Sk": 3}),  # the first rows see no key
    ],
)
@pytest.mark.sampled(4)
def test_results(inputs: str, fields: dict[str, Any], device: Device) -> None:
    right(dataclasses.replace(ABSORBED, **fields), device, inputs)


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 64), (72, 40), (320, 256), (512, 512), (576, 384), (448, 320)])
@pytest.mark.sampled(3)
def test_widths(D: int, Dv: int, device: Device) -> None:
    """Without a rest of K, and with more slabs of V than Dv needs."""
    right(dataclasses.replace(ABSORBED, D=D, Dv=Dv, scale=None), device)


@pytest.mark.parametrize(("Q_slabs", "stages"), [(4, 4), (7, 5)])
def test_tiles(Q_slabs: int, stages: int, device: Device) -> None:
    """Where Q is, and how many keys are loaded ahead, changes no bit of the result."""
    problem = dataclasses.replace(ABSORBED, B=1, Sk=700)
    inputs = inputs_of("forward", Case("normal", problem))
    found = [
        trial.launch(KERNEL, tile, problem, inputs, device).outputs
        for tile in (tile_of(132), tile_of(132, Q_slabs, stages))
    ]
    assert all(found[0][name].tobytes() == found[1][name].tobytes() for name in ("O", "LSE"))


@pytest.mark.parametrize(
    ("inputs", "fields"),
    [
        ("normal", {"H": 128, "Sk": 500}),
        ("rising", {"H": 72, "Sk": 640, "dtype": "float16"}),
        ("normal", {**CAUSAL, "H": 20, "Hk": 2, "Sk": 333, "key_lengths": True, "B": 3}),
        ("hidden", {**CAUSAL, "Sq": 16, "Sk": 256, "page_size": 64, "pages": 11}),  # four row tiles
        ("hidden", {"H": 128, "Sk": 512, "page_size": 256, "B": 4, "sink": True}),
        ("inf", {**CAUSAL, "Sq": 7}),
        ("hidden", {**CAUSAL, "Sq": 7, "window": (70, 0), "sink": True, "Sk": 150}),
        ("normal", {"H": 128, "Sk": 0}),
        ("normal", {**CAUSAL, "Sq": 7, "Sk": 3}),  # the first rows see no key
        ("normal", {"H": 128, "D": 520, "Dv": 392, "scale": None}),
    ],
)
@pytest.mark.sampled(4)
def test_two_row_tiles_share_keys(inputs: str, fields: dict[str, Any], device: Device) -> None:
    """As one tile after the other, bit by bit where both end in the same key tile: each block has half of O of both."""
    problem = dataclasses.replace(ABSORBED, **fields)
    for blocks in (1, 132):
        tile = tile_of(blocks, 7, cluster=2)
        right(problem, device, inputs, tile)
        given = inputs_of("forward", Case(inputs, problem, inputs))
        found = [trial.launch(KERNEL, t, problem, given, device).outputs for t in (tile_of(blocks), tile)]
        assert all(found[0][name].tobytes() == found[1][name].tobytes() for name in ("O", "LSE"))


@pytest.mark.parametrize("blocks", [1, 3, 132])
@pytest.mark.sampled(2)
def test_splits(blocks: int, device: Device) -> None:
    """One block for all keys, and as many as there are key tiles; entries of different lengths share the blocks."""
    problem = dataclasses.replace(ABSORBED, Sq=3, H=20, Sk=900, causal="bottom-right")
    right(problem, device, tile=tile_of(blocks))
    right(dataclasses.replace(problem, key_lengths=True, B=3), device, tile=tile_of(blocks))


def test_nan_reaches_only_rows_that_see_it(device: Device) -> None:
    """NaN in a key that the last query sees; keys are divided among blocks."""
    problem = dataclasses.replace(ABSORBED, **CAUSAL)
    inputs = inputs_of("forward", Case("normal", problem))
    for name in "KV":
        inputs[name][1, 0, 299, 3] = np.nan
    found = trial.launch(KERNEL, tile_of(132), problem, inputs, device).outputs
    rows = np.isnan(found["O"].astype(np.float32)).any(axis=3)
    assert rows[1, :, 8].all()
    rows[1, :, 8] = False
    assert not rows.any()


def test_splits_fill_the_gpu() -> None:
    """With enough heads no keys are divided; otherwise all SMs have a block. Uniform lengths are divided alike."""
    of = lambda B, H, Sk, **more: Problem(B, H, 1, Sk, 576, Hk=1, Dv=512, dtype="bfloat16", latent=True, **more)  # noqa: E731
    tile = KERNEL.tiles[0]
    found = {p: KERNEL.numbers["splits"](p, tile) for p in (of(128, 128, 4096), of(32, 16, 16384), of(1, 16, 131072))}
    assert [*found.values()] == [1, 4, 128]
    for p, n in found.items():
        paged = dataclasses.replace(p, page_size=64)
        total, combine = KERNEL.numbers["splits"](paged, tile), KERNEL.then[0].grid(paged, tile)
        assert total == (0 if n == 1 else n * p.B)
        assert combine == (n > 1, p.H, p.B)
        assert KERNEL.grid(paged, tile)[2] == (p.B if n == 1 else (n + 1) * p.B)


def test_assigned_blocks_fit_the_grid() -> None:
    """The assignment on the device never exceeds the grid: part of every entry's last block may be empty."""
    rng, tile = random.Random(SEED), KERNEL.tiles[0]
    for _ in range(200):
        B, Sk = rng.randint(1, 200), rng.randint(64, 90000)
        problem = dataclasses.replace(ABSORBED, B=B, Sk=Sk, key_lengths=True)
        splits, (_, _, blocks) = KERNEL.numbers["splits"](problem, tile), KERNEL.grid(problem, tile)
        rounds = [max(1, -(-rng.randint(0, Sk) // tile.BLOCK_N)) for _ in range(B)]
        most = max(1, -(-sum(rounds) // max(splits, 1)))
        assert splits == 0 or sum(-(-n // most) for n in rounds) <= blocks, f"SANDBOX_SEED={SEED}: {problem}, {rounds}"


def test_selection() -> None:
    for p in (ABSORBED, dataclasses.replace(ABSORBED, page_size=64, Sk=4096), dataclasses.replace(ABSORBED, Sq=4096)):
        assert choose.choose_kernel(p, "forward", (9, 0)).name == KERNEL.name
        with pytest.raises(sandbox.UnsupportedProblem, match="head dimensions are at most 256"):
            choose.choose_kernel(p, "forward", (8, 0))
    narrow = dataclasses.replace(ABSORBED, D=128, Dv=64)
    assert choose.choose_kernel(narrow, "forward", (9, 0)).name != KERNEL.name
    assert max(k.max_D for k in registry.kernels().values() if k.computes == "backward") == GRADIENT_D


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"latent": False}, "v must be the view k[..., :Dv] of k, not a copy or another view (pass v=k[..., :Dv]"),
        ({"D": 640}, "D=640 is not supported: D is at most 576"),
        ({"B": 65536}, "B=65536 is not supported: the limit is 65535 (split the batch)"),
        ({"Dv": 576}, "Dv=576 is not supported: Dv is at most 512"),
        ({"softcap": 3.0}, ": softcap is not supported with latent attention: only causal, window, sink, key"),
        ({"softcap": 3.0, "alibi": (16,)}, "alibi and softcap are not supported with latent attention: only"),
        ({"D": 572}, "D=572 is not a multiple of 8: cp.async and TMA copy 16 bytes at a time (pad D with zeros to 576"),
    ],
)
def test_reasons(fields: dict[str, Any], reason: str) -> None:
    said = KERNEL.why_unsupported(dataclasses.replace(ABSORBED, **fields))
    assert said
    assert reason in said


def test_tensor_map_of_pages() -> None:
    """The batch dimension is the page, the rows those of a page."""
    p = dataclasses.replace(ABSORBED, Sk=256, page_size=64, pages=11)

    class Pages:
        pointer, strides = 4096, (64 * 576, 576, 576, 1)

    box = box_of("K", p, Pages(), 64)
    assert [*box.size] == [576, 64, 1, 11, 1]
    assert box.stride[2] == 64 * 576 * 2


@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.complete), "--shape 1,20/1,3,70,576/512 --causal"])
def test_run(more: str) -> None:
    """Its problems, and --shape, are of latent attention."""
    from sandbox.cli import cli

    result = CliRunner().invoke(cli, ["run", KERNEL.name, "--backend", "cpu", "--json", *more.split()])
    rows = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert [row["ok"] for row in rows] == [True] * (1 if more else 2)


# ---- public functions


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float16)


def test_attention_finds_the_view(device: Device) -> None:
    """Also by the route of an earlier call with the same shapes and strides, in both directions."""
    q, kv = drawn(2, 16, 1, 576), drawn(2, 1, 130, 576)
    other = np.concatenate([kv[..., :512], drawn(2, 1, 130, 64)], axis=3)
    expected, lse = sandbox.reference.attention(q, kv, kv[..., :512])
    for _ in range(3):
        out = sandbox.attention(q, kv, kv[..., :512], return_lse=True)
        assert abs(out[0] - expected).max() < 2e-3
        assert abs(out[1] - lse).max() < 1e-3
    for v in (other[..., :512], kv[..., 64:], np.ascontiguousarray(kv[..., :512])):
        with pytest.raises(sandbox.UnsupportedProblem, match=r"v must be the view k\[..., :Dv\] of k, not a copy"):
            sandbox.attention(q, kv, v)


def test_attention_of_torch() -> None:
    torch = pytest.importorskip("torch")
    q, kv = (torch.from_numpy(drawn(*shape)).bfloat16() for shape in ((1, 32, 2, 576), (1, 1, 70, 576)))
    expected = sandbox.reference.attention(q.float().numpy(), *(kv[..., :n].float().numpy() for n in (576, 512)))[0]
    for _ in range(3):
        assert abs(sandbox.attention(q, kv, kv[..., :512]).float().numpy() - expected).max() < 2e-2
    with pytest.raises(sandbox.UnsupportedProblem, match=r"v must be the view k\[..., :Dv\] of k"):
        sandbox.attention(q, kv, kv[..., :512].clone(memory_format=torch.preserve_format))
    q.requires_grad_()
    with pytest.raises(sandbox.UnsupportedProblem, match="latent attention is forward only"):
        sandbox.attention(q, kv, kv[..., :512])
    with torch.no_grad():
        sandbox.attention(q, kv, kv[..., :512])


def test_attention_paged_finds_the_view() -> None:
    q, pages = drawn(2, 16, 2, 576), drawn(9, 64, 1, 576)
    table, lengths = np.array([[3, 1, 7], [0, 8, 2]], np.int32), np.array([70, 192], np.int32)
    out = sandbox.attention_paged(q, pages, pages[..., :512], table, lengths, causal=True)
    keys = pages[table].reshape(2, 192, 1, 576).swapaxes(1, 2)
    expected = sandbox.reference.attention(q, keys, keys[..., :512], causal=True, key_lengths=lengths)[0]
    assert abs(out - expected).max() < 2e-3
    with pytest.raises(sandbox.UnsupportedProblem, match=r"v must be the view k\[..., :Dv\] of k"):
        sandbox.attention_paged(q, pages, pages[..., :512].copy(), table, lengths)
