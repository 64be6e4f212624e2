"""What a plan is kept under: everything that it was made from, as values."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sandbox
from sandbox import reference
from sandbox.api import dispatch, plan
from sandbox.core import registry
from sandbox.core.errors import SpecError, UnsupportedProblem
from sandbox.engine import staging
from sandbox.launch import dlpack
from sandbox.launch.dlpack import HOST
from sandbox.spec import Problem, Tile


@pytest.fixture(autouse=True)
def _no_plans():
    sandbox.reload()


def lying(array: np.ndarray, offset: int) -> np.ndarray:
    """The same numbers, `offset` bytes past a multiple of 16."""
    memory = np.empty(array.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def inputs(dtype=np.float16, S: int = 33, D: int = 64) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((1, 2, S, D), np.float32).astype(dtype) for _ in range(3))


@pytest.mark.parametrize("which", range(3))
def test_the_forward_heeds_where_each_of_its_tensors_lies(which: int) -> None:
    """Aligned first, then not: the kernel that copies 16 bytes at a time takes the one and not the other."""
    aligned = [lying(x, 0) for x in inputs()]
    sandbox.attention_forward(*aligned, kernel="fwd_mma")
    aligned[which] = lying(aligned[which], 4)
    with pytest.raises(UnsupportedProblem, match="rows aligned to 4 bytes"):
        sandbox.attention_forward(*aligned, kernel="fwd_mma")


def gradients_of(offsets: dict[str, int], lse_step: int = 1, spread: bool = False) -> dict[str, np.ndarray]:
    """Arguments of `attention_backward`; those in `offsets` lie so many bytes past a multiple of 16."""
    q, k, v = inputs()
    out, lse = (x for x in reference.attention(q, k, v))
    rng = np.random.default_rng(1)
    dout = rng.standard_normal(q.shape, np.float32).astype(q.dtype)
    every = {"dout": dout, "q": q, "k": k, "v": v, "out": out.astype(q.dtype), "lse": lse.astype(np.float32)}
    every = {name: lying(array, offsets.get(name, 0)) for name, array in every.items()}
    if lse_step > 1:
        every["lse"] = np.repeat(every["lse"], lse_step, -1)[..., ::lse_step]
    if spread:
        wide = lying(np.repeat(every["dout"], 2, -1), offsets.get("dout", 0))
        every["dout"] = wide[..., ::2]
    return every


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out"])
@pytest.mark.parametrize("before", [{}, {"lse": 4}, {"dout": 4}], ids=["aligned", "lse at 4", "a copied dout at 4"])
@pytest.mark.sampled(3)
def test_the_backward_heeds_where_each_of_its_tensors_lies(name: str, before: dict[str, int]) -> None:
    """And not where lie those that are read number by number, or copied first."""
    spread = "dout" in before
    if spread and name == "dout":
        pytest.skip("it is copied")
    first, second = gradients_of(before, spread=spread), gradients_of({**before, name: 4}, spread=spread)
    sandbox.attention_backward(*first.values(), kernel="bwd_mma")
    with pytest.raises(UnsupportedProblem, match="rows aligned to 4 bytes"):
        sandbox.attention_backward(*second.values(), kernel="bwd_mma")


def test_copies_are_planned_for_as_they_lie() -> None:
    """A contiguous array takes the place of one that no kernel reads; its plan is that of any such array."""
    expected = sandbox.attention_backward(*gradients_of({}).values())
    for spread, step in ((True, 1), (False, 2), (True, 2)):
        got = sandbox.attention_backward(*gradients_of({}, step, spread).values())
        assert all(map(np.array_equal, got, expected))


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "heads", "rows"])
def test_an_lse_with_gaps_is_copied(axis: int) -> None:
    q, k, v = (np.repeat(x[:1, :1], 2, 0).repeat(2, 1) for x in inputs())
    out, lse = reference.attention(q, k, v)
    every = [q, q, k, v, out.astype(q.dtype), lse.astype(np.float32)]
    every[-1] *= np.arange(1, 5).reshape(2, 2, 1)  # each head has its own
    expected = sandbox.attention_backward(*every)
    between = (*(slice(None),) * axis, slice(None, None, 2))
    got = sandbox.attention_backward(*every[:-1], np.repeat(every[-1], 2, axis)[between])
    assert all(map(np.array_equal, got, expected))


def test_as_many_plans_as_alignments(monkeypatch: pytest.MonkeyPatch) -> None:
    """2, 4, 8 and 16 bytes, whatever the addresses; of lse's none."""
    made = []
    for maker in ("forward_plan", "backward_plan"):
        real = getattr(plan, maker)
        monkeypatch.setattr(plan, maker, lambda *args, real=real: made.append(args) or real(*args))
    for offset in range(0, 16, 2):
        q, k, v = inputs(D=8, S=5)
        sandbox.attention_forward(lying(q, offset), lying(k, 0), lying(v, 0))
    assert len(made) == 4
    made.clear()
    for offset in (0, 4, 8, 12):
        sandbox.attention_backward(*gradients_of({"lse": offset}).values())
    assert len(made) == 1


