"""Calls like earlier ones find their plan by a comparison of the arrays; whatever is not alike does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import sandbox
from sandbox.api import dispatch
from sandbox.core.errors import UnsupportedProblem
from sandbox.launch import dlpack

torch = pytest.importorskip("torch")
Tensor = torch.Tensor
KERNELS = {"kernel": "fwd_minimal"}


@pytest.fixture(autouse=True)
def _no_plans():
    sandbox.reload()


def tensors(dtype: torch.dtype = torch.float16, S: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, S, 16, generator=generator).to(dtype) for _ in range(4)]


def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: object) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = sandbox.attention(*leaves, **KERNELS, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def routes() -> int:
    return sum(len(some) for kind in dispatch._plans.routes.values() for some in kind.values())


def test_a_route_is_made_when_a_key_is_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that no call builds a key. The results are bitwise equal; other tensors have other results."""
    found = [both(*tensors()) for _ in range(2)]
    assert routes() == 2  # forward and backward
    monkeypatch.setattr(dlpack._PyTorch, "signatures", lambda *args: pytest.fail("a key"))
    found.append(both(*tensors()))
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))
    q, k, v, dout = tensors()
    assert torch.equal(both(q, k, 2 * v, dout)[0], 2 * found[0][0])
    sandbox.reload()
    assert routes() == 0


@pytest.mark.parametrize("scale", [1, True, np.float64(0.3), np.float32(0.25), np.int64(2)], ids=repr)
@pytest.mark.parametrize("options", [{}, KERNELS, {"window": (3, 0)}], ids=["plain", "basic", "window"])
def test_a_scale_that_is_a_number_finds_its_route(monkeypatch: pytest.MonkeyPatch, options: dict, scale: Any) -> None:
    q, k, v = (x.float().numpy() for x in tensors()[:3])
    expected = [sandbox.attention(q, k, v, scale=float(scale), **options) for _ in range(2)]
    assert routes() == 1
    monkeypatch.setattr(dispatch, "_planned", lambda *args: pytest.fail("no route"))
    for function in (sandbox.attention, lambda *args, **more: sandbox.attention_forward(*args, **more)[0]):
        assert (function(q, k, v, scale=scale, **options) == expected[0]).all()


def with_level(call: Callable[..., Any]) -> Callable[..., Any]:
    def in_level(*args: Any, **options: Any) -> Any:
        with torch.autograd.forward_ad.dual_level():
            return call(*args, **options)

    return in_level


WITHOUT_ROUTE: dict[str, Any] = {
    "scale of PyTorch": {"scale": torch.tensor(0.25)},
    "scale of NumPy": {"scale": np.array(0.25)},
    "dict": {"tile": {"BLOCK_M": 16, "BLOCK_N": 16}},
    "dual level": {},
}


@pytest.mark.parametrize("name", WITHOUT_ROUTE)
def test_calls_that_find_no_route_evict_none(name: str) -> None:
    """They find their plan by its key, at each call."""
    q, k, v, _ = tensors()
    for S in range(1, 6):
        for _ in range(2):
            sandbox.attention(q[:, :, :S], k, v, **KERNELS)
    before = routes()
    call = with_level(sandbox.attention) if name == "dual level" else sandbox.attention
    for _ in range(12):
        call(q, k, v, **KERNELS, **WITHOUT_ROUTE[name])
    assert routes() <= before + 1


