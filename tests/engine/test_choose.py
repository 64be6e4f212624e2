"""Which kernel `attention` chooses by itself."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from project import check_stored, digest, drawn_problem, is_stored

from sandbox.core import log, registry
from sandbox.core.errors import SpecError, UnsupportedProblem
from sandbox.core.kernel import Kernel
from sandbox.engine import choose
from sandbox.launch.arguments import OPTIONAL_OUTPUTS, scratch_of
from sandbox.spec import Problem, Tile

HOPPER = (9, 0)
ATTENTION = {name: kernel for name, kernel in registry.kernels().items() if not kernel.custom}


@pytest.mark.parametrize(
    ("problem", "deterministic", "name"),
    [
        (Problem(8, 32, 2048, 2048, 64, dtype="float16"), False, "bwd_wgmma"),
        (Problem(4, 16, 4096, 4096, 128, dtype="float16"), False, "bwd_wgmma_stream_k"),
        (Problem(4, 16, 4096, 4096, 128, dtype="float16"), True, "bwd_wgmma_deterministic"),
        (Problem(4, 32, 4096, 4096, 64, dtype="float16"), True, "bwd_wgmma_deterministic"),
        (Problem(16, 32, 512, 512, 64, dtype="bfloat16", causal="bottom-right"), False, "bwd_wgmma_persistent"),
        (Problem(1, 8, 128, 128, 64, dtype="float16"), False, "bwd_wgmma_head"),
        # Fewer n_blocks of key/value heads than SMs, but not of query heads.
        (Problem(1, 16, 1024, 1024, 128, Hk=4, dtype="bfloat16"), False, "bwd_wgmma_split_group"),
        (Problem(1, 16, 1024, 1024, 128, Hk=4, dtype="bfloat16"), True, "bwd_wgmma_deterministic"),
        (Problem(1, 16, 1024, 1024, 128, Hk=4, dtype="bfloat16", mask=(1, 1, 1024, 1024)), False, "bwd_wgmma"),
        (
            Problem(1, 32, 4096, 4096, 128, Hk=2, dtype="bfloat16", causal="bottom-right"),
            False,
            "bwd_wgmma_split_group",
        ),
        (Problem(1, 16, 8192, 8192, 128, Hk=4, dtype="bfloat16"), False, "bwd_wgmma_stream_k"),
        (Problem(1, 16, 1024, 1024, 128, dtype="bfloat16"), False, "bwd_wgmma"),
    ],
)
def test_backward_kernels_of_one_rung(problem: Problem, deterministic: bool, name: str) -> None:
    """The general kernel comes before its variants, whatever the names; a variant comes first for its own problems."""
    assert choose.choose_kernel(problem, "backward", HOPPER, deterministic).name == name


@pytest.mark.parametrize("options", [{"bias": (1, 16, 512, 512)}, {"bias": (1, 1, 512, 512)}, {"alibi": (16,)}])
def test_an_invariant_backward_has_the_kernel_and_tile_of_the_deterministic_one(options: dict[str, Any]) -> None:
    """For every number of batch entries, also of the bias."""
    one = Problem(1, 16, 512, 512, 128, Hk=4, dtype="bfloat16", **options)
    expected = choose.choose_kernel(one, "backward", HOPPER, deterministic=True)
    assert expected.name == "bwd_wgmma_deterministic"
    per_entry = {name: (64, 16) if name == "alibi" else (64, *shape[1:]) for name, shape in options.items()}
    for p in (one, dataclasses.replace(one, B=64), dataclasses.replace(one, B=64, **per_entry)):
        invariant = dataclasses.replace(p, invariant=True)
        assert choose.choose_kernel(invariant, "backward", HOPPER) is expected
        assert choose.choose_tile(expected, invariant, HOPPER) == choose.choose_tile(expected, one, HOPPER)


def test_an_invariant_backward_refuses_a_bias_that_tma_cannot_copy() -> None:
    """The choice of the kernel must not depend on its layout."""
    p = Problem(2, 4, 512, 512, 128, dtype="bfloat16", bias=(2, 4, 512, 512), bias_boxes=False, invariant=True)
    with pytest.raises(UnsupportedProblem, match=r"TMA copies tiles of it.* the kernel must not depend on"):
        choose.choose_kernel(p, "backward", HOPPER)


@pytest.mark.parametrize("name", registry.kernels())
def test_every_tile_of_a_spec_is_supported(name: str) -> None:
    """For one head dimension at least. A tile that is not would never be chosen."""
    kernel = registry.get(name)
    for tile in kernel.tiles:
        widths = ((16, 16), (64, 64), (128, 128), (256, 256), (576, 512))
        found = [Problem(1, 2, 64, 64, D, Hk=1, Dv=Dv, dtype=dtype) for D, Dv in widths for dtype in kernel.dtypes]
        found += [dataclasses.replace(p, latent=True) for p in found if p.Dv < p.D]
        supported = [p for p in found if not kernel.why_unsupported(p, HOPPER)]
        assert any(choose.why_tile_unsupported(kernel, p, tile, HOPPER) is None for p in supported), tile


@pytest.mark.parametrize(("reads", "tile"), [({"new"}, (128, 80)), ({"mask"}, (128, 128)), ((), (192, 80))])
def test_an_option_that_was_not_timed_uses_a_small_tile(
    monkeypatch: pytest.MonkeyPatch, reads: set[str], tile: tuple[int, int]
) -> None:
    """`fwd_wgmma` treats an option that it does not know as one that reads memory for each score."""
    monkeypatch.setattr(Problem, "reads_elements", frozenset(reads))
    monkeypatch.setattr(choose, "ranked", choose.ranked.__wrapped__)  # without the cache
    chosen = choose.choose_tile(registry.get("fwd_wgmma"), Problem(4, 16, 4096, 4096, 128, dtype="float16"), HOPPER)
    assert tile == (chosen.BLOCK_M, chosen.BLOCK_N)


@pytest.mark.parametrize(("D", "Dv", "keys"), [(192, 128, 128), (192, 192, 80), (256, 128, 80)])
def test_narrow_values_use_a_tile_with_more_keys(D: int, Dv: int, keys: int) -> None:
    problem = Problem(4, 16, 4096, 4096, D, Dv=Dv, dtype="float16")
    chosen = choose.choose_tile(registry.get("fwd_wgmma"), problem, HOPPER)
    assert (128, keys) == (chosen.BLOCK_M, chosen.BLOCK_N)


@pytest.mark.parametrize(
    ("shape", "Hk", "causal", "kernel", "tile"),
    [
        ((3, 12, 385, 385, 96), 4, False, "fwd_wgmma_split", (192, 80)),  # one wave
        ((4, 10, 514, 47, 96), 5, False, "fwd_wgmma_split", (192, 80)),  # 128 x 48 would need two waves
        ((1, 31, 406, 34, 256), 31, False, "fwd_wgmma_split", (128, 48)),
        ((1, 12, 512, 512, 64), 12, True, "fwd_wgmma", (128, 64)),  # one wave, causal
        ((134, 25, 153, 153, 64), 25, False, "fwd_wgmma", (192, 80)),  # few keys
        ((24, 16, 448, 448, 64), 16, True, "fwd_wgmma", (256, 64)),
        ((5, 41, 567, 21, 128), 41, False, "fwd_wgmma", (128, 48)),  # one key tile
        ((5, 28, 903, 77, 256), 4, False, "fwd_wgmma", (128, 48)),  # 96 keys instead of 128 with padding
        ((24, 16, 448, 448, 256), 16, True, "fwd_wgmma", (128, 64)),
        ((1, 8, 200, 200, 256), 8, False, "fwd_decode", (16, 16)),  # few blocks
        ((2, 20, 250, 250, 256), 20, False, "fwd_wgmma_split", (128, 64)),
        ((2, 32, 2067, 2067, 64), 4, False, "fwd_wgmma_stream_k", (192, 128)),  # 5.3 waves
        ((1, 1, 4096, 512, 64), 1, True, "fwd_wgmma", (256, 64)),  # most queries see no key
    ],
)
def test_small_problems(
    shape: tuple[int, ...], Hk: int, causal: bool, kernel: str, tile: tuple[int, int]
) -> None:  # fmt: skip
    """Kernels and tiles that experiment 026 timed as the fastest, or within 5% of it; the last one was not timed."""
    problem = Problem(*shape, Hk=Hk, dtype="bfloat16", causal="bottom-right" if causal else False)
    chosen = choose.choose_kernel(problem, "forward", HOPPER)
    assert chosen.name == kernel
    found = choose.choose_tile(chosen, problem, HOPPER)
    assert tile == (found.BLOCK_M, found.BLOCK_N)


@pytest.mark.parametrize(
    ("batches", "keys", "tile"),
    [(12, 620, (8, 1)), (2, 1000, (4, 4)), (22, 3000, (4, 1)), (1, 20000, (4, 1))],
    ids=("eight warps", "cluster", "two waves of clusters", "many keys"),
)
def test_decoding_over_few_keys_needs_no_combine_kernel(batches: int, keys: int, tile: tuple[int, int]) -> None:
    """Where a larger tile needs none and its blocks are one wave."""
    kernel, problem = registry.get("fwd_decode"), Problem(batches, 28, 1, keys, 64, Hk=7, dtype="bfloat16")
    chosen = choose.choose_tile(kernel, problem, HOPPER)
    assert tile == (chosen.WARPS, chosen.CLUSTER)
    (combine,) = kernel.then
    assert (combine.grid(problem, chosen)[0] == 0) == (tile != (4, 1))


P = Problem(2, 16, 4096, 4096, 128, dtype="float16")


@pytest.mark.parametrize(
    ("kernel", "arch", "options", "ending"),
    [
        ("fwd_wgmma", (10, 0), {}, "wgmma exists on 9.0 only (use fwd_mma)"),
        ("bwd_wgmma", (10, 0), {}, "wgmma exists on 9.0 only (use bwd_mma)"),
        ("fwd_wgmma_fp8", (8, 9), {"dtype": "float8_e4m3"}, "the kernel runs on 9.0 only (use fwd_mma_fp8)"),
        ("fwd_wgmma", (7, 5), {}, "the kernel runs on 9.0 only (use fwd_block2d)"),
        ("bwd_wgmma_persistent", HOPPER, {}, "head dimensions are at most 64 (use bwd_wgmma_stream_k)"),
        ("fwd_wgmma", HOPPER, {"mappable": False}, "by TMA (pass contiguous copies, or use fwd_mma)"),
        ("fwd_mma", HOPPER, {"D": 60, "Dv": 60}, "(pad D with zeros to 64, or use fwd_block2d)"),
        ("fwd_decode_wgmma", HOPPER, {"page_size": 16}, "into contiguous k and v, or use fwd_wgmma)"),
        ("fwd_wgmma_split", HOPPER, {"window": (9, None)}, "key tile j must begin at key j * BLOCK_N (use fwd_wgmma)"),
        ("fwd_decode", HOPPER, {"invariant": True}, "on the rest of the problem (use fwd_wgmma_invariant)"),
        ("bwd_mma", (8, 0), {"invariant": True}, "on the rest of the problem (use bwd_block2d)"),
        (
            "bwd_wgmma_deterministic",
            HOPPER,
            {"ragged": (4096, 4096)},
            "(call it once per sequence, or use bwd_wgmma; bwd_block2d is deterministic)",
        ),
        # No kernel supports these problems.
        (
            "fwd_minimal",
            (8, 0),
            {"dtype": "float8_e4m3"},
            "(convert q, k and v to bfloat16 and multiply them by their descale)",
        ),
        (
            "fwd_wgmma",
            (8, 0),
            {"dtype": "float8_e4m3"},
            "it must be float16 or bfloat16 (convert the tensors)",
        ),
        ("bwd_mma", HOPPER, {"page_size": 16}, "forward only (gather the pages into contiguous k and v)"),
        (
            "fwd_mma",
            HOPPER,
            {"D": 300, "Dv": 300},
            "(latent attention, v=k[..., :Dv], has another kernel, with D <= 576)",
        ),
    ],
)
def test_refusals_name_the_kernel_that_would_be_chosen(
    kernel: str, arch: tuple[int, int], options: dict, ending: str
) -> None:
    problem, refused = dataclasses.replace(P, **options), registry.get(kernel)
    with pytest.raises(UnsupportedProblem) as refusal:
        choose.choose_tile(refused, problem, arch)
    assert str(refusal.value).endswith(ending)
    # Among all reasons why no kernel was chosen, and in the table of `list`, none is named.
    reasons = [c.reason for c in choose.candidates(problem, str(refused.computes), arch) if c.kernel.name == kernel]
    assert reasons == [refused.why_unsupported(problem, arch)]


# ---- tiles and kernels of a spec that is made for the test

SMALL = Problem(1, 2, 64, 64, 64, dtype="float16")


def made(**fields: Any) -> Kernel:
    """fwd_minimal with one entry and two tiles."""
    tiles = Tile(BLOCK_M=64, BLOCKS=9), Tile(BLOCK_M=32, BLOCKS=9)
    usual: dict[str, Any] = {"tiles": tiles, "space": {}, "grid": lambda p, t: (1, 1, 1), "then": (),
                             "smem_bytes": lambda p, t: t.BLOCK_M, "check_tile": lambda p, t, arch: None,
                             "rank": lambda p, t: 0, "supports": lambda p, arch: None}  # fmt: skip
    return dataclasses.replace(registry.get("fwd_minimal"), **{**usual, **fields})


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ((2**31 - 1, 65535, 65535), None),
        ((2**31, 1, 1), "its grid has 2147483648 blocks along x, and the limit is 2147483647 (split the batch)"),
        ((1, 65536, 1), "its grid has 65536 blocks along y, and the limit is 65535 (split the batch)"),
        ((1, 1, 65536), "its grid has 65536 blocks along z, and the limit is 65535 (split the batch)"),
    ],
)
def test_the_limits_of_a_grid(grid: tuple[int, int, int], message: str | None) -> None:
    """Also of further entries, but not of those that only a caller's options launch."""
    whole = made(grid=lambda p, t: grid)
    entry = dataclasses.replace(
        registry.get("bwd_minimal").entries[1], name="fwd_minimal_x", grid=lambda p, t: grid, smem_bytes=lambda p, t: 0
    )
    later = made(then=(dataclasses.replace(entry, args=("dQ",)),))
    optional = made(then=(dataclasses.replace(entry, args=(OPTIONAL_OUTPUTS[0],)),))
    for kernel in (whole, later):
        reason = choose.why_tile_unsupported(kernel, SMALL, kernel.tiles[0], HOPPER)
        assert reason == (message and f"fwd_minimal: {SMALL} is not supported: {message}")
    assert choose.why_tile_unsupported(optional, SMALL, optional.tiles[0], HOPPER) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grid": lambda p, t: (p.L, 1, 1)}, "fwd_minimal: grid in fwd_minimal.py: AttributeError: "),
        ({"grid": lambda p, t: 1}, "fwd_minimal: grid is 1: it must be a tuple of three integers"),
        ({"block": lambda t: (t.BLOCK_M, 1)}, r"fwd_minimal: block is \(64, 1\): it must be a tuple of three integers"),
        ({"block": lambda t: (1.0, 1, 1)}, r"fwd_minimal: block is \(1.0, 1, 1\): it must be"),
        (
            {"smem_bytes": lambda p, t: t.WARPS},
            "smem_bytes in fwd_minimal.py: AttributeError: tile has no WARPS: it has",
        ),
    ],
)
def test_functions_of_a_spec_that_fail(fields: dict[str, Any], message: str) -> None:
    kernel = made(**fields)
    with pytest.raises(SpecError, match=message):
        choose.why_tile_unsupported(kernel, SMALL, kernel.tiles[0], HOPPER)