@pytest.mark.parametrize("offsets", [(0, 4), (4, 0)], ids=["aligned first", "misaligned first"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_the_alignment_of_a_bias_counts(which: str, offsets: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor map describes the one and not the other, also where q, k and v lie alike."""
    problems, real = [], plan.problem_of
    monkeypatch.setattr(plan, "problem_of", lambda *args: problems.append(real(*args)) or problems[-1])
    every = list(gradients_of({}).values())
    arrays, call = (
        (every[1:4], sandbox.attention_forward) if which == "forward" else (every, sandbox.attention_backward)
    )
    bias = np.random.default_rng(2).standard_normal((33, 40), np.float32).astype(np.float16)[:, :33]
    found = []
    for offset in offsets:
        memory = lying(np.ascontiguousarray(bias.base), offset)
        found.append(call(*arrays, bias=memory[:, :33], kernel="fwd_mma" if which == "forward" else "bwd_mma"))
    assert [p.bias_boxes for p in problems] == [not offset for offset in offsets]
    assert all(map(np.array_equal, *found))


@pytest.mark.parametrize("offsets", [(0, 4, 0), (4, 0, 4)], ids=["aligned first", "misaligned first"])
def test_the_alignment_of_a_block_map_counts(offsets: tuple[int, ...]) -> None:
    """A map that is refused where it lies is taken elsewhere, and the other way round."""
    q, k, v = (lying(x, 0) for x in inputs())
    score = sandbox.Score(mask="j <= i")
    made = sandbox.block_map(score, sandbox.Problem(1, 2, 33, 33, 64, dtype="float16"), like=q)
    bias = np.zeros((33, 33), np.float16)
    for offset in offsets:
        options = {"score": score.with_blocks(lying(made, offset)), "bias": lying(bias, 4 - offset)}
        if offset:
            with pytest.raises(UnsupportedProblem, match="score has a block map of shape"):
                sandbox.attention_forward(q, k, v, **options)
        else:
            sandbox.attention_forward(q, k, v, **options)


def test_every_option_counts() -> None:
    """What was planned without it does not answer for it."""
    q, k, v = inputs(np.float32, 9, 16)
    sandbox.attention_forward(q, k, v)
    with pytest.raises(UnsupportedProblem, match="backend='tpu' is not known"):
        sandbox.attention_forward(q, k, v, backend="tpu")
    arrays = gradients_of({}).values()
    sandbox.attention_backward(*arrays, kernel="bwd_mma")
    with pytest.raises(UnsupportedProblem, match=r"bwd_mma is not deterministic: .*: choose \w+$") as caught:
        sandbox.attention_backward(*arrays, kernel="bwd_mma", deterministic=True)
    assert registry.get(str(caught.value).split()[-1]).deterministic
    with pytest.raises(UnsupportedProblem, match="backend='tpu' is not known"):
        sandbox.attention_backward(*arrays, backend="tpu")


def test_an_address_of_zero_is_never_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even after a plan for such arrays was made; where there is nothing it is as good as any."""
    q, k, v = inputs(np.float32, 9, 16)
    sandbox.attention_forward(q, k, v)
    library = type(dlpack.library_of(q))
    real = library.view
    monkeypatch.setattr(library, "pointer", lambda self, x: 0 if x is k else x.ctypes.data)

    def view(self: dlpack.Library, x: np.ndarray) -> dlpack.ArrayView:
        own = real(self, x)
        return dlpack.ArrayView(self.pointer(x), own.shape, own.strides, own.dtype, own.device, own.owner)

    monkeypatch.setattr(library, "view", view)
    with pytest.raises(UnsupportedProblem, match=r"an array of shape \(1, 2, 9, 16\) without memory is not supported"):
        sandbox.attention_forward(q, k, v)
    with pytest.raises(
        UnsupportedProblem, match=r"an array of shape \(2, 3\) without memory is not supported \(its address is 0\)"
    ):
        dlpack.ArrayView(0, (2, 3), (3, 1), "float32", dlpack.HOST, None)
    assert dlpack.ArrayView(0, (2, 0), (1, 1), "float32", dlpack.HOST, None).extent() == (0, 0)


def test_a_tile_given_as_a_dict_has_a_plan() -> None:
    """A dict is not hashable: without a key each call would take 2 ms."""
    q, k, v = inputs(np.float32, 9, 16)
    sizes = {"BLOCK_M": 32, "BLOCK_N": 16}
    for tile in (sizes, sizes, Tile(**sizes)):
        sandbox.attention_forward(q, k, v, kernel="fwd_minimal", tile=tile)
        assert len(dispatch._plans) == 1
    with pytest.raises(SpecError, match="tile: BLOCK_M=0 must be an integer"):
        sandbox.attention_forward(q, k, v, kernel="fwd_minimal", tile={"BLOCK_M": 0})


# ---- scale


@pytest.mark.parametrize("make", [np.float64, np.float32, np.array, lambda x: np.full((1,), x)[0], float])
def test_a_scale_is_its_value(make) -> None:
    q, k, v = inputs(np.float32, 9, 16)
    assert np.array_equal(sandbox.attention(q, k, v, scale=make(0.5)), sandbox.attention(q, k, v, scale=0.5))
    assert len(dispatch._plans) == 1


def test_a_scale_that_is_no_number() -> None:
    with pytest.raises(SpecError, match=r"scale=\[1\] must be a number"):
        sandbox.attention(*inputs(), scale=[1])


def test_a_scale_changed_in_place() -> None:
    """The next call sees the new value, forward and backward."""
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, inputs(np.float32, 9, 16))
    scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
    for value in (0.5, 2.0):
        scale.fill_(value)
        out, lse = sandbox.attention_forward(q, k, v, scale=scale)
        assert torch.equal(out, sandbox.attention(q, k, v, scale=value))
        got = sandbox.attention_backward(out, q, k, v, out, lse, scale=scale)
        expected = sandbox.attention_backward(out, q, k, v, out, lse, scale=value)
        assert all(map(torch.equal, got, expected))


def test_a_scale_that_wants_a_gradient_is_refused() -> None:
    """None comes back to it; where none is recorded, it is a number."""
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, inputs(np.float32, 9, 16))
    scale = torch.nn.Parameter(torch.tensor(0.5))
    expected = sandbox.attention(q, k, v, scale=0.5)
    with pytest.raises(UnsupportedProblem, match=r"no gradient for it: pass scale\.detach\(\)"):
        sandbox.attention(q, k, v, scale=scale)
    with pytest.raises(UnsupportedProblem, match="no gradient for it"):
        torch.func.grad(lambda s: sandbox.attention(q, k, v, scale=s).sum())(scale.detach())
    with pytest.raises(UnsupportedProblem, match="no gradient for it"):
        torch.func.jvp(lambda s: sandbox.attention(q, k, v, scale=s), (scale.detach(),), (torch.tensor(1.0),))
    assert torch.equal(sandbox.attention(q, k, v, scale=scale.detach()), expected)
    with torch.no_grad():
        assert torch.equal(sandbox.attention(q, k, v, scale=scale), expected)


OPTIONS = {"softcap": (0.5, 2.0), "dropout": (0.25, 0.75)}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_its_value(name: str) -> None:
    """An array of one number, and an integer, are the number: no plan belongs to the object."""
    q, k, v = inputs(np.float32, 9, 16)
    value = OPTIONS[name][0]
    expected = sandbox.attention(q, k, v, seed=1, **{name: value})
    for make in (np.float64, np.float32, np.array):
        assert np.array_equal(sandbox.attention(q, k, v, seed=1, **{name: make(value)}), expected)
    assert len(dispatch._plans) == 1
    assert np.array_equal(*(sandbox.attention(q, k, v, seed=1, **{name: one}) for one in (1, 1.0)))
    with pytest.raises(SpecError, match=rf"{name}=\[1\] must be a number"):
        sandbox.attention(q, k, v, **{name: [1]})


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changed_in_place(name: str) -> None:
    """The next call sees the new value, forward and backward."""
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, inputs(np.float32, 9, 16))
    held = torch.tensor(0.0)
    for value in OPTIONS[name]:
        held.fill_(value)
        for _ in range(3):
            out, lse = sandbox.attention_forward(q, k, v, seed=1, **{name: held})
            assert torch.equal(out, sandbox.attention(q, k, v, seed=1, **{name: value}))
            got = sandbox.attention_backward(out, q, k, v, out, lse, seed=1, **{name: held})
            expected = sandbox.attention_backward(out, q, k, v, out, lse, seed=1, **{name: value})
            assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_wants_a_gradient_is_refused(name: str) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, inputs(np.float32, 9, 16))
    value = torch.tensor(0.5)
    expected = sandbox.attention(q, k, v, seed=1, **{name: 0.5})
    leaf = value.clone().requires_grad_()

    def call(x) -> torch.Tensor:
        return sandbox.attention(q, k, v, seed=1, **{name: x})

    for compute in (call, torch.func.grad(lambda x: call(x).sum()), lambda x: torch.func.jvp(call, (value,), (value,))):
        with pytest.raises(UnsupportedProblem, match=rf"no gradient for it: pass {name}\.detach\(\)"):
            compute(leaf)
    assert torch.equal(call(leaf.detach()), expected)
    with torch.no_grad():
        assert torch.equal(call(leaf), expected)


