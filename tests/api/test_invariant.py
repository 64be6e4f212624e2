"""`invariant=True`: the bits of a row of O and LSE depend only on its q, its keys and the options."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import sandbox
from sandbox.core import registry
from sandbox.core.errors import UnsupportedProblem
from sandbox.core.options import SHOWN
from sandbox.engine import choose
from sandbox.spec import Problem, Tile
from sandbox.verify.scores import option_values, score_inputs

torch = pytest.importorskip("torch")

Results = tuple[Any, Any]  # out (B, H, rows, D), lse (B, H, rows)


class Sequences:
    """Sequences of different lengths, (H, S, D) each; the scores grow along the keys, so that row maxima change."""

    def __init__(self, lengths: tuple[int, ...], H: int, Hk: int, D: int, device: str, dtype: Any) -> None:
        generator = torch.Generator(device).manual_seed(7)
        normal = partial(torch.randn, generator=generator, device=device)
        self.lengths, self.longest, self.Hk, self.D = lengths, max(lengths), Hk, D
        growing = torch.linspace(0.2, 2.0, self.longest, device=device)[:, None]
        self.q = (3 * normal(len(lengths), H, self.longest, D)).to(dtype)
        self.k = (normal(len(lengths), Hk, self.longest, D) * growing).to(dtype)
        self.v = normal(len(lengths), Hk, self.longest, D).to(dtype)
        self.device = device

    def of(self, b: int, begin: int, end: int) -> tuple[Any, ...]:
        """q of queries begin to end - 1, and k and v of the keys before `end`, of sequence b."""
        return self.q[b : b + 1, :, begin:end], self.k[b : b + 1, :, :end], self.v[b : b + 1, :, :end]

    def int32(self, *numbers: int) -> Any:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)


def joined(parts: list[Any], b: int = 0) -> Results:
    """Sequence b of (out, lse) of parts of the queries."""
    out, lse = (torch.cat([part[i][b : b + 1] for part in parts], 2) for i in range(2))
    return out, lse


Setting = tuple[str, list[int], Results]  # a name, positions of queries, their out and lse


def settings(s: Sequences, b: int, positions: list[int], page_sizes: tuple[int, ...]) -> Iterator[Setting]:
    """Sequence b in eight settings; where queries are decoded one by one, only those at `positions`."""
    attend = partial(sandbox.attention_forward, causal=True, invariant=True)
    n, every = s.lengths[b], [*range(s.lengths[b])]
    yield "alone", every, attend(*s.of(b, 0, n))
    yield "in a batch", every, joined([attend(s.q[:, :, :n], s.k[:, :, :n], s.v[:, :, :n])], b)
    yield "chunks of 1", positions, joined([attend(*s.of(b, i, i + 1)) for i in positions])
    for size in (17, 64, 512):
        chunks = [attend(*s.of(b, i, min(i + size, n))) for i in range(0, n, size)]
        yield f"chunks of {size}", every, joined(chunks)
    counts = [s.int32(*[i + 1] * len(s.lengths)) for i in positions]
    steps = [(s.q[:, :, i : i + 1], s.k, s.v) for i in positions]
    decoded = [attend(*step, key_lengths=count) for step, count in zip(steps, counts, strict=True)]
    yield "decoded in a batch with key_lengths", positions, joined(decoded, b)
    yield from ragged(s, b)
    yield from paged(s, b, positions, page_sizes)


def ragged(s: Sequences, b: int) -> Iterator[Setting]:
    """With the lengths of all sequences, and with shorter other ones."""
    shorter = tuple(n if i == b else max(1, n // 3) for i, n in enumerate(s.lengths))
    for name, lengths in (("ragged", s.lengths), ("other rows' lengths changed", shorter)):
        tensors = [torch.cat([x[i, :, :n] for i, n in enumerate(lengths)], 1).transpose(0, 1) for x in (s.q, s.k, s.v)]
        ends = s.int32(*itertools.accumulate(lengths, initial=0))
        out, lse = sandbox.attention_varlen(*tensors, ends, causal=True, invariant=True, return_lse=True)
        rows = slice(ends[b].item(), ends[b + 1].item())
        yield name, [*range(lengths[b])], (out[rows].transpose(0, 1)[None], lse[None, :, rows])


def paged(s: Sequences, b: int, positions: list[int], page_sizes: tuple[int, ...]) -> Iterator[Setting]:
    """The last 17 queries, and some decoded one by one. Rows of a page behind the last key are NaN."""
    count, n = len(s.lengths), s.lengths[b]
    attend = partial(sandbox.attention_paged, causal=True, invariant=True, return_lse=True)
    for size in page_sizes:
        most = -(-s.longest // size)
        table = torch.randperm(count * most, device=s.device)
        pages = []
        for x in (s.k, s.v):
            padded = torch.nn.functional.pad(x, (0, 0, 0, most * size - s.longest), value=float("nan"))
            pages.append(torch.empty(count * most, size, s.Hk, s.D, dtype=x.dtype, device=s.device))
            pages[-1][table] = padded.unflatten(2, (most, size)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        arrays = *pages, table.reshape(count, most).int()
        last = attend(s.q[:, :, n - 17 : n], *arrays, s.int32(*[n] * count))
        yield f"paged by {size}", [*range(n - 17, n)], joined([last], b)
        some = positions[:4]
        decoded = [attend(s.q[:, :, i : i + 1], *arrays, s.int32(*[i + 1] * count)) for i in some]
        yield f"decoded, paged by {size}", some, joined(decoded, b)


def differing(
    s: Sequences, b: int, positions: list[int], page_sizes: tuple[int, ...] = (16, 64, 256)
) -> dict[str, int]:
    """{setting: number of elements whose bits differ from those of the sequence alone}."""
    found: dict[str, int] = {}
    expected: Any = None
    for name, rows, results in settings(s, b, positions, page_sizes):
        expected = expected or results
        of_rows = [x[:, :, rows] for x in expected]
        found[name] = sum(
            int((a.contiguous().view(torch.uint8) != c.contiguous().view(torch.uint8)).sum())
            for a, c in zip(of_rows, results, strict=True)
        )
    return found


def test_a_row_has_the_same_bits_in_eight_settings() -> None:
    """A sample on the CPU backend: few rows and short sequences."""
    s = Sequences((90, 37, 150), 2, 1, 64, "cpu", torch.bfloat16)
    found = differing(s, 2, [40, 149], (16,))
    assert len(found) == 11
    assert not any(found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("blocks", [0, 37])
def test_a_row_has_the_same_bits_in_eight_settings_on_a_gpu(
    D: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows, 8 heads of them decoded at 125 positions, with two values of BLOCKS."""
    if blocks:
        monkeypatch.setattr(
            choose, "_fitted", lambda tile, _: Tile(**{**tile, "BLOCKS": blocks}) if "BLOCKS" in tile else tile
        )
    sandbox.reload()
    s = Sequences((1500, 37, 5001, 2200), 8, 2, D, "cuda", torch.bfloat16)
    positions = sorted(random.Random(D).sample(range(5001), 125))
    found = differing(s, 2, positions)
    sandbox.reload()
    assert not any(found.values()), found


