"""Plans that are kept, and how a later call finds the one it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..launch.dlpack import Library, library_of

if TYPE_CHECKING:
    from .plan import Plan

_MOST_PLANS, _MOST_ROUTES = 4096, 8
ALIGNED = 16  # bytes: what a route asks of every address, as allocators give them


class Route(NamedTuple):
    """A way to a plan without a key: by what the array library itself says of the arrays of a call."""

    same_signature: Callable[
        ..., bool
    ]  # whether it takes arrays, and those who watch them, as those the route was made for
    pointer: Callable[[Any], int]
    plan: Plan
    followed: Followed | None  # computes for autograd; None where no array asks for a gradient


Found = tuple["Plan", Sequence[int], "Followed | None"]  # where a route led: its plan, the addresses, its `followed`
Followed = Callable[[tuple[Any, ...], tuple[Any, ...], Found, bool], tuple[Any, ...]]  # see torch_autograd.followed


class PlanCache(dict[tuple, "Plan"]):
    """Plans by all that they were made from, and a few routes for each kind of options, the latest first.

    A key takes a third of a call's host time to make (experiment 001). A route is made when a key is met again, so that
    arrays of ever other shapes do not pay for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.routes: dict[str, dict[tuple, tuple[Route, ...]]] = {"forward": {}, "backward": {}}  # by options

    def keep(self, key: tuple, plan: Plan) -> None:
        """`plan` under `key`, in place of all if they are too many."""
        if len(self) >= _MOST_PLANS:
            self.clear()
            for routes in self.routes.values():
                routes.clear()
        self[key] = plan

    def learn(self, which: str, options: tuple, arrays: tuple[Any, ...], addresses: Sequence[int], plan: Plan) -> None:
        """A route to `plan`, where the library can be asked and addresses are as most are."""
        if 0 in addresses or any(address % ALIGNED for address in addresses):
            return
        library: Library = library_of(arrays[0])
        if same_signature := library.same_signature(*arrays):
            followed: Followed | None = None
            if any(getattr(array, "requires_grad", False) for array in arrays):
                from . import torch_autograd

                constants = torch_autograd.constants(options[-1], arrays) if which == "forward" else ()
                if any(array.requires_grad for _, array in constants):
                    return  # `attention` has to refuse it where gradients are recorded
                followed = torch_autograd.followed
            routes = self.routes[which]
            if len(routes) >= _MOST_PLANS:
                routes.clear()
            others = routes.get(options, ())[: _MOST_ROUTES - 1]
            routes[options] = (Route(same_signature, library.pointer, plan, followed), *others)