def test_a_scale_that_wants_a_gradient_is_refused_where_there_is_none() -> None:
    """Of keys in pages, and of float8, as of other inputs that want one."""
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 2, 1, 16, dtype=torch.float16)
    pages, table = torch.zeros(2, 16, 2, 16, dtype=torch.float16), torch.tensor([[1]], dtype=torch.int32)
    lengths, scale = torch.tensor([9], dtype=torch.int32), torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises(UnsupportedProblem, match="attention_paged has no gradient"):
        sandbox.attention_paged(q, pages, pages, table, lengths, scale=scale)
    for of_numpy in ((table.numpy(), lengths), (table, lengths.numpy()), (table.numpy(), lengths.numpy())):
        with pytest.raises(UnsupportedProblem, match="attention_paged has no gradient"):
            sandbox.attention_paged(q.clone().requires_grad_(), pages, pages, *of_numpy)
    eighth = q.to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedProblem, match="attention of float8 has no gradient"):
        sandbox.attention(eighth, eighth, eighth, scale=scale, descale=(1.0, 1.0, 1.0))


# ---- reload


def test_a_plan_in_the_making_does_not_outlive_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made from what was there before, it serves its own call alone."""
    q, k, v = inputs(np.float32, 9, 16)
    begun, reloaded = threading.Event(), threading.Event()
    real = plan.forward_plan

    def slow(*args):
        begun.set()
        assert reloaded.wait(60)
        return real(*args)

    monkeypatch.setattr(plan, "forward_plan", slow)
    thread = threading.Thread(target=sandbox.attention_forward, args=(q, k, v))
    thread.start()
    assert begun.wait(60)
    sandbox.reload()
    reloaded.set()
    thread.join()
    assert not dispatch._plans


@pytest.mark.parametrize("unwritten", [False, True])
def test_arrays_for_another_device_are_copied(unwritten: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs before the launch and results after it. With `unwritten`, also results whose rows a launch may leave: of
    a ragged batch with fewer rows in its sequences than in its arrays. The other device is host memory here."""
    move = lambda to, of, nbytes, gpu: ctypes.memmove(to, of, nbytes)  # noqa: E731
    gpu = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(staging, "driver", SimpleNamespace(device=lambda number: gpu, read=move, write=move))
    kernel, rng = registry.get("fwd_minimal"), np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, 40, 16), np.float32) for _ in range(3)]
    offsets = np.array([0, 20, 30], np.int32)
    given, makers = ["Q", "K", "V"], {"O": lambda: np.full((1, 2, 40, 16), 7, np.float32)}
    makers["LSE"] = lambda: np.full((2, 40) if unwritten else (1, 2, 40), 7, np.float32)
    problem = Problem(1, 2, 40, 40, 16)
    if unwritten:
        problem = Problem(2, 2, 20, 20, 16, ragged=(40, 40))
        given, arrays = [*given, "cu_seqlens_q", "cu_seqlens_k"], [*arrays, offsets, offsets]
    assert bool(plan.may_stay_unwritten(problem)) == unwritten
    library = dlpack.library_of(arrays[0])
    staged = plan._staged_plan(library, kernel, kernel.tiles[0], problem, HOST, given, makers, ["O", "LSE"])
    out, lse = staged(tuple(arrays), [x.ctypes.data for x in arrays])
    parts = [(0, 20), (20, 30)] if unwritten else [(0, 40)]
    for begin, end in parts:
        expected, _ = reference.attention(*(x[:, :, begin:end] for x in arrays[:3]))
        assert abs(out[:, :, begin:end] - expected).max() < 1e-5
    assert (out[:, :, parts[-1][1] :] == 7).all()
    assert (lse[..., : parts[-1][1]] != 7).all()