LONG = [pytest.param(*x, marks=pytest.mark.sampled(4)) for x in ((128, 4300, 2, 5), (64, 11000, 1, 10))]


@pytest.mark.parametrize(("D", "Sk", "Hk", "ranges"), [(64, 2300, 1, 3), *LONG])
def test_decoding_with_split_keys(D: int, Sk: int, Hk: int, ranges: int) -> None:
    """The last queries of a sequence: of a ragged batch, which merges ranges of keys in one block, and one by one, with
    the heads of a group as queries, which blocks merge."""
    s = Sequences((Sk,), 4, Hk, D, "cpu", torch.bfloat16)
    q, k, v = (x[0].transpose(0, 1) for x in s.of(0, Sk - 3, Sk))
    out, lse = sandbox.attention_varlen(
        q, k, v, s.int32(0, 3), s.int32(0, Sk), causal=True, invariant=True, return_lse=True
    )
    for i in range(3):
        one, one_lse = sandbox.attention_forward(*s.of(0, Sk - 3 + i, Sk - 2 + i), causal=True, invariant=True)
        assert torch.equal(one[0, :, 0], out[i])
        assert torch.equal(one_lse[0, :, 0], lse[:, i])
    splits = registry.get("fwd_wgmma_invariant").numbers["splits"]
    one_query = Problem(1, 4, 1, Sk, D, Hk=Hk, dtype="bfloat16", invariant=True)
    tile = choose.choose_tile(registry.get("fwd_wgmma_invariant"), one_query, None)
    assert splits(one_query, tile) == ranges
    expected, expected_lse = sandbox.reference.attention(*(x.float().numpy() for x in s.of(0, Sk - 1, Sk)), causal=True)
    assert abs(one.float().numpy() - expected).max() < 0.02
    assert abs(one_lse.numpy() - expected_lse).max() < 1e-3