def test_without_tensor_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch may lack TensorGuards: every call builds its key then."""
    expected = both(*tensors())
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    for _ in range(3):
        assert all(map(torch.equal, both(*tensors()), expected))
    assert routes() == 0


PACKAGE = str(Path(sandbox.__file__).parent)


def path_of(call: Callable[[], Any], array: Any) -> tuple[list[str], list[str]]:
    """The functions of this package that receive `array` during `call`, and those that are active at the launch: each
    as module.function, in the order of the calls."""
    receiving, active = [], []

    def inside(frame: FrameType | None) -> list[str]:
        code = frame.f_code if frame else None
        return (
            [f"{Path(code.co_filename).stem}.{code.co_name}"] if code and code.co_filename.startswith(PACKAGE) else []
        )

    def traced(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not inside(frame):
            return
        values = frame.f_locals.values()
        if any(x is array or (isinstance(x, tuple) and any(y is array for y in x)) for x in values):
            receiving.extend(inside(frame))
        if frame.f_code.co_name == "launch_all":
            while frame:
                active[:0] = inside(frame)
                frame = frame.f_back

    sys.setprofile(traced)
    try:
        call()
    finally:
        sys.setprofile(None)
    return receiving, active


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (3, 0)}], ids=["plain", "window"])
@pytest.mark.parametrize(
    "function",
    ["attention_forward", "attention", "attention with gradient", "attention_forward of NumPy", "attention of NumPy"],
)
def test_the_path_from_a_public_function_to_the_launch(function: str, options: dict) -> None:
    """As in CONTRIBUTING: later calls pass q to at most nine functions, and to no module three times. The first call
    also passes it to validation; few functions are active at the launch."""
    name, _, _ = function.partition(" ")
    q, k, v, _ = tensors()
    if function.endswith("gradient"):
        q.requires_grad_()
    if function.endswith("NumPy"):
        q, k, v = (x.numpy() for x in (q, k, v))
    first, _, later = (path_of(lambda: getattr(sandbox, name)(q, k, v, **KERNELS, **options), q) for _ in range(3))
    for path in (first[1], later[0], later[1]):
        assert 0 < len(path) <= 9, path
        modules = [module for module, _ in groupby(name.partition(".")[0] for name in path)]
        assert max(map(modules.count, modules)) <= 2, path
    assert {"dispatch.known", "plan.plan"} <= {*later[0]}
    assert "dispatch._make_plan" in first[0]


def test_a_route_of_one_library_is_none_for_another() -> None:
    """Also within one call: a check of NumPy arrays is not confused by tensors, nor that of tensors by arrays."""
    given = tensors(torch.float32)[:3]
    arrays = [x.numpy() for x in given]
    expected = sandbox.attention_forward(*arrays, **KERNELS)[0]
    for _ in range(3):
        for q, k, v in (given, arrays):
            out, _ = sandbox.attention_forward(q, k, v, **KERNELS)
            assert type(out) is type(q)
            assert (expected == (out.numpy() if q is given[0] else out)).all()
    assert routes() == 2
    for mixed in ((arrays[0], *given[1:]), (given[0], *arrays[1:])):
        with pytest.raises(UnsupportedProblem, match="pass arrays of one library"):
            sandbox.attention_forward(*mixed, **KERNELS)


CHANGES = {
    "dtype": lambda q, k, v, dout: [x.bfloat16() for x in (q, k, v, dout)],
    "rows": lambda q, k, v, dout: [q, k[:, :, :5], v[:, :, :5], dout],
    "strides": lambda q, k, v, dout: [q.transpose(1, 2).contiguous().transpose(1, 2), k, v, dout],
    "strides of dout": lambda q, k, v, dout: [q, k, v, dout[..., :1].expand(dout.shape)],
    "address": lambda q, k, v, dout: [q, torch.cat((k.new_zeros(3), k.flatten()))[3:].view(k.shape), v, dout],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_not_alike_has_its_own_plan(change) -> None:
    for _ in range(3):
        both(*tensors())
    changed = change(*tensors())
    found = both(*changed)
    sandbox.reload()
    assert all(map(torch.equal, found, both(*changed)))


def test_a_kernel_that_needs_alignment_refuses_still() -> None:
    q, k, v, _ = tensors(S=33)
    for _ in range(3):
        sandbox.attention_forward(q, k, v, kernel="fwd_mma")
    moved = torch.cat((k.new_zeros(2), k.flatten()))[2:].view(k.shape)
    with pytest.raises(UnsupportedProblem, match="rows aligned to 4 bytes"):
        sandbox.attention_forward(q, moved, v, kernel="fwd_mma")


def test_memory_that_was_given_back() -> None:
    """Shape and strides stay, the address is 0."""
    q, k, v, _ = tensors()
    for _ in range(3):
        sandbox.attention_forward(q, k, v, **KERNELS)
    k.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedProblem, match="without memory"):
        sandbox.attention_forward(q, k, v, **KERNELS)


@pytest.mark.parametrize("calls", [1, 3], ids=["after a plan", "after a route"])
@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "bias", "alibi", "score.t"])
@pytest.mark.sampled(2)
def test_lazily_negated_tensors_are_refused_by_name(name: str, calls: int) -> None:
    """They share memory, shape and strides with their base, whose plan is there."""
    q, k, v, dout = tensors(torch.float32)
    given = {"dout": dout, "q": q, "k": k, "v": v, "bias": torch.ones(9, 9), "alibi": torch.ones(2),
             "score.t": torch.ones(9)}  # fmt: skip

    def call(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, alibi: Tensor, t: Tensor) -> None:
        options = {"bias": bias, "alibi": alibi, "score": sandbox.Score("x + t(i)", tensors={"t": t})}
        out, lse = sandbox.attention_forward(q, k, v, **KERNELS, **options)
        sandbox.attention_backward(dout, q, k, v, out, lse, **options)

    for _ in range(calls):
        call(*given.values())
    with pytest.raises(UnsupportedProblem, match=rf"^{name}: a lazily negated tensor is not supported"):
        call(*(given | {name: torch._neg_view(given[name])}).values())


@pytest.mark.parametrize("options", [{}, {"window": (3, 0)}], ids=["plain", "window"])
def test_gradients_that_come_lazily_negated(options: dict) -> None:
    """Autograd may deliver a lazily negated gradient, such as the imaginary part of a conjugate: it is resolved."""
    q, k, v, dout = tensors(torch.float32)
    leaf = q.requires_grad_()
    out, lse = sandbox.attention(leaf, k, v, return_lse=True, **KERNELS, **options)
    dlse = torch.ones_like(lse)
    for _ in range(3):
        for results, given in ((out, dout), (lse, dlse)):
            (expected,) = torch.autograd.grad(results, leaf, -given, retain_graph=True)
            (found,) = torch.autograd.grad(results, leaf, torch._neg_view(given), retain_graph=True)
            assert torch.equal(found, expected)


def test_autocast_to_another_dtype() -> None:
    """Tensors that one autocast leaves as they are another casts."""
    q, k, v, dout = tensors(torch.bfloat16)
    for _ in range(3):
        both(q, k, v, dout)
    dtypes = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            for _ in range(3):
                dtypes.append(sandbox.attention(q, k, v, **KERNELS).dtype)
                sandbox.attention_forward(q, k, v, **KERNELS)  # does not cast, whose route is none to the other
    assert dtypes == [torch.bfloat16] * 3 + [torch.float16] * 3


def test_gradients_only_where_they_are_wanted() -> None:
    q, k, v, _ = tensors()
    for _ in range(3):
        assert sandbox.attention(q, k, v, **KERNELS).grad_fn is None
    leaf = q.requires_grad_()
    for _ in range(3):
        assert sandbox.attention(leaf, k, v, **KERNELS).grad_fn is not None
        with torch.no_grad():
            assert sandbox.attention(leaf, k, v, **KERNELS).grad_fn is None


def test_lse_is_a_result_for_who_asks_and_saved_for_all() -> None:
    """The same bits with it and without, by turns; elsewhere than where they were made, too."""

    def moved(x: Tensor) -> Tensor:
        return x.clone()

    expected = both(*tensors())
    for _ in range(3):
        for options in ({}, {"return_lse": True}):
            q, k, v, dout = tensors()
            leaves = [x.requires_grad_() for x in (q, k, v)]
            with torch.autograd.graph.saved_tensors_hooks(moved, moved):
                out = sandbox.attention(*leaves, **KERNELS, **options)
            found = out if options else (out,)
            assert all(x.requires_grad for x in found)
            assert all(map(torch.equal, torch.autograd.grad(found[0], leaves, dout), expected[1:]))


def test_gradients_that_are_watched() -> None:
    """A graph of the backward, and many gradients at once, after routes were made."""
    q, k, v, dout = tensors(torch.float32)
    for _ in range(3):
        both(q, k, v, dout)
    leaf = q.requires_grad_()
    out = sandbox.attention(leaf, k, v, **KERNELS)
    (single,) = torch.autograd.grad(out, leaf, dout, retain_graph=True)
    (many,) = torch.autograd.grad(out, leaf, torch.stack((dout, 2 * dout)), is_grads_batched=True, retain_graph=True)
    assert (many - torch.stack((single, 2 * single))).abs().max() < 1e-5
    (graph,) = torch.autograd.grad(out, leaf, dout, create_graph=True)
    with pytest.raises(UnsupportedProblem, match="differentiated twice"):
        graph.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
def test_compiled_autograd() -> None:
    """PyTorch's compiler takes the backward as it finds it, of a route or not."""
    from torch._dynamo import compiled_autograd

    expected = both(*tensors())
    for _ in range(3):
        with compiled_autograd._enable(torch.compile(backend="eager")):
            q, k, v, dout = tensors()
            leaves = [x.requires_grad_() for x in (q, k, v)]
            sandbox.attention(*leaves, **KERNELS).backward(dout)
        assert all(torch.equal(x.grad, y) for x, y in zip(leaves, expected[1:], strict=True))


