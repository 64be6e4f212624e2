"""Dropout as callers meet it: the seed's ways in, whose generator draws it, and what PyTorch's tools make of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sandbox
from sandbox import reference
from sandbox.core.errors import SpecError, UnsupportedProblem

torch = pytest.importorskip("torch")
P = 0.4


def inputs(requires_grad: bool = False, dtype: Any = torch.float32) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((1, 2, 19, 16), (1, 1, 37, 16), (1, 1, 37, 16))
    return tuple(torch.randn(s, generator=draw).to(dtype).requires_grad_(requires_grad) for s in shapes)


def run(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return sandbox.attention(q, k, v, dropout=P, causal=True, kernel="fwd_minimal", **options)


def test_a_seed_says_which_as_the_reference_does() -> None:
    q, k, v = (x.numpy() for x in inputs())
    for seed in (5, -5, np.int64(7), np.array([11]), np.array(13)):
        out, lse = sandbox.attention_forward(q, k, v, dropout=P, seed=seed)
        ref, ref_lse = reference.attention(q, k, v, dropout=P, seed=int(np.asarray(seed).item()))
        assert abs(out - ref).max() <= 1e-5
        assert abs(lse - ref_lse).max() <= 1e-5


def test_seeds_are_64_bits() -> None:
    tensors = inputs()
    assert torch.equal(run(*tensors, seed=2**64 - 3), run(*tensors, seed=-3))
    assert not torch.equal(run(*tensors, seed=2**32 + 3), run(*tensors, seed=3))


def test_nothing_and_everything_dropped() -> None:
    tensors = inputs()
    assert torch.equal(sandbox.attention(*tensors, dropout=0.0, seed=3), sandbox.attention(*tensors))
    tensors = inputs(requires_grad=True)
    out, lse = sandbox.attention(*tensors, dropout=1.0, seed=3, return_lse=True)
    out.sum().backward()
    assert torch.equal(lse, sandbox.attention(*tensors, return_lse=True)[1])
    assert not out.any()
    assert not any(x.grad.any() for x in tensors)


@pytest.mark.parametrize("p", [1 - 2.0**-16, 1 - 2.0**-17, 1 - 2.0**-18, 1 - 2.0**-40])
def test_a_probability_just_below_one(p: float) -> None:
    """p counts in steps of 2^-16: nearer to 1 than half of one nothing is kept, not the elements of the last step."""
    shape = 1, 1, 128, 128
    seed = next(n for n in range(100) if reference.dropout_keep(n, *shape, 1 - 2.0**-16).any())
    q, k, v, dout = (torch.randn(1, 1, 128, 16, generator=torch.Generator().manual_seed(n)) for n in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = sandbox.attention(q, k, v, dropout=p, seed=seed, return_lse=True)
    assert torch.equal(lse, sandbox.attention(q, k, v, return_lse=True)[1])
    found = torch.autograd.grad(out, (q, k, v), dout)
    kept = p == 1 - 2.0**-16
    assert reference.dropout_keep(seed, *shape, p).any() == kept
    assert [bool(x.any()) for x in (out, *found)] == [kept] * 4
    true = reference.attention(*(x.detach().numpy() for x in (q, k, v)), dropout=p, seed=seed)[0]
    assert abs(out.detach().numpy() - true).max() <= 1e-5 * max(1.0, abs(true).max())


def test_numpy_draws_from_its_own_generator() -> None:
    arrays = tuple(x.numpy() for x in inputs())
    found = []
    for seed in (0, 0, 1):
        np.random.seed(seed)
        found.append(run(*arrays))
    assert (found[0] == found[1]).all()
    assert (found[0] != found[2]).any()


def test_manual_seed_repeats_a_draw_and_calls_differ() -> None:
    tensors = inputs()
    torch.manual_seed(3)
    first, second = run(*tensors), run(*tensors)
    torch.manual_seed(3)
    assert torch.equal(run(*tensors), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("seed", [17, torch.tensor([17]), torch.tensor(17)])
def test_gradients_are_those_of_the_same_elements(seed: Any) -> None:
    tensors = inputs(requires_grad=True)
    dout = torch.randn(1, 2, 19, 16, generator=torch.Generator().manual_seed(1))
    run(*tensors, seed=seed).backward(dout)
    expected = reference.attention_backward(
        dout.numpy(), *(x.detach().numpy() for x in tensors), causal=True, dropout=P, seed=17
    )
    for x, exact in zip(tensors, expected, strict=True):
        assert abs(x.grad.numpy() - exact).max() <= 1e-5


def test_the_backward_keeps_the_seed_that_was_drawn() -> None:
    """Against differences: the derivative of a sum along a direction, all with one draw."""
    q, k, v = inputs(requires_grad=True)
    torch.manual_seed(2)
    run(q, k, v).sum().backward()

    def at(step: float) -> float:
        torch.manual_seed(2)
        return float(run(q + step, k, v * (1 + step)).detach().double().sum())

    step = 1e-2
    along = float((q.grad.sum() + (v.grad * v).sum()).detach())
    assert along == pytest.approx((at(step) - at(-step)) / (2 * step), rel=1e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_again(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    found = []
    for recomputed in (False, True):
        tensors = inputs(requires_grad=True)
        torch.manual_seed(4)
        out = checkpoint(run, *tensors, use_reentrant=reentrant) if recomputed else run(*tensors)
        out.sum().backward()
        found.append((out, *(x.grad for x in tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_compiled_calls_draw_anew_and_differentiate() -> None:
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    tensors = inputs(requires_grad=True)
    torch.manual_seed(5)
    first = compiled(*tensors)
    second = compiled(*tensors)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(run(*tensors), first)
    seeded = compiled(*tensors, seed=torch.tensor([17]))
    seeded.sum().backward()
    plain = inputs(requires_grad=True)
    run(*plain, seed=17).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(tensors, plain, strict=True))


def test_refusals() -> None:
    q, k, v = inputs()
    out, lse = sandbox.attention_forward(q, k, v, dropout=P, seed=1)
    with pytest.raises(UnsupportedProblem, match="needs the seed of the forward"):
        sandbox.attention_backward(out, q, k, v, out, lse, dropout=P)
    with pytest.raises(SpecError, match="must be a probability"):
        sandbox.attention(q, k, v, dropout=1.5, seed=1)
    with pytest.raises(SpecError, match="must be an integer"):
        run(q, k, v, seed=1.5)
    with pytest.raises(UnsupportedProblem, match="seed is float32: it must be int64"):
        run(q, k, v, seed=torch.ones(1))
    with pytest.raises(UnsupportedProblem, match="it must have one element"):
        run(q, k, v, seed=torch.ones(2, dtype=torch.int64))