SHAPES = {  # (B, H, Hk, Sq, Sk, D): (BLOCK_M, ranges merged by a block, splits, packed heads)
    (4, 16, 16, 1024, 1024, 64): (256, False, 1, False),
    (16, 16, 16, 4096, 4096, 128): (192, True, 1, False),
    (2, 21, 3, 68, 68, 128): (192, False, 1, True),  # five slots for each of seven heads: 560 rows
    (1, 16, 16, 100, 100, 128): (128, False, 1, False),
    (1, 32, 8, 1, 9000, 128): (128, False, 9, True),
    (16, 32, 8, 1, 9000, 128): (64, False, 9, True),  # more work tiles than SMs
    (1, 35, 7, 10, 9000, 96): (128, False, 9, True),
    (128, 32, 8, 1, 9000, 64): (64, True, 1, True),
    (4, 27, 9, 326, 1096, 96): (192, True, 1, False),  # merging splits would take longer
    (4, 8, 8, 4096, 4096, 256): (128, True, 1, False),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_has_the_code_that_the_lengths_need(shape: tuple[int, ...]) -> None:
    """Ranges, splits and packed heads, and the tile with the fewest work tiles."""
    B, H, Hk, Sq, Sk, D = shape
    kernel, p = registry.get("fwd_wgmma_invariant"), Problem(B, H, Sq, Sk, D, Hk, dtype="bfloat16", invariant=True)
    tile = choose.choose_tile(kernel, p, (9, 0))
    defines, splits = kernel.defines(p, tile), kernel.numbers["splits"](p, tile)
    found = tile.BLOCK_M, bool(defines["MERGE_RANGES"]), splits, bool(defines["PACK_GQA"])
    assert found == SHAPES[shape]
    assert defines["SPLIT_KEYS"] == (splits > 1)


def test_packed_heads() -> None:
    """Few queries of several heads in one tile, beside those of a prefill: 24 queries fill two slots of 16 rows."""
    s = Sequences((150,), 6, 2, 64, "cpu", torch.bfloat16)
    attend = partial(sandbox.attention_forward, causal=True, invariant=True, kernel="fwd_wgmma_invariant")
    whole, last = attend(*s.of(0, 0, 150)), attend(*s.of(0, 126, 150))
    assert all(torch.equal(x[:, :, 126:], y) for x, y in zip(whole, last, strict=True))


def test_default_kernels_do_not_have_the_guarantee() -> None:
    """The settings can tell: decoding has other bits without invariant=True."""
    s = Sequences((150,), 2, 1, 64, "cpu", torch.bfloat16)
    alone, last = (
        sandbox.attention_forward(*x, causal=True, kernel="fwd_mma") for x in (s.of(0, 0, 150), s.of(0, 149, 150))
    )
    assert not torch.equal(alone[0][:, :, 149:], last[0])
    alone, last = (
        sandbox.attention_forward(*x, causal=True, kernel="fwd_mma", invariant=True)
        for x in (s.of(0, 0, 150), s.of(0, 149, 150))
    )
    assert torch.equal(alone[0][:, :, 149:], last[0])
    assert torch.equal(alone[1][:, :, 149:], last[1])


def test_only_rows_that_are_not_finite_are_computed_again() -> None:
    """A NaN in V changes the rows that see it, and no bit of the rows before it in the same tile of queries."""
    s = Sequences((150,), 2, 1, 64, "cpu", torch.bfloat16)
    for kernel in ("fwd_mma", "fwd_wgmma_invariant"):
        attend = partial(sandbox.attention_forward, causal=True, invariant=True, kernel=kernel)
        q, k, v = s.of(0, 0, 150)
        spoiled = v.clone()
        spoiled[:, :, 149] = float("nan")
        (out, lse), (expected, expected_lse) = attend(q, k, spoiled), attend(q, k, v)
        first_tile = slice(None), slice(None), slice(0, 128)
        assert torch.equal(out[first_tile], expected[first_tile]), kernel
        assert torch.equal(lse[first_tile], expected_lse[first_tile]), kernel
        assert out[:, :, 149].isnan().all()
        torch.testing.assert_close(out[:, :, 128:149], expected[:, :, 128:149], atol=0.05, rtol=0)


def test_kernel_and_tile_follow_from_dtype_widths_and_options() -> None:
    """Batch, heads, lengths and layouts change only numbers of the tile that have no influence on bits."""
    sizes = ((1, 2, 1, 4000), (64, 8, 1, 320), (1, 4, 5000, 5008), (3, 2, 70, 96))
    options: tuple[dict[str, Any], ...] = ({}, {"softcap": 20.0}, {"window": (100, 0)}, {"sink": True})
    for D, option, arch in itertools.product((64, 128, 256), options, ((8, 0), (9, 0))):
        chosen = set()
        for B, H, Sq, Sk in sizes:
            layouts: tuple[dict[str, Any], ...] = (
                {},
                {"key_lengths": True},
                {"page_size": 16},
                {"lengths": ((Sq, Sk), (3, 4))},
            )
            for layout in layouts:
                p = Problem(B, H, Sq, Sk, D, dtype="bfloat16", invariant=True, **option, **layout)
                kernel = choose.choose_kernel(p, "forward", arch)
                tile = choose.choose_tile(kernel, p, arch)
                assert kernel.invariant_tile is not None
                chosen.add((kernel.name, *((name, tile[name]) for name in kernel.invariant_tile(p))))
        assert len(chosen) == 1, chosen
    odd = Problem(1, 1, 1, 100, 64, dtype="bfloat16", page_size=10, invariant=True)
    with pytest.raises(UnsupportedProblem, match=r"page_size=10 .* the kernel must not depend on"):
        choose.choose_kernel(odd, "forward", (9, 0))


N = 70  # queries and keys: two tiles
OF_BACKWARD = Problem(2, 4, N, N, 64, Hk=2, dtype="bfloat16")
FORWARD_ONLY = {"ragged", "page_size", "kv_dtype", "descale"}  # or, for ragged, another function
BACKWARD_OPTIONS: dict[str, dict[str, Any]] = {  # in addition to the cases of other options
    "causal": {"causal": True},
    "alibi": {"alibi": torch.linspace(0.1, 0.4, 4)},
    "alibi per batch entry": {"alibi": torch.linspace(0.1, 0.4, 8).reshape(2, 4)},
    "bias": {"bias": torch.linspace(-1, 1, 8 * N * N).reshape(2, 4, N, N).bfloat16()},
    "row bias": {"bias": torch.linspace(-1, 1, N).reshape(1, 1, 1, N).bfloat16()},
    "key_lengths": {"key_lengths": torch.tensor([13, 61], dtype=torch.int32)},
    "score": {"score": sandbox.Score("x - 0.1f * abs(i - j)", mask="j <= i + 2")},
    "dropout": {"dropout": 0.3, "seed": torch.tensor([5])},
}


def cases_of_other_options() -> dict[str, dict[str, Any]]:
    """The test cases of each option that BACKWARD_OPTIONS does not have."""
    known, found = {key for options in BACKWARD_OPTIONS.values() for key in options} | FORWARD_ONLY, {}
    for option in (option for option in SHOWN if option.name not in known):
        for name, case in option.cases.items():
            p = dataclasses.replace(OF_BACKWARD, **case(OF_BACKWARD))
            given = option_values(p, {key: torch.from_numpy(x) for key, x in score_inputs(p).items()})
            found[name] = {option.name: given[option.name]}
    return found


BACKWARD_OPTIONS |= cases_of_other_options()


@pytest.mark.parametrize("name", BACKWARD_OPTIONS)
@pytest.mark.sampled(12)
def test_backward(name: str) -> None:
    """dQ, dK and dV of a batch entry do not depend on the other entries. Dropout depends on the entry's index."""
    options = BACKWARD_OPTIONS[name]
    entry = slice(0, 1) if name == "dropout" else slice(1, 2)
    own = {key: x[entry] if torch.is_tensor(x) and len(x) == 2 else x for key, x in options.items()}
    s = Sequences((N, N), 4, 2, 64, "cpu", torch.bfloat16)
    dout = torch.randn(s.q.shape, generator=torch.Generator().manual_seed(1)).to(s.q.dtype)
    out, lse = sandbox.attention_forward(s.q, s.k, s.v, invariant=True, **options)
    arrays = dout, s.q, s.k, s.v, out, lse
    whole = sandbox.attention_backward(*arrays, invariant=True, **options)
    alone = sandbox.attention_backward(*(x[entry] for x in arrays), invariant=True, **own)
    for x, y in zip(whole[:3], alone[:3], strict=True):
        assert torch.equal(x[entry], y)


def test_backward_of_one_query() -> None:
    """Only a forward packs the heads of a group into one tile."""
    s = Sequences((N,), 4, 2, 64, "cpu", torch.bfloat16)
    q, k, v = s.of(0, N - 1, N)
    out, lse = sandbox.attention_forward(q, k, v, invariant=True)
    arrays = torch.ones_like(out), q, k, v, out, lse
    found = sandbox.attention_backward(*arrays, invariant=True)
    for x, y in zip(found, sandbox.attention_backward(*arrays, deterministic=True), strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)


def test_every_option_is_in_the_test_of_the_backward() -> None:
    tested = {key for options in BACKWARD_OPTIONS.values() for key in options}
    assert {option.name for option in SHOWN} - FORWARD_ONLY - {"invariant"} <= tested


def test_in_the_slot() -> None:
    """PyTorch's own function decodes with the bits of a prefill."""
    attend = torch.nn.functional.scaled_dot_product_attention
    s = Sequences((150,), 2, 2, 64, "cpu", torch.bfloat16)
    with sandbox.use_in_torch(invariant=True):
        whole = attend(*s.of(0, 0, 150), is_causal=True)
        assert torch.equal(whole[:, :, 149:], attend(*s.of(0, 149, 150)))
    expected = sandbox.attention(*s.of(0, 0, 150), causal=True, invariant=True)
    assert torch.equal(whole, expected)


def test_unsupported() -> None:
    """Kernels whose bits depend on the rest of the problem, and tiles with another number that matters."""
    q = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedProblem, match="fwd_decode: invariant=True is not supported"):
        sandbox.attention_forward(q, q, q, invariant=True, kernel="fwd_decode")
    with pytest.raises(UnsupportedProblem, match="SUB_N=16 is not supported with invariant=True: it must be 32"):
        sandbox.attention_forward(q, q, q, invariant=True, kernel="fwd_mma",
                                  tile="BLOCK_M=128,BLOCK_N=64,SUB_N=16,WARPS=8,MIN_BLOCKS=1")  # fmt: skip
    with pytest.raises(UnsupportedProblem, match="bwd_mma: invariant=True is not supported"):
        sandbox.attention_backward(q, q, q, q, q, torch.zeros(1, 1, 4), invariant=True, kernel="bwd_mma")


def test_no_kernel() -> None:
    """The message names the problem of the call, not the one that determines the kernel."""
    q, kv = (torch.zeros(1, heads, 3, 576, dtype=torch.bfloat16) for heads in (16, 1))
    with pytest.raises(UnsupportedProblem, match="kernel supports B1 H16/1 S3 D576/512 bfloat16 latent inv") as e:
        sandbox.attention_forward(q, kv, kv[..., :512], invariant=True)
    assert "v=k[" not in str(e.value)  # no advice to use latent attention: it is
