"""Peers: which problems they refuse and why, and the options that they receive."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_bench import SMALL, Counting, tensors, time_contenders

from sandbox.bench import benchmark, peers
from sandbox.bench.timing import Limits
from sandbox.core.errors import UnsupportedProblem
from sandbox.spec import Problem, Score

torch = pytest.importorskip("torch")
WIDE = Problem(2, 4, 20, 33, 16, dtype="float32")


LENGTHS = ((20, 33), (1, 40), (9, 9))
RAGGED: dict[str, Any] = {"B": 0, "Sq": 0, "Sk": 0, "lengths": LENGTHS}
NO_FLEX = (
    "flex: this Score is not supported: its file must define flex(problem, option_tensors), the expressions in Python"
)
VARLEN_TAKES = "varlen_attn: not supported: it takes ragged batches with causal, window and scale only"


def refusal(name: str, problem: Problem, *inputs: Any, **option_tensors: Any) -> str:
    """The message of UnsupportedProblem."""
    with pytest.raises(UnsupportedProblem) as refused:
        peers.PEERS[name].prepare(problem, *(inputs or (SimpleNamespace(device=torch.device("cpu")),) * 3),
                                  option_tensors=option_tensors)  # fmt: skip
    return str(refused.value)


@pytest.mark.parametrize(("name", "H"), [("sdpa-math", 250), ("eager", 1000)])
def test_scores_that_take_more_than_a_quarter_of_the_memory(name: str, H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bytes a score for SDPA's math, twice the itemsize for eager: here 10 GB."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *_, **__: None)
    problem, q = Problem(5, H, 500, 1000, 16, dtype="float16"), SimpleNamespace(device=torch.device("cuda"))
    memory = SimpleNamespace(total_memory=40_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert peers.PEERS[name].prepare(problem, q, q, q)
    memory.total_memory -= 4
    reason = "its scores take 10 GB, and the limit, a quarter of the GPU's memory, is 10 GB"
    assert refusal(name, problem, q, q, q) == f"{name}: {problem} is not supported: {reason}"
    memory.total_memory = 36_000_000_000
    assert refusal(name, problem, q, q, q).endswith("is 9 GB")
    q.device = torch.device("cpu")
    assert peers.PEERS[name].prepare(problem, q, q, q)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sdpa-flash", {"causal": "bottom-right"},
         "sdpa-flash: a bottom-right mask with Sq=20, Sk=33 is not supported: is_causal is top-left"),
        ("sdpa-math", {"window": (1, 2), "softcap": 2.0, "mask": (1, 1, 20, 33)},
         "sdpa-math: softcap, window not supported by this peer"),
        ("sdpa-math", {"bias": (1, 1, 20, 33), "mask": (1, 1, 20, 33)},
         "sdpa-math: only a bias of q's dtype or a mask is supported, not both"),
        ("sdpa-math", {"dtype": "float16", "bias": (1, 1, 20, 33), "bias_dtype": "float32"},
         "sdpa-math: only a bias of q's dtype or a mask is supported, not both"),
        ("sdpa-math", {"mask": (1, 1, 20, 33), "causal": "top-left"},
         "sdpa-math: a bias or mask together with is_causal is not supported"),
        ("eager", {"softcap": 2.0}, "eager: only scale and causal are supported"),
        ("flex", {"dropout": 0.5, "sink": True, "window": (1, 2)}, "flex: dropout, sink not supported by this peer"),
        ("flex", {"score": Score("x")}, NO_FLEX),
        ("varlen", {}, VARLEN_TAKES),
        ("varlen", {**RAGGED, "softcap": 1.0}, VARLEN_TAKES),
        ("varlen", {**RAGGED, "Dv": 8}, VARLEN_TAKES),
        ("varlen", {**RAGGED, "causal": "top-left"},
         "varlen_attn: a top-left mask is not supported: its causal mask is bottom-right"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("fake_flex", "fake_varlen")
def test_refusals(name: str, options: dict[str, Any], message: str) -> None:
    given = {"bias": torch.zeros(1, 1, 20, 33), "mask": torch.zeros(1, 1, 20, 33)}
    assert refusal(name, dataclasses.replace(WIDE, **options), **given) == message


def test_unknown_peers(tmp_path: Path) -> None:
    def said(name: str) -> str:
        with pytest.raises(UnsupportedProblem) as refused:
            peers.get(name)
        return str(refused.value)

    assert said("sdpa-flesh") == (
        "peer 'sdpa-flesh' is not known: choose from sdpa-flash, sdpa-cudnn, sdpa-efficient, sdpa-math, eager, flex, "
        "varlen, flash-mla, or name a Python file that defines `peers`"
    )
    with pytest.raises(UnsupportedProblem, match="tutorial"):
        peers.PEERS["triton"].prepare(SMALL, None, None, None)
    assert said("nowhere.py") == "peers nowhere.py: there is no such file"
    file = tmp_path / "mine.py"
    for text, found in (("peers = 3", "3"), ("peers = [3]", "[3]"), ("", "None")):
        file.write_text(text)
        assert said(str(file)) == (
            f"{file} must define `peers`, a list of sandbox.bench.peers.Contender: it has {found}"
        )
    file.write_text("from sandbox.bench.peers import PEERS\npeers = PEERS['flex'], PEERS['eager']\n")
    assert peers.get(str(file)) == [peers.PEERS["flex"], peers.PEERS["eager"]]
    assert [name for name, peer in peers.PEERS.items() if peer.ragged] == ["varlen"]
    assert [name for name, peer in peers.PEERS.items() if peer.paged] == ["flash-mla"]
    assert peers.DEFAULT == ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math", "eager")


@pytest.mark.parametrize(
    ("reasons", "error", "message"),
    [
        (["Head dim is odd. (Triggered internally at x.cpp:3.)", "No kernel: not used because: ",
          "it has been runtime disabled.", "Second reason"], "No available kernel", "Head dim is odd.; Second reason"),
        (["No kernel: not used because: "], "No available kernel\nat x.cpp", "No available kernel"),
        ([], "", "RuntimeError"),
    ],
)  # fmt: skip
def test_the_reasons_in_warnings_are_the_message(reasons: list[str], error: str, message: str) -> None:
    def launch() -> None:
        for reason in reasons:
            warnings.warn(reason, stacklevel=1)
        raise RuntimeError(error)

    with pytest.raises(UnsupportedProblem) as refused:
        peers._try("mine", launch)
    assert str(refused.value) == f"mine: {message}"


@pytest.mark.parametrize(
    "options",
    [
        {"bias": (1, 4, 20, 33)},
        {"bias": (2, 1, 20, 33), "Hk": 2},
        {"mask": (1, 1, 20, 33)},
        {"causal": "top-left", "scale": 0.5},
        {"Hk": 2},
        {"Hk": 1},
    ],
)
def test_the_options_of_sdpa(options: dict[str, Any]) -> None:
    """Eager has no bias and no mask."""
    problem = dataclasses.replace(WIDE, **options)
    sdpa, eager = time_contenders(peers.PEERS["sdpa-math"], peers.PEERS["eager"], problem=problem)[0]
    assert sdpa.ok, sdpa.message
    assert eager.ok is (True if problem.plain else None), eager.message


def test_memory_of_the_result_is_filled_with_nan() -> None:
    """For the allocator, it has the size of the next result: O, or for a backward dQ, dK and dV."""
    filled: list[Any] = []

    def new_full(shape: Any, value: float) -> None:
        filled.append((tuple(shape), repr(value)))

    q = SimpleNamespace(device=torch.device("cpu"), shape=(1, 2, 48, 16), new_full=new_full)
    peers.PEERS["eager"].prepare(SMALL, q, q, q).poison()
    assert filled == [((1, 2, 48, 16), "nan")]
    inputs = [*tensors(WIDE), torch.zeros(2, 4, 20, 16)]
    ready = peers.backward(peers.PEERS["eager"]).prepare(WIDE, *inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_full", lambda x, *given: new_full(*given))
        ready.poison()
    assert filled[1:] == [((2, 4, rows, 16), "nan") for rows in (20, 33, 33)]


# ---- flex


@pytest.fixture
def fake_flex(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces flex_attention by a dense one, which calls the modifications with tensors of indices. Records the
    options of each compilation and of each call."""
    seen: list[Any] = []

    def flex_attention(
        q: Any, k: Any, v: Any, scale: float, enable_gqa: bool, score_mod: Any = None, block_mask: Any = None
    ) -> Any:
        (B, H, Sq, _), Hk, Sk = q.shape, k.shape[1], k.shape[2]
        assert enable_gqa or Hk == H
        k, v = (x.repeat_interleave(H // Hk, 1) for x in (k, v))
        b, h, i, j = torch.meshgrid(*map(torch.arange, (B, H, Sq, Sk)), indexing="ij")
        x = q @ k.transpose(2, 3) * scale
        if score_mod:
            x = score_mod(x, b, h, i, j)
        if block_mask:
            mod, own_B, own_H = block_mask
            x = x.masked_fill(~mod(b if own_B else b * 0, h if own_H else h * 0, i, j), float("-inf"))
        seen.append((enable_gqa, bool(score_mod), block_mask and block_mask[1:]))
        return torch.softmax(x, -1).nan_to_num(0) @ v  # zeros for a query that sees no key

    def create_block_mask(mod: Any, B: Any, H: Any, Sq: int, Sk: int, device: str) -> Any:
        assert (Sq, Sk, device) == (20, 33, "cpu")
        assert B in (None, 2)
        assert H in (None, 2, 4)
        return mod, B, H

    module = SimpleNamespace(flex_attention=flex_attention, create_block_mask=create_block_mask)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", module)
    reset = SimpleNamespace(reset=lambda: seen.append("reset"))
    monkeypatch.setitem(vars(torch), "_dynamo", reset)  # its import takes seconds
    monkeypatch.setattr(torch, "compile", lambda function, **options: seen.append(options) or function)
    return seen


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (False, False, None)),
        ({"Hk": 2, "scale": 0.5}, (True, False, None)),
        ({"softcap": 0.75}, (False, True, None)),
        ({"alibi": (2, 4)}, (False, True, None)),
        ({"bias": (1, 4, 20, 33)}, (False, True, None)),
        ({"bias": (2, 1, 20, 33)}, (False, True, None)),
        ({"window": (3, 2)}, (False, False, (None, None))),
        ({"window": (None, 2)}, (False, False, (None, None))),
        ({"window": (15, None)}, (False, False, (None, None))),
        ({"causal": "bottom-right"}, (False, False, (None, None))),
        ({"causal": "top-left"}, (False, False, (None, None))),
        ({"mask": (1, 1, 20, 33)}, (False, False, (None, None))),
        ({"mask": (2, 1, 20, 33)}, (False, False, (2, None))),
        ({"mask": (1, 4, 20, 33)}, (False, False, (None, 4))),
        ({"mask": (1, 2, 20, 33), "H": 2, "Hk": 2}, (False, False, (None, 2))),
        ({"key_lengths": True}, (False, False, (2, None))),
        ({"key_lengths": True, "causal": "top-left", "window": (5, None)}, (False, False, (2, None))),
        ({"softcap": 0.75, "alibi": (4,), "bias": (2, 4, 20, 33), "window": (9, None), "mask": (2, 4, 20, 33),
          "causal": "bottom-right", "Hk": 2}, (True, True, (2, 4))),
    ],
)  # fmt: skip
def test_the_options_of_flex(options: dict[str, Any], expected: tuple[Any, ...], fake_flex: list[Any]) -> None:
    """It computes what our reference does, with a block mask for each batch entry and head only if they differ."""
    (row,) = time_contenders(peers.PEERS["flex"], problem=dataclasses.replace(WIDE, **options))[0]
    assert row.ok, row.message
    assert fake_flex[:2] == ["reset", {"dynamic": False}]
    assert {*fake_flex[2:]} == {expected}


