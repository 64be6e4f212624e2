"""From arrays and options to a plan, and the cache of plans.

The first call with arrays of some shapes, strides, alignment, dtype and device validates everything, selects a kernel,
compiles it and stores a plan. Later calls of the same kind find the plan and launch. The key of a plan contains what
the plan was made from and nothing else; of the addresses, only their alignment, whether one is 0, and in a forward
whether those of k and v are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core import normalise
from ..core.errors import UnsupportedProblem
from ..core.score import BLOCK_MAP
from ..launch.dlpack import Library, library_of
from .options import Options, constants, replace, tile_in_key

if TYPE_CHECKING:
    from .plan import Plan

MAX_PLANS, _MAX_ROUTES = 4096, 8
ALIGNED = 16  # bytes: what allocators provide; routes require it, and so do most inputs of `sandbox.call`
# Raised if a call has no key: arrays are of several libraries, without memory, or lazily negated.
NO_KEY = (TypeError, AttributeError, RuntimeError)


class Route(NamedTuple):
    """A shortcut to a plan, without a key: the array library compares the arrays of a call with those of an earlier
    one."""

    same_signature: Callable[..., bool]  # whether arrays and dispatch modes are as when this route was stored
    pointer: Callable[[Any], int]
    plan: Plan
    requires_grad: bool  # of an array: the plan then runs in an autograd.Function, if gradients are recorded
    latent: bool  # whether k and v have one address: the plan may read v from k


Found = tuple["Plan", Sequence[int], bool]  # the result of a route: its plan, the addresses, its `requires_grad`


class PlanCache(dict[tuple, "Plan"]):
    """Plans by their keys, and a few routes for each `Options`, the latest first.

    A key takes about a third of a call's host time to make (notes of experiment 001 at 323513b, "Routes"). A route is
    made when a key is found again, so that calls with new shapes every time do not pay for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.routes: dict[str, dict[Options, tuple[Route, ...]]] = {"forward": {}, "backward": {}}

    def keep(self, key: tuple, plan: Plan) -> None:
        """Stores `plan` under `key`; clears the cache first if it is full."""
        if len(self) >= MAX_PLANS:
            self.clear()
            for routes in self.routes.values():
                routes.clear()
        self[key] = plan

    def learn(
        self, which: str, options: Options, arrays: tuple[Any, ...], addresses: Sequence[int], plan: Plan
    ) -> None:
        """Stores a route to `plan`, if the library can compare arrays and the addresses are aligned. The route may be
        there already: some calls do not look for one (see `known`)."""
        if 0 in addresses or any(address % ALIGNED for address in addresses):
            return
        present = self.routes[which].get(options, ())
        if any(route.plan is plan and route.same_signature(*arrays) for route in present):
            return
        library: Library = library_of(arrays[0])
        if same_signature := library.same_signature(*arrays):
            requires_grad = any(getattr(array, "requires_grad", False) for array in arrays)
            if requires_grad and which == "forward" and any(x.requires_grad for _, x in constants(options, arrays)):
                return  # with a route, `attention` would not reject such a call while gradients are recorded
            routes = self.routes[which]
            if len(routes) >= MAX_PLANS:
                routes.clear()
            latent = _latent(which, addresses)
            added = Route(same_signature, library.pointer, plan, requires_grad, latent)
            routes[options] = (added, *present[: _MAX_ROUTES - 1])


_plans = PlanCache()


def known(library: Library, which: str, options: Options, arrays: tuple[Any, ...]) -> Found | None:
    """The plan of the first route that matches `arrays` of `library`; None if there is none. If there is one, neither a
    tensor subclass nor a dispatch mode has to intercept the call."""
    scale = options.scale
    if not library.no_dispatch_modes() or (scale is not None and type(scale) is not float):
        return None
    try:
        routes = _plans.routes[which].get(options, ())
    except TypeError:  # a tile given as a dict
        return None
    for same_signature, pointer, plan, requires_grad, latent in routes:
        if same_signature(*arrays):
            addresses = [*map(pointer, arrays)]
            if reduce(or_, addresses) % ALIGNED or 0 in addresses:
                return None
            if latent and not _latent(which, addresses):
                continue
            return plan, addresses, requires_grad
    return None


def _latent(which: str, addresses: Sequence[int]) -> bool:
    """Whether k and v of a forward, arrays 1 and 2, have one address: v may be a view of k's first columns."""
    return which == "forward" and addresses[1] == addresses[2]