# ---- what a launch of a plan consists of


@pytest.mark.parametrize(
    ("sizes", "total", "offsets"),
    [
        ([], 0, []),
        ([(1,)], 128, [0]),
        ([(128,), (2, 3)], 256, [0, 512]),
        ([(129,), (0,), (3, 128), (5,)], 768, [0, 1024, 1024, 2560]),
    ],
)
def test_scratch_is_one_array_whose_parts_begin_at_multiples_of_512_bytes(
    sizes: list[tuple[int, ...]], total: int, offsets: list[int]
) -> None:
    assert plan._together([(shape, (1,) * len(shape), "float32") for shape in sizes]) == (total, offsets)


DECODED = Problem(2, 8, 1, 64, 16, Hk=2, dtype="float16", causal="bottom-right", invariant=True)


def test_heads_of_a_group_are_packed_into_queries() -> None:
    expected = dataclasses.replace(DECODED, H=2, Sq=4, causal=False)
    assert plan.with_packed_heads(DECODED) == expected
    lengths = dataclasses.replace(DECODED, key_lengths=True)
    assert plan.with_packed_heads(lengths) == dataclasses.replace(expected, key_lengths=True)
    out = dlpack.ArrayView(4096, (2, 8, 1, 16), (200, 20, 19, 1), "float16", HOST, None)
    packed = plan._packed(out, expected)
    assert (packed.pointer, packed.shape, packed.strides) == (4096, (2, 2, 4, 16), (200, 80, 20, 1))
    lse = dlpack.ArrayView(4096, (2, 8, 1), (8, 1, 1), "float32", HOST, None)
    assert (plan._packed(lse, expected).shape, plan._packed(lse, expected).strides) == ((2, 2, 4), (8, 4, 1))