def test_a_few_routes_of_one_kind() -> None:
    for S in range(1, 14):
        for _ in range(2):
            sandbox.attention_forward(*tensors(S=S)[:3], **KERNELS)
    assert routes() == 8
    assert torch.equal(*(sandbox.attention_forward(*tensors(S=1)[:3], **KERNELS)[0] for _ in range(2)))


class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
    """Writes down which operators of ours it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.seen += [str(f)] if "sandbox" in str(f) else []
        return f(*args, **(kwargs or {}))


def seen_by_a_mode(call) -> bool:
    with Seeing() as mode:
        call()
    return bool(mode.seen)


def dual(call) -> bool:
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedProblem, match="forward-mode"):
        call(lambda x: torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    return True


def mapped(call) -> bool:
    return torch.equal(torch.func.vmap(lambda x: call(lambda q: x))(tensors()[0][None])[0], call())


def traced(call) -> bool:
    graph = torch.jit.trace(lambda x: call(lambda q: x), tensors()[0], check_trace=False).graph
    return "sandbox::attention" in str(graph)


def recorded(call) -> bool:
    make_fx = torch.fx.experimental.proxy_tensor.make_fx
    return all("sandbox.attention" in make_fx(lambda x: call(lambda q: x), pre_dispatch=early)(tensors()[0]).code
               for early in (False, True))  # fmt: skip


def compiled(call) -> bool:
    whole = torch.compile(call, backend="aot_eager", fullgraph=True)
    return torch.equal(whole(), call())


WATCHERS = seen_by_a_mode, dual, mapped, traced, recorded, compiled


@pytest.mark.parametrize("watcher", WATCHERS, ids=lambda watcher: watcher.__name__)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_modes_that_start_after_routes_were_made(watcher) -> None:
    """Modes and transforms are never bypassed, including those that PyTorch's guards do not report."""
    q, k, v, _ = tensors()

    def call(change=lambda x: x):
        return sandbox.attention_forward(change(q), k, v, **KERNELS)[0]

    for _ in range(3):
        call()
    assert routes() == 1
    assert watcher(call)


def test_arrays_past_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's own empty_strided makes them, with and without what its compiler calls; inference tensors too."""
    guards = torch._C._dynamo.guards
    library = dlpack.library_of(torch.empty(0))
    kinds = []
    for name in ("_empty_strided_cpu", None):
        if name is None:
            monkeypatch.delattr(guards, "_empty_strided_cpu")
        new = library.allocator(torch.empty(0), (2, 3, 4), (12, 1, 3), "bfloat16")
        with torch.inference_mode():
            inferred = new()
        made = new()
        kinds.append((made.shape, made.stride(), made.dtype, made.device, made.is_inference(), inferred.is_inference()))
    assert kinds[0] == kinds[1] == ((2, 3, 4), (12, 1, 3), torch.bfloat16, torch.device("cpu"), False, True)
