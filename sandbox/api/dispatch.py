"""The public door: attention, forward and backward, on anybody's arrays.

The first call with arrays of some shapes, strides, alignment, dtype and device checks everything, picks a kernel,
compiles it and keeps a plan; later calls of the same kind look the plan up and launch. A plan's key holds what the plan
was made from, and nothing else: in particular of the addresses what `layout` makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from ..core import normalise
from ..core.errors import UnsupportedProblem
from ..core.score import BLOCK_MAP, Score
from ..launch.dlpack import Library, library_of
from .options import asked, with_float8
from .plan_cache import ALIGNED, Found, PlanCache

if TYPE_CHECKING:
    from ..core.kernel import Kernel
    from ..core.tile import Tile
    from .plan import Plan

_plans = PlanCache()
_NO_KEY = (TypeError, AttributeError, RuntimeError)  # a tile given as a dict, several libraries, no address, negated


def attention_forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi: Any = None,
    bias: Any = None,
    mask: Any = None,
    sink: Any = None,
    key_lengths: Any = None,
    score: Score | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    descale: tuple[Any, Any, Any] | None = None,
    out_dtype: Any = None,
    kernel: str | Kernel | None = None,
    tile: Tile | str | Mapping[str, int] | None = None,
    backend: str | None = None,
) -> tuple[Any, Any]:
    """Exact attention, FlashAttention-2's way (Dao 2023, arXiv:2307.08691, Algorithm 1). Records no gradients.

    q: (B, H, Sq, D); k: (B, Hk, Sk, D); v: (B, Hk, Sk, Dv), Hk dividing H; float32, float16, bfloat16, or
    float8 (e4m3fn, e5m2; v may be of the other), of which there is no gradient; any strides with a unit stride in D.
    NumPy, CuPy, PyTorch or any other DLPack arrays of one library, on one device.
    causal: False; True, or "bottom-right", query i sees keys j <= i + Sk - Sq; "top-left", j <= i.
    scale: 1/sqrt(D) by default; of an array of one number the value is taken.

    What a score is beyond that, in this order, absent by default; arrays of q's library and device, any strides:
    softcap: x becomes softcap * tanh(x / softcap). alibi: slopes, (H,) or (B, H) float32: less slope * |i + shift - j|,
    where shift is Sk - Sq, or 0 with "top-left". bias: broadcastable to (B, H, Sq, Sk), q's dtype or float32: added.
    score: a `sandbox.Score`, the user's own expressions. window: (left, right), so many keys to either side of
    i + shift, both ends included, None for no bound. mask: bool, broadcastable to (B, H, Sq, Sk): False hides. sink:
    (H,) float32: exp(sink[h]) is added to a row's sum. key_lengths: (B,) int32: so many of the Sk keys count;
    less than 0 means none, more than Sk all.
    dropout: the probability with which each element of softmax's result is dropped, the others divided by
    1 - dropout, honoured to 2^-16. seed: which ones, as `sandbox.reference.dropout_keep` says: an int, or an int64
    array of one element, read when the kernel runs; None draws one from the library's own generator.

    descale: of float8, what q, k and v are to be multiplied by: three numbers, or float32 arrays that broadcast to
    (B, heads); positive, in arrays also 0. P is rounded to v's dtype, its row's largest to the largest number there
    is. out_dtype: of float8, bfloat16 (by default), float16 or float32.

    kernel: a name, by default the highest rung that takes the problem. tile: a Tile, {"BLOCK_M": 64, ...} or
    "BLOCK_M=64,...". backend: "cuda" or "cpu", by default where the arrays are.

    Returns out, (B, H, Sq, Dv), of q's dtype (of float8 `out_dtype`), library and device; and lse, (B, H, Sq) float32,
    the natural log-sum-exp of the scores, the sink's among them. A row that sees no key has out 0 and lse -inf, or the
    sink. On a GPU the work is queued on the caller's current stream; arrays that lie on the other side than `backend`
    are copied there and back.

    Raises UnsupportedProblem naming the value that does not fit; SpecError, UnknownKernel, CompileError,
    ToolchainMissing, GpuUnavailable, DriverError, LaunchError.
    """
    what, arrays = asked(q, window, softcap, alibi, bias, mask, sink, key_lengths, score, dropout, seed)
    if descale is not None or out_dtype is not None:
        what, arrays = with_float8(what, arrays, descale, out_dtype)
    arrays, options = (q, k, v, *arrays), (causal, scale, kernel, tile, backend, False, what)
    library = library_of(q)
    if found := known(library, "forward", options, arrays):
        out, lse = found[0](arrays, found[1])
        return out, lse
    if library.intercepts(*arrays):
        from . import torch_autograd, torch_float8

        if what.descale:
            return torch_float8.attention(arrays, options)
        return torch_autograd.forward(arrays, what, causal, scale, kernel, tile, backend)
    return run_forward(arrays, options)


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi: Any = None,
    bias: Any = None,
    mask: Any = None,
    sink: Any = None,
    key_lengths: Any = None,
    score: Score | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    kernel: str | Kernel | None = None,
    tile: Tile | str | Mapping[str, int] | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> tuple[Any, Any, Any]:
    """The gradients of sum(dout * out), FlashAttention-2's way (Dao 2023, arXiv:2307.08691, Algorithm 2).

    q, k, v and the options as in `attention_forward`; out (B, H, Sq, Dv) and lse (B, H, Sq) as it returned them; dout
    (B, H, Sq, Dv), of q's dtype. Where D has not unit stride (an expanded dout), or lse is not contiguous, a copy is
    made, which the log ("sandbox") says. deterministic: only kernels whose results are the same bits at each call.

    Returns dq, dk, dv, of the shapes, dtype, library and device of q, k, v; dk and dv sum over the query heads that
    share a key/value head. A row that sees no key, and a key that no row sees, have gradient 0. Those of bias, sink and
    lse are autograd's alone, of `attention`. Memory beyond inputs and results: delta, (B, H, Sq) float32, and for a
    kernel that sums dq by atomics one float32 (B, H, Sq, D).

    Raises what `attention_forward` does.
    """
    if dropout and seed is None:
        raise UnsupportedProblem(
            f"attention_backward: dropout={dropout} needs the seed that the forward was given: seed="
        )
    what, more = asked(q, window, softcap, alibi, bias, mask, sink, key_lengths, score, dropout, seed)
    arrays, options = (dout, q, k, v, out, lse, *more), (causal, scale, kernel, tile, backend, deterministic, what)
    if library_of(dout).intercepts(*arrays):
        from . import torch_op

        return torch_op.backward(arrays, options)
    dq, dk, dv = run_backward(arrays, options)
    return dq, dk, dv


def run_forward(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, Any]:
    """`attention_forward` of arrays that have memory of their own, whoever watches: q, k, v, and those that the options
    name, which stand in the order of `plan.Options`."""
    plan, arrays, addresses = plan_forward(arrays, options)
    out, lse = plan(arrays, addresses)
    return out, lse


def plan_forward(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Plan, tuple[Any, ...], Sequence[int]]:
    """The plan of `run_forward`, and what to call it with."""
    if found := known(library_of(arrays[0]), "forward", options, arrays):
        return found[0], arrays, found[1]
    return _planned("forward", 3, arrays, options)


def run_backward(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """`attention_backward`, as `run_forward`, of dout, q, k, v, out, lse and so on; dq, dk, dv, and what else is asked
    for as a result."""
    if found := known(library_of(arrays[0]), "backward", options, arrays):
        return found[0](arrays, found[1])
    plan, arrays, addresses = _planned("backward", 5, arrays, options)  # lse and so on is read number by number
    return plan(arrays, addresses)


def known(library: Library, which: str, options: tuple[Any, ...], arrays: tuple[Any, ...]) -> Found | None:
    """The plan that a route leads to; `library`: that of `arrays`. Where it is found nobody watches the arrays or the
    thread."""
    scale = options[1]
    if not library.no_dispatch_modes() or (scale is not None and type(scale) is not float):
        return None
    try:
        routes = _plans.routes[which].get(options, ())
    except TypeError:  # a tile given as a dict
        return None
    for same_signature, pointer, plan, followed in routes:
        if same_signature(*arrays):
            addresses = []
            for array in arrays:
                address = pointer(array)
                if address % ALIGNED or not address:
                    return None
                addresses.append(address)
            return plan, addresses, followed
    return None


def _planned(
    which: str, copied: int, arrays: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[Plan, tuple[Any, ...], Sequence[int]]:
    """The plan for arrays of this kind, found by its key or made, and what to call it with. Kernels copy the first so
    many arrays by rows: their alignment counts, and that of a bias and of a block map."""
    scale = options[1]
    if scale is not None and type(scale) is not float:
        options = (options[0], number(scale), *options[2:])
    library, cache = library_of(arrays[0]), _plans
    arrays = library.materialise(*arrays)
    try:
        addresses: Sequence[int] = [*map(library.pointer, arrays)]
        bits = reduce(or_, addresses[:copied], 16)
        names = options[-1].names
        # Copied whole, by a tensor map and 16 bytes at a time. Apart from q, k and v: some kernels copy those by less.
        bias = "bias" in names and addresses[names.index("bias") - len(names)] % ALIGNED > 0
        blocks = BLOCK_MAP in names and addresses[names.index(BLOCK_MAP) - len(names)] % ALIGNED > 0
        key = (which, *library.signatures(arrays), bits & -bits, bias, blocks, 0 in addresses, *options)
        plan = cache.get(key)
    except _NO_KEY:
        key, plan = None, None
    if plan is None:
        plan, addresses = _make_plan(f"{which}_plan", key, arrays, options)
    elif not isinstance(plan, Rejection):
        cache.learn(which, options, arrays, addresses, plan)
    return plan, arrays, addresses


def number(scale: Any) -> float:
    """`scale` as a float, so that a plan belongs to the value and not to the array that holds it just now."""
    return normalise.number("scale", scale)


def _make_plan(
    maker: str, key: tuple | None, arrays: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[Plan, Sequence[int]]:
    """A plan for arrays of this kind, kept under `key` if there is one, and their addresses. What is not supported is
    not tried again."""
    from . import plan as planning  # all that compiles and launches is imported here

    kept = _plans  # those of now: a reload meanwhile forgets this one too
    try:
        plan = getattr(planning, maker)(arrays, planning.Options(*options))
    except UnsupportedProblem as refusal:
        plan = Rejection(str(refusal))
    if key is not None:
        kept.keep(key, plan)
    # What is refused may be arrays of several libraries, or have no address.
    return plan, () if isinstance(plan, Rejection) else tuple(map(library_of(arrays[0]).pointer, arrays))


class Rejection:
    """The plan for arrays that nothing takes. Keeps none of them alive, as an exception would."""

    def __init__(self, reason: str):
        self.reason = reason

    def __call__(self, arrays: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]:
        raise UnsupportedProblem(self.reason)


def reload() -> None:
    """Forget plans, loaded kernels and specs, so that edited files count from the next call on."""
    from ..core import registry
    from ..engine import pipeline

    global _plans  # noqa: PLW0603  # a plan in the making goes to the old ones
    registry.forget()
    pipeline.forget()
    _plans = PlanCache()  # last: what is planned from here on is planned from what is read anew
