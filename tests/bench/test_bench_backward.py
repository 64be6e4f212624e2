"""The backward in `bench`: its sampled reference, peers through autograd, contenders."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from project import ROOT
from test_bench import PROBLEMS, SMALL, Counting, tensors

from sandbox.bench import benchmark, peers
from sandbox.bench.rows import Row
from sandbox.bench.steps import Ladder, Step
from sandbox.bench.timing import Limits
from sandbox.core import registry
from sandbox.core.errors import UnsupportedProblem
from sandbox.reference import attention_backward, gradient_bound, naive_backward
from sandbox.spec import Problem
from sandbox.verify import sampled

torch = pytest.importorskip("torch")


def inputs_of(problem: Problem, seed: int = 0) -> tuple[Any, ...]:
    """q, k, v and dout."""
    return *tensors(problem, seed), tensors(problem, seed + 1)[0]


def plain_gradients(problem: Problem, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
    arrays = [x.float().numpy() for x in (dout, q, k, v)]
    options = {"causal": problem.causal, "scale": problem.scale, "dtype": problem.dtype}
    return tuple(torch.from_numpy(x) for x in naive_backward(*arrays, **options))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_strips_are_the_whole_reference(problem: Problem) -> None:
    """If dO is zero outside of the strips, the reference for all rows equals the sum over the strips."""
    q, k, v, dout = inputs_of(problem)
    expected = sampled.expect_gradients(problem, q, k, v, dout)
    whole = dout.clone()
    with expected._strips_alone():
        assert 0 < (dout != 0).any(dim=3).sum() <= len(expected.strips) * sampled.ROWS
        arrays = [x.float().numpy() for x in (dout, q, k, v)]
        full = attention_backward(*arrays, causal=problem.causal, scale=problem.scale)
    assert torch.equal(dout, whole)
    for (which, b, head), sums in expected.sums.items():
        np.testing.assert_allclose(sums.expected, full[which][b, head], rtol=0, atol=1e-12)
    assert {which for which, _, _ in expected.sums} == {0, 1, 2}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_right_gradients_pass_and_wrong_ones_do_not(problem: Problem) -> None:
    inputs = inputs_of(problem)
    expected = sampled.expect_gradients(problem, *inputs)
    right = expected.check(lambda: None, lambda: plain_gradients(problem, *inputs))
    assert right.message == ""
    assert right.error <= right.bound
    for wrong in range(3):

        def launch(wrong: int = wrong) -> tuple[Any, ...]:
            gradients = plain_gradients(problem, *inputs)
            ref = [*attention_backward(*(x.float().numpy() for x in (inputs[3], *inputs[:3])), causal=problem.causal)]
            bound = gradient_bound(ref[wrong], gradients[wrong], np.abs(ref[wrong]), problem.dtype)
            gradients[wrong][-1, -1, -1, -1] += 50 * bound + 1e-3
            return gradients

        assert ("dQ", "dK", "dV")[wrong] in expected.check(lambda: None, launch).message


def test_an_unwritten_element_is_found_anywhere() -> None:
    problem = Problem(2, 8, 300, 300, 16, dtype="float16")
    inputs = inputs_of(problem)
    expected = sampled.expect_gradients(problem, *inputs)
    unsampled = next(h for h in range(8) if (1, 0, h) not in expected.sums)

    def launch() -> tuple[Any, ...]:
        gradients = plain_gradients(problem, *inputs)
        gradients[1][0, unsampled, 7, 3] = math.nan
        return gradients

    assert "not written" in expected.check(lambda: None, launch).message


# ---- contenders


def time_contenders(*contenders: peers.Contender, problem: Problem = SMALL) -> list[Row]:
    setting = {"mode": "events", "ceiling_tflops": 1.0, "commit": "abc"}
    inputs = inputs_of(problem)
    return benchmark.time_contenders(problem, contenders, inputs, Counting(), Limits(), setting, "backward")


@pytest.mark.parametrize("name", ["sdpa-math", "sdpa-flash", "eager"])
@pytest.mark.parametrize("causal", [False, "bottom-right"])
def test_peers_through_autograd(name: str, causal: Any) -> None:
    problem = dataclasses.replace(SMALL, causal=causal)
    (row,) = time_contenders(peers.backward(peers.PEERS[name]), problem=problem)
    assert row.ok is True or (name == "sdpa-flash" and row.ok is None), row
    if row.ok:
        line = row.as_json()
        assert line["computes"] == "backward"
        assert line["tflops"] == pytest.approx(2.5 * problem.flops / 1e-3 * 1e-12)


@pytest.mark.parametrize("computes", ["forward", "backward"])
def test_flash_attention_packages_on_a_ragged_batch(computes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        causal: bool, softmax_scale: float,
    ) -> Any:  # fmt: skip
        assert (max_seqlen_q, max_seqlen_k) == (70, 70)
        starts = zip(cu_seqlens_q.tolist()[:-1], cu_seqlens_k.tolist()[:-1], strict=True)
        ends = zip(cu_seqlens_q.tolist()[1:], cu_seqlens_k.tolist()[1:], strict=True)
        of_each = []
        for (q0, k0), (q1, k1) in zip(starts, ends, strict=True):
            own = (x[i:j].transpose(0, 1)[None] for x, i, j in ((q, q0, q1), (k, k0, k1), (v, k0, k1)))
            options = {"is_causal": causal, "scale": softmax_scale, "enable_gqa": True}
            of_each.append(torch.nn.functional.scaled_dot_product_attention(*own, **options)[0].transpose(0, 1))
        return torch.cat(of_each), "lse"

    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_varlen_func=varlen))
    *_, fa4 = peers.get(str(ROOT / "sandbox" / "bench" / "flash_attention_peers.py"))
    lengths = ((33, 33), (70, 70), (1, 1))
    problem = Problem(0, 4, 0, 0, 16, Hk=2, dtype="bfloat16", causal="bottom-right", lengths=lengths)
    inputs = benchmark.make_inputs(problem, device="cpu", computes=computes)
    peer, setting = peers.backward(fa4) if computes == "backward" else fa4, {"mode": "events", "commit": "abc"}
    (row,) = benchmark.time_contenders(problem, [peer], inputs, Counting(), Limits(), setting, computes)
    assert row.ok, row.message
    assert row.timing


def test_a_peer_without_a_backward_is_refused() -> None:
    def prepare(problem: Problem, q: Any, k: Any, v: Any) -> peers.Ready:
        return peers.Ready(lambda: (q.detach(), None), lambda: None)

    (row,) = time_contenders(peers.backward(peers.Contender("opaque", prepare)))
    assert row.ok is None
    assert "no backward" in row.message


def test_a_wrong_backward_has_no_time() -> None:
    right = peers.backward(peers.PEERS["eager"])

    def prepare(*args: Any) -> peers.Ready:
        ready = right.prepare(*args)
        return peers.Ready(lambda: tuple(x * 1.05 for x in ready.launch()), ready.poison)

    wrong, row = time_contenders(peers.Contender("wrong", prepare, kernel="k"), right)
    assert wrong.ok is False
    assert wrong.timing is None
    assert "bound" in wrong.message
    assert row.timing


def test_kernels_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.driver, "device", lambda ordinal=0: type("Gpu", (), {"name": "GPU"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedProblem, match="bwd_minimal computes the backward: bench times forward kernels"):
        benchmark.run([registry.get("bwd_minimal")], [SMALL])


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    kernels = [kernel for kernel in registry.kernels().values() if kernel.computes == "backward"]
    problems = [Problem(2, 4, 512, 512, 64, dtype="float16", causal=c) for c in (False, "bottom-right")]  # type: ignore[arg-type]
    others = [peers.PEERS[name] for name in ("sdpa-flash", "sdpa-cudnn", "eager")]
    found = list(benchmark.run(kernels, problems, others, computes="backward", limits=Limits(rounds=20)))
    assert len(found) == 2 * (len(kernels) + 3)
    for row in found:
        assert row.ok, row
        assert row.as_json()["computes"] == "backward"


def backward_ladder() -> Ladder:
    kernel, problem = registry.get("bwd_mma"), Problem(1, 2, 256, 256, 64, dtype="float16")
    step = Step("plain", "one tile", (1.0, 1.0))
    return Ladder((step,), lambda _, D: (kernel, kernel.tiles[0]), (64,), [problem], others={"sdpa-flash": "PyTorch"})


def test_steps_of_a_backward_are_timed_as_a_backward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The inputs contain dO, and a peer is its backward."""
    timed: list[Any] = []
    monkeypatch.setattr(peers, "backward", lambda peer: dataclasses.replace(peer, name=f"backward of {peer.name}"))
    monkeypatch.setattr(benchmark, "matching_rows", lambda *_, computes: timed.append(computes) or [])
    monkeypatch.setattr(Ladder, "compile_all", lambda self: None)
    monkeypatch.setattr(
        benchmark, "run_contenders", lambda contenders, _, computes, *rest: timed.append((contenders, computes)) or []
    )
    assert [*backward_ladder().measure(tmp_path / "rows.jsonl")] == []
    [read, (contenders, computes)] = timed
    assert (read, computes) == ("backward", "backward")
    assert [contender.name for contender in contenders] == ["plain", "backward of sdpa-flash"]


@pytest.mark.gpu
def test_steps_of_a_backward_on_a_gpu(tmp_path: Path) -> None:
    ladder = backward_ladder()
    assert len([*ladder.measure(tmp_path / "rows.jsonl", seconds=0.01)]) == 2
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["contender"], row["computes"], row["ok"]) for row in rows] == [
        ("plain", "backward", True), ("sdpa-flash", "backward", True),
    ]  # fmt: skip
    assert [*ladder.measure(tmp_path / "rows.jsonl")] == []  # all is measured