@pytest.mark.parametrize(
    ("score", "mask", "mods", "sizes"),
    [
        ("x + 0.5f * b * h", "true", "lambda x, b, h, i, j: x + 0.5 * b * h, None", None),
        ("x", "j != i + b", "None, lambda b, h, i, j: j != i + b", (2, 4)),
        ("x * 2", "j != h", "lambda x, b, h, i, j: x * 2, lambda b, h, i, j: j != h", (2, 4)),
    ],
)
def test_the_score_of_a_file(
    score: str, mask: str, mods: str, sizes: Any, fake_flex: list[Any], tmp_path: Path
) -> None:
    """It follows the other options."""
    file = tmp_path / "mine.py"
    file.write_text(f"def flex(problem, option_tensors):\n    return {mods}\n")
    problem = dataclasses.replace(WIDE, score=Score(score, mask, file=str(file)), softcap=0.75)
    (row,) = time_contenders(peers.PEERS["flex"], problem=problem)[0]
    assert row.ok, row.message
    assert fake_flex[-1] == (False, True, sizes)
    file.write_text("")
    assert refusal("flex", problem) == NO_FLEX


# ---- ragged batches


@pytest.fixture
def fake_varlen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces PyTorch's varlen_attn. Records its window sizes."""
    seen: list[Any] = []

    def varlen_attn(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float,
        window_size: tuple[int, int], enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        seen.append(window_size)
        assert (max_q, max_k) == (20, 40)
        assert enable_gqa == (k.shape[1] != q.shape[1])
        found = []
        for b in range(len(LENGTHS)):
            own = (x[cu[b] : cu[b + 1]].transpose(0, 1) for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)))
            (Sq, Sk), (left, right) = LENGTHS[b], window_size
            at = torch.arange(Sk) - torch.arange(Sq)[:, None] - (Sk - Sq)
            mask = (at >= -left if left >= 0 else at == at) & (at <= right if right >= 0 else at == at)
            options = {"scale": scale, "enable_gqa": enable_gqa, "attn_mask": mask}
            found.append(torch.nn.functional.scaled_dot_product_attention(*own, **options).transpose(0, 1))
        return torch.cat(found)

    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=varlen_attn))
    return seen


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({}, (-1, -1)),
        ({"causal": "bottom-right", "Hk": 2}, (-1, 0)),
        ({"causal": "bottom-right", "window": (5, None)}, (5, 0)),
        ({"window": (5, 3), "scale": 0.5}, (5, 3)),
    ],
)
def test_ragged_batches_of_pytorch(options: dict[str, Any], window: tuple[int, int], fake_varlen: list[Any]) -> None:
    problem = dataclasses.replace(WIDE, **RAGGED, **options)
    inputs, setting = benchmark.make_inputs(problem, device="cpu"), {"mode": "events", "commit": "abc"}
    peer = peers.PEERS["varlen"]
    (row,) = benchmark.time_contenders(problem, [peer], inputs, Counting(), Limits(), setting)
    assert row.ok, row.message
    assert {*fake_varlen} == {window}