def run_forward(arrays: tuple[Any, ...], options: Options) -> tuple[Any, Any]:
    """(out, lse) of q, k, v and the arrays that `options.array_names` names. The arrays must have memory (no fake
    tensors); dispatch modes and tensor subclasses do not see the call."""
    if found := known(library_of(arrays[0]), "forward", options, arrays):
        plan, addresses, _ = found
    else:
        plan, arrays, addresses = _planned("forward", 3, arrays, options)
    out, lse = plan(arrays, addresses)
    return out, lse


def plan_forward(arrays: tuple[Any, ...], options: Options) -> tuple[Plan, tuple[Any, ...], Sequence[int]]:
    """The plan of `run_forward`, and its arguments."""
    return _planned("forward", 3, arrays, options)


def run_backward(arrays: tuple[Any, ...], options: Options) -> tuple[Any, ...]:
    """dq, dk, dv and `options.gradients` of dout, q, k, v, out, lse and the arrays that `options.array_names` names.
    See `run_forward`."""
    if found := known(library_of(arrays[0]), "backward", options, arrays):
        return found[0](arrays, found[1])
    # 5: kernels copy dout, q, k, v and out in vectors, and read lse by element.
    plan, arrays, addresses = _planned("backward", 5, arrays, options)
    return plan(arrays, addresses)


def _planned(
    which: str, copied: int, arrays: tuple[Any, ...], options: Options
) -> tuple[Plan, tuple[Any, ...], Sequence[int]]:
    """The plan for arrays of this kind, found by its key or made, and its arguments. Kernels copy rows of the first
    `copied` arrays in vectors: their alignment is part of the key, as is that of a bias and of a block map."""
    if options.scale is not None and type(options.scale) is not float:
        options = replace(options, scale=scale_number(options.scale))
    if (tile := tile_in_key(options.tile)) is not options.tile:
        options = replace(options, tile=tile)
    library, cache = library_of(arrays[0]), _plans
    arrays = library.materialise(*arrays)
    try:
        addresses: Sequence[int] = [*map(library.pointer, arrays)]
        bits = reduce(or_, addresses[:copied], 16)
        names = options.array_names
        # The key contains the alignment of the first `copied` arrays, at most 16: some kernels copy them in smaller
        # vectors. For a bias (copied with a tensor map) and a block map (copied 16 bytes at a time), it contains
        # whether they are aligned.
        bias = "bias" in names and addresses[names.index("bias") - len(names)] % ALIGNED > 0
        blocks = BLOCK_MAP in names and addresses[names.index(BLOCK_MAP) - len(names)] % ALIGNED > 0
        aligned = bits & -bits, bias, blocks
        key = (which, *library.signatures(arrays), *aligned, 0 in addresses, _latent(which, addresses), options)
        plan = cache.get(key)
    except NO_KEY:
        key, plan = None, None
    if plan is None:
        plan, addresses = _make_plan(which, key, arrays, options)
    elif not isinstance(plan, Rejection):
        cache.learn(which, options, arrays, addresses, plan)
    return plan, arrays, addresses


def scale_number(scale: Any) -> float:
    """`scale` as a float, so that a plan depends on the value and not on the array that contains it."""
    return normalise.number("scale", scale)


def _make_plan(which: str, key: tuple | None, arrays: tuple[Any, ...], options: Options) -> tuple[Plan, Sequence[int]]:
    """A plan for arrays of this kind, stored under `key` if there is one, and their addresses. For an unsupported
    problem, a Rejection is stored."""
    from . import plan as planning  # imports the modules that compile and launch

    plans = _plans  # the current ones: a reload in the meantime discards this plan, too
    try:
        if which == "forward":
            plan = planning.forward_plan(arrays, options, run_forward)
        else:
            plan = planning.backward_plan(arrays, options, run_backward)
    except UnsupportedProblem as error:
        plan = Rejection(str(error))
    if key is not None:
        plans.keep(key, plan)
    # Unsupported arrays may be of several libraries, or have no address.
    return plan, () if isinstance(plan, Rejection) else tuple(map(library_of(arrays[0]).pointer, arrays))


class Rejection:
    """The plan for arrays that no kernel supports. Unlike a stored exception, it does not keep the arrays alive."""

    def __init__(self, reason: str):
        self.reason = reason

    def __call__(self, arrays: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]:
        raise UnsupportedProblem(self.reason)


def reload() -> None:
    """Discard plans, loaded kernels and specs: later calls use the files as they are now."""
    from ..core import registry
    from ..engine import pipeline

    global _plans  # noqa: PLW0603  # a plan that another thread is making goes to the old cache
    registry.forget()
    pipeline.forget()
    _plans = PlanCache()  # last: plans made from here on use the files as they are now