@pytest.mark.parametrize(("arch", "name", "most"), [((9, 0), "sm_90", 232448), ((7, 5), "sm_75", 65536),
                                                    (None, "the CPU backend", 232448)])  # fmt: skip
def test_the_limit_of_shared_memory(arch: Any, name: str, most: int) -> None:
    fits, exceeds = (made(smem_bytes=lambda p, t, n=n: n) for n in (most, most + 1))
    assert choose.why_tile_unsupported(fits, SMALL, fits.tiles[0], arch) is None
    assert choose.why_tile_unsupported(exceeds, SMALL, exceeds.tiles[0], arch) == (
        f"fwd_minimal: tile BLOCK_M=64,BLOCKS=9 is not supported: it needs {most + 1} bytes of shared memory at D=64, "
        f"and {name} has {most} (choose a smaller tile)"
    )


@pytest.mark.parametrize(
    ("spilled", "chosen"), [((0, 0), 64), ((1, 0), 32), ((8, 9), 64), ((9, 8), 32), ((8, 8), 64)], ids=str
)
def test_the_first_tile_that_spills_the_least(
    spilled: tuple[int, int], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of the caller's may spill. BLOCKS is the number of multiprocessors, if it is known."""
    kernel, bytes_of = made(), dict(zip((64, 32), spilled, strict=True))
    monkeypatch.setattr(choose.spills, "spilled", lambda kernel, problem, tile, arch: bytes_of[tile.BLOCK_M])
    assert choose.choose_tile(kernel, SMALL, HOPPER) == Tile(BLOCK_M=chosen, BLOCKS=9)
    assert choose.choose_tile(kernel, SMALL, HOPPER, multiprocessors=78) == Tile(BLOCK_M=chosen, BLOCKS=78)
    for tile in kernel.tiles:
        assert choose.choose_tile(kernel, SMALL, HOPPER, tile, multiprocessors=78) is tile
    smallest_first = made(rank=lambda p, t: t.BLOCK_M)
    assert (choose.choose_tile(smallest_first, SMALL, HOPPER).BLOCK_M == 32) == (
        chosen == 32 or spilled[0] == spilled[1]
    )


def test_a_tuned_tile_comes_first(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If there is one for the GPU, and none is named."""
    kernel, tuned = made(), Tile(BLOCK_M=16, BLOCKS=7)
    asked: list[str] = []
    monkeypatch.setattr(choose.tuned, "winner", lambda kernel, problem, gpu: asked.append(gpu) or tuned)
    monkeypatch.setattr(choose.spills, "spilled", lambda kernel, problem, tile, arch: 0)
    caplog.set_level(log.CHOICES, logger="sandbox")
    assert choose.choose_tile(kernel, SMALL, HOPPER, gpu="H200", multiprocessors=132) is tuned
    assert choose.choose_tile(kernel, SMALL, HOPPER) == kernel.tiles[0]
    assert choose.choose_tile(kernel, SMALL, HOPPER, kernel.tiles[1], gpu="H200") is kernel.tiles[1]
    assert asked == ["H200"]
    assert [record.getMessage().partition(": tile ")[2] for record in caplog.records] == [
        "BLOCK_M=16,BLOCKS=7, tuned on H200",
        "BLOCK_M=64,BLOCKS=9, the first of the spec's tiles that fits and does not spill",
        "BLOCK_M=32,BLOCKS=9, as passed by the caller",
    ]


def test_a_problem_that_no_tile_supports() -> None:
    """The reason of the last tile."""
    kernel = made(check_tile=lambda p, t, arch: f"BLOCK_M={t.BLOCK_M} is too large")
    with pytest.raises(UnsupportedProblem, match=r"^fwd_minimal: BLOCK_M=32 is too large$"):
        choose.choose_tile(kernel, SMALL, HOPPER)
    with pytest.raises(UnsupportedProblem, match=r"^fwd_minimal: BLOCK_M=64 is too large$"):
        choose.choose_tile(kernel, SMALL, HOPPER, kernel.tiles[0])


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Kernels a, b and c of rungs 1, 2 and 2, which spill as many bytes as the returned dictionary has."""
    spilled: dict[str, Any] = {"a": 0, "b": 0, "c": 0}
    kernels = {name: made(name=name, rung=rung) for name, rung in (("a", 1), ("b", 2), ("c", 2))}
    monkeypatch.setattr(choose.registry, "kernels", lambda: kernels)
    monkeypatch.setattr(choose.spills, "spilled", lambda kernel, problem, tile, arch: spilled[kernel.name])
    spilled["kernels"] = kernels
    return spilled


@pytest.mark.parametrize(
    ("fields", "spilled", "chosen"),
    [
        ({}, {}, "c"),
        ({"b": {"preference": 1}}, {}, "b"),
        ({"a": {"first_for": lambda p: True}}, {}, "a"),
        ({"c": {"default": False}}, {}, "b"),
        ({"c": {"deterministic": False}}, {}, "b"),
        ({"c": {"computes": "backward", "args": ("dO", "Q", "K", "V", "LSE", "delta", "dQ", "dK", "dV")}}, {}, "b"),
        ({"c": {"supports": lambda p, arch: "no"}}, {}, "b"),
        ({"c": {"check_tile": lambda p, t, arch: "no"}}, {}, "b"),
        ({}, {"c": 256}, "c"),
        ({}, {"c": 257}, "b"),
        ({"c": {"first_for": lambda p: True}}, {"c": 1}, "b"),
        ({}, {"c": 300, "b": 300, "a": 257}, "c"),  # all spill
        ({"c": {"default": False}}, {"c": 300, "b": 300, "a": 257}, "b"),
    ],
)
def test_the_choice_of_a_kernel(
    fields: dict[str, dict[str, Any]], spilled: dict[str, int], chosen: str, three: dict[str, Any]
) -> None:
    """The highest rung, then the largest preference, unless it spills, is not deterministic or chosen by name only."""
    for name, changes in fields.items():
        three["kernels"][name] = dataclasses.replace(three["kernels"][name], **changes)
    three.update(spilled)
    assert choose.choose_kernel(SMALL, "forward", HOPPER, deterministic=True).name == chosen


def test_the_reasons_against_every_kernel(three: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    kernels = three["kernels"]
    kernels["c"] = dataclasses.replace(kernels["c"], default=False)
    kernels["b"] = dataclasses.replace(kernels["b"], supports=lambda p, arch: "no")
    caplog.set_level(log.CHOICES, logger="sandbox")
    assert choose.choose_kernel(SMALL, "forward", HOPPER).name == "a"
    assert caplog.records[-1].getMessage() == (
        f"forward of {SMALL}: kernel a\n  not c: selected by name only (default=True in its spec allows automatic "
        "selection)\n  not b: no"
    )
    kernels["a"] = dataclasses.replace(kernels["a"], deterministic=False)
    with pytest.raises(UnsupportedProblem) as caught:
        choose.choose_kernel(SMALL, "forward", HOPPER, deterministic=True)
    assert str(caught.value) == (
        f"no forward kernel supports {SMALL}:\n  c: {choose.BY_NAME}\n  b: no\n  a: not deterministic"
    )


ARCHS = (None, (8, 0), (8, 6), (9, 0), (10, 0))


def drawn_tile(kernel: Kernel, draw: random.Random) -> Tile:
    """A tile of the spec with one number changed."""
    tile = draw.choice(kernel.tiles)
    name = draw.choice([*tile])
    n = tile[name]
    return Tile(**{**tile, name: draw.choice((n + 1, max(n - 1, 1), n * 2, max(n // 2, 1), 16, 48, 512))})


def choice(kernel: Kernel, problem: Problem, arch: tuple[int, int] | None, tile: Tile | None) -> str:
    """The tile chosen, or that is requested, with its launches; or why not."""
    if reason := kernel.why_unsupported(problem, arch):
        return reason.removeprefix(f"{kernel.name}: ")
    try:
        chosen = choose.choose_tile(kernel, problem, arch, tile)
    except UnsupportedProblem as error:
        return str(error).replace(f"{kernel.name}: ", "")
    launches = (
        (entry.grid(problem, chosen), entry.block(chosen), entry.smem_bytes(problem, chosen), entry.cluster(chosen),
         *(number(problem, chosen) for number in entry.numbers.values()))
        for entry in kernel.entries
        if not {*entry.args} & {*OPTIONAL_OUTPUTS}
    )  # fmt: skip
    defined = sorted(kernel.defines(problem, chosen).items())
    zeroed = [sizes(problem, chosen)[1] for sizes in kernel.scratch.values()]
    first = " first" if kernel.first_for(problem) else ""
    return f"{chosen}: {'; '.join(map(str, launches))} {scratch_of(kernel, problem, chosen)} {zeroed}{first} {defined}"


def constants(kernel: Kernel) -> str:
    """The fields of a spec that are no functions, also of its further entries; tiles in their order."""
    kinds = (str, int, tuple, dict)
    fields = [
        f"{field.name}={value!r}"
        for entry in kernel.entries
        for field in dataclasses.fields(entry)
        if isinstance(value := getattr(entry, field.name), kinds) and field.name not in ("then", "numbers", "scratch")
    ]
    return ", ".join(fields)


@pytest.mark.parametrize("name", [name for name in ATTENTION if is_stored(f"choices/{name}.txt")])
def test_stored_choices(name: str) -> None:
    """The constants of the spec; then tile, grid, threads, shared memory and scratch for random problems on several
    GPUs, or why there are none; also of tiles that are requested, legal or not. Of most problems there is a hash."""
    kernel, draw, lines = ATTENTION[name], random.Random(name), []
    for n in range(900):
        problem, arch = (
            kernel.adapted(drawn_problem(draw, kernel.dtypes)),
            draw.choice((*ARCHS, *[kernel.min_arch or (8, 0)] * 5)),
        )
        if n % 3 and kernel.why_unsupported(problem, arch):
            continue
        tile = drawn_tile(kernel, draw) if n % 4 == 3 else None
        lines.append(f"{arch} {problem}{f' {tile}' if tile else ''} -> {choice(kernel, problem, arch, tile)}")
    check_stored(f"choices/{name}.txt", [constants(kernel), *(line[:220] for line in lines[:6]), digest(lines)])