@pytest.mark.parametrize(
    "other",
    [{"invariant": False}, {"Sq": 2}, {"Hk": 8}, {"causal": "top-left"}, {"alibi": (8,)}, {"ragged": (9, 200)}],
    ids=str,
)
def test_heads_of_other_problems_are_not_packed(other: dict[str, Any]) -> None:
    problem = dataclasses.replace(DECODED, **other)
    assert plan.with_packed_heads(problem) is problem


@pytest.mark.parametrize(("rows", "some"), [((20, 20), False), ((21, 20), True), ((20, 21), True)])
def test_rows_may_stay_unwritten_in_sequences_that_exceed_max_seqlen(rows: tuple[int, int], some: bool) -> None:
    found = plan.may_stay_unwritten(Problem(2, 2, 20, 20, 16, ragged=rows))
    assert found == (("O", "LSE", "dQ", "dK", "dV") if some else ())
    assert plan.may_stay_unwritten(Problem(2, 2, 20, 20, 16)) == ()


@pytest.mark.parametrize(
    ("home", "backend", "device"),
    [
        (HOST, None, HOST), (HOST, "cpu", HOST), (HOST, "cuda", ("cuda", 0)),
        (("cuda", 3), None, ("cuda", 3)), (("cuda", 3), "cuda", ("cuda", 3)), (("cuda", 3), "cpu", HOST),
    ],
)  # fmt: skip
def test_a_launch_is_on_the_device_of_the_arrays_or_on_that_of_the_backend(
    home: dlpack.Device, backend: str | None, device: dlpack.Device
) -> None:
    assert plan.launch_device(home, backend) == device


