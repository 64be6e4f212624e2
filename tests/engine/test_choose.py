"""Which kernel `attention` chooses by itself."""

from __future__ import annotations

import dataclasses

import pytest

from sandbox.core import registry
from sandbox.engine import choose
from sandbox.spec import Problem

HOPPER = (9, 0)


@pytest.mark.parametrize(
    ("problem", "deterministic", "name"),
    [
        (Problem(4, 32, 4096, 4096, 64, dtype="float16"), False, "bwd_wgmma"),
        (Problem(4, 16, 4096, 4096, 128, dtype="float16"), False, "bwd_wgmma"),
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
        (Problem(1, 16, 8192, 8192, 128, Hk=4, dtype="bfloat16"), False, "bwd_wgmma"),
        (Problem(1, 16, 1024, 1024, 128, dtype="bfloat16"), False, "bwd_wgmma"),
    ],
)
def test_backward_kernels_of_one_rung(problem: Problem, deterministic: bool, name: str) -> None:
    """The general kernel comes before its variants, whatever the names; a variant comes first for its own problems."""
    assert choose.choose_kernel(problem, "backward", HOPPER, deterministic).name == name


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
    chosen = choose.choose_tile(registry.get("fwd_wgmma"), Problem(4, 16, 4096, 4096, 128, dtype="float16"), HOPPER)
    assert tile == (chosen.BLOCK_M, chosen.BLOCK_N)


@pytest.mark.parametrize(("D", "Dv", "keys"), [(192, 128, 128), (192, 192, 80), (256, 128, 80)])
def test_narrow_values_use_a_tile_with_more_keys(D: int, Dv: int, keys: int) -> None:
    problem = Problem(4, 16, 4096, 4096, D, Dv=Dv, dtype="float16")
    chosen = choose.choose_tile(registry.get("fwd_wgmma"), problem, HOPPER)
    assert (128, keys) == (chosen.BLOCK_M, chosen.BLOCK_N)