def test_a_full_cache_of_plans_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its routes."""
    monkeypatch.setattr(dispatch, "MAX_PLANS", 2)
    plans: dispatch.PlanCache = dispatch.PlanCache()
    kept: list[Any] = [dispatch.Rejection(str(n)) for n in range(3)]
    for n in (0, 1):
        plans.routes["forward"][plan.Options(scale=float(n))] = ()
        plans.keep((n,), kept[n])
    assert [*plans.items()] == [((0,), kept[0]), ((1,), kept[1])]
    assert len(plans.routes["forward"]) == 2
    plans.keep((2,), kept[2])
    assert [*plans.items()] == [((2,), kept[2])]
    assert plans.routes == {"forward": {}, "backward": {}}


def test_which_routes_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each plan and kind of arrays, the latest first, at most eight for the same options; none for arrays that
    are not aligned, or without memory."""
    library = SimpleNamespace(same_signature=lambda *arrays: lambda *others: others == arrays, pointer=None)
    monkeypatch.setattr(dispatch, "library_of", lambda array: library)
    plans, some, options = dispatch.PlanCache(), [dispatch.Rejection(str(n)) for n in range(9)], plan.Options()

    def learn(array: Any, which: int, addresses: tuple[int, ...] = (16, 32, 48), kind: str = "forward") -> list[Any]:
        plans.learn(kind, options, (array, 2, 3), addresses, some[which])
        return [some.index(route.plan) for route in plans.routes[kind].get(options, ())]

    for addresses in ((16, 8, 48), (16, 0, 48), (16, 32, 50)):
        assert learn("a", 0, addresses) == []
    assert learn("a", 0) == learn("a", 0) == [0]
    assert learn("a", 1) == [1, 0]
    assert learn("b", 1, (16, 32, 32)) == [1, 1, 0]
    assert [route.latent for route in plans.routes["forward"][options]] == [True, False, False]
    assert learn("a", 2, (16, 32, 32), "backward") == [2]
    assert not plans.routes["backward"][options][0].latent
    for n in range(2, 8):
        found = learn("a", n)
    assert found == [7, 6, 5, 4, 3, 2, 1, 1]
    assert not any(route.requires_grad for route in plans.routes["forward"][options])
    learn(SimpleNamespace(requires_grad=True), 8)
    assert plans.routes["forward"][options][0].requires_grad
    monkeypatch.setattr(dispatch, "MAX_PLANS", 2)
    for n in range(3):
        options = plan.Options(scale=float(n))
        learn("a", n)
    assert [*plans.routes["forward"]] == [plan.Options(scale=1.0), plan.Options(scale=2.0)]
    library.same_signature = lambda *arrays: None
    assert learn("c", 3) == [2]
