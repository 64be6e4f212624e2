"""A plan: everything that is decided once for arrays of one kind: problem, kernel, tile, layout of the results, launch.

Arrays are of one kind if they have the same key (`dispatch`): shapes, strides, alignment, dtypes, library and device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from operator import call
from typing import Any, Protocol

from ..core import log, registry
from ..core.errors import UnsupportedProblem
from ..core.kernel import Arch, Kernel
from ..core.options import ARRAYS, BY_NAME, SAME_FOR_GROUP
from ..core.problem import Problem
from ..core.score import BLOCK_MAP
from ..core.tile import Tile
from ..engine import choose, pipeline
from ..engine.staging import Staged
from ..launch.dlpack import HOST, ArrayView, Device, Library, UnsupportedDtype, dense_strides, library_of
from .options import BLOCK_TABLE, DESCALE, Options
from .validate import DTYPES, argument_name, check_contents, problem_of, unreadable

_FORWARD = ("q", "k", "v")
_BACKWARD = ("dout", *_FORWARD, "out", "lse")
_TENSORS = {  # {name in plans: name in the specs}; others have the same name in both
    "dout": "dO", "q": "Q", "k": "K", "v": "V", "out": "O", "lse": "LSE", "dlse": "dLSE",
    **{name: BY_NAME[name].argument for name in ARRAYS},
}  # fmt: skip


# {array: the dtypes that it may have, as text}, for arrays that do not accept every dtype that q may have
_DTYPES = DTYPES | dict.fromkeys((*DESCALE, "lse", "dlse"), "float32") | {
    "bias": "float32, or the dtype of out", BLOCK_TABLE: "int32",
    BLOCK_MAP: "the int32 array that sandbox.block_map returns",
}  # fmt: skip


class Plan(Protocol):
    """Computes the results for arrays of the kind for which it was made; `addresses` are those of the arrays."""

    def __call__(self, arrays: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]: ...


def forward_plan(arrays: tuple[Any, ...], options: Options, run: Callable[..., tuple[Any, ...]]) -> Plan:
    """The plan of q, k, v and the arrays that the options name: validate them, select kernel and tile, compile, and fix
    everything that does not change between calls. If no kernel can read the layout of an array, each call copies
    it and passes the copy to `run`.

    Raises what `attention_forward` raises. The plan keeps none of the arrays alive.
    """
    names = (*_FORWARD, *options.array_names)
    library, views = _views(names, arrays)
    problem = problem_of(views, options)
    if copied := unreadable(views, problem):
        return _copying_plan(run, library, views, [names.index(name) for name in copied], options)
    out = (problem.batches, problem.H, problem.rows[0], problem.Dv)
    results = {"O": (out, dense_strides(out, views["q"].strides), problem.dtype_of("O")), "LSE": _lse_layout(problem)}
    return _checking_plan(_plan("forward", problem, library, views, arrays[0], results, options), problem, views)


def backward_plan(arrays: tuple[Any, ...], options: Options, run: Callable[..., tuple[Any, ...]]) -> Plan:
    """The plan of dout, q, k, v, out, lse and so on, as `forward_plan`. The log reports once which arrays are copied at
    each call."""
    names = (*_BACKWARD, *options.array_names)
    library, views = _views(names, arrays)
    problem = problem_of(views, options)
    if copied := unreadable(views, problem):
        return _copying_plan(run, library, views, [names.index(name) for name in copied], options)
    results = {name: _layout_of(views[of]) for name, of in (("dQ", "q"), ("dK", "k"), ("dV", "v"))}
    if "dbias" in options.gradients:
        bias = views["bias"]
        results["dbias"] = bias.shape, dense_strides(bias.shape), bias.dtype
    if "dsink" in options.gradients:
        results["dsink"] = (problem.H,), (1,), "float32"
    return _checking_plan(_plan("backward", problem, library, views, arrays[1], results, options), problem, views)


def _checking_plan(plan: Plan, problem: Problem, views: Mapping[str, ArrayView]) -> Plan:
    """A plan that first checks the contents of host arrays with offsets, lengths or page numbers, and then calls
    `plan`; `plan` itself if there is nothing to check."""
    names = [*views]
    if views["q"].device != HOST or not (problem.ragged or problem.page_size):
        return plan

    def check_first(arrays: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]:
        check_contents(problem, dict(zip(names, arrays, strict=True)))
        return plan(arrays, addresses)

    return check_first


def _copying_plan(
    run: Callable[..., tuple[Any, ...]], library: Library, views: Mapping[str, ArrayView], copied: list[int],
    options: Options,
) -> Plan:  # fmt: skip
    for name, view in (list(views.items())[i] for i in copied):
        log.logger.log(log.CHOICES, "%s has strides %s: it is copied to a contiguous array", name, view.strides)

    def copy_first(arrays: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]:
        readable = tuple(library.contiguous(array) if i in copied else array for i, array in enumerate(arrays))
        return run(readable, options)  # with a plan for the copies, whose alignment is part of its key

    return copy_first


def _views(names: tuple[str, ...], arrays: tuple[Any, ...]) -> tuple[Library, dict[str, ArrayView]]:
    """The library of the arrays, which must be the same for all, and their views."""
    shown = [argument_name(name, names) for name in names]
    library = one_library(shown, arrays)
    return library, {
        name: _view(library, name, said, array) for name, said, array in zip(names, shown, arrays, strict=True)
    }


def one_library(names: Sequence[str], arrays: Sequence[Any]) -> Library:
    """The library of the arrays. Raises UnsupportedProblem if there are several, or if one is not an array."""
    library = library_of(arrays[0], names[0])
    for name, array in zip(names, arrays, strict=True):
        if (other := library_of(array, name)) is not library:
            raise UnsupportedProblem(
                f"{names[0]} is a {library.name} array and {name} a {other.name} array: pass arrays of one library"
            )
    return library


def _view(library: Library, name: str, shown: str, array: Any) -> ArrayView:
    try:
        return library.view(array)
    except UnsupportedProblem as error:
        raise UnsupportedProblem(naming(error, shown, _DTYPES.get(name, ""))) from None


def naming(error: UnsupportedProblem, name: str, dtypes: str) -> str:
    """The message of an error of `Library.view`, with the array's name. dtypes: those that the array may have, if they
    are not the dtypes of q, k and v, which the message of UnsupportedDtype lists."""
    if dtypes and isinstance(error, UnsupportedDtype):
        return f"{name} must be {dtypes}: {error.reason}"
    return f"{name}: {error}"


_Layout = tuple[tuple[int, ...], tuple[int, ...], str]  # shape, strides, dtype of an array to allocate


def _lse_layout(problem: Problem) -> _Layout:
    """The layout of LSE: one number per query row."""
    shape = (problem.batches, problem.H, problem.rows[0])
    return shape, dense_strides(shape), "float32"


def _layout_of(view: ArrayView) -> _Layout:
    return view.shape, dense_strides(view.shape, view.strides), view.dtype


def _plan(
    computes: str, problem: Problem, library: Library, views: Mapping[str, ArrayView], like: Any,
    results: Mapping[str, _Layout], options: Options,
) -> Plan:  # fmt: skip
    home = views["q"].device  # where the arrays are
    device = launch_device(home, options.backend)  # where the kernel runs
    unpacked = problem
    # If heads are packed, q's head stride becomes its row stride, which a tensor map needs to be positive.
    if computes == "forward" and device == home and views["q"].strides[1] > 0:
        problem = with_packed_heads(problem)
    packed = problem is not unpacked
    kernel = _kernel(computes, problem, pipeline.arch_of(device), options)
    tile = pipeline.tile_on(device, kernel, problem, pipeline.as_tile(options.tile), tuned=True)
    to_caller = library.to_caller(like)
    sizes = pipeline.scratch_of(kernel, problem, tile, device)
    scratch = {name: (shape, dense_strides(shape), "float32") for name, shape in sizes.items()}
    if BLOCK_MAP in views:
        del scratch["block_map"]
    made = {**results, **scratch}  # results first
    makers = {name: library.allocator(like, *layout) for name, layout in made.items()}
    if device != HOST:  # for sequences longer than max_seqlen; the CPU backend raises an error instead
        makers |= {name: _nan_filled(library, makers[name]) for name in may_stay_unwritten(problem) if name in results}
    given = [_TENSORS.get(name, name) for name in views]
    if device != home:
        staged = _staged_plan(library, kernel, tile, problem, device, given, makers, list(results))
        return _converting_plan(staged, to_caller) if to_caller else staged
    tensors = dict(zip(given, views.values(), strict=True))
    tensors |= {name: library.view(makers[name]()) for name in results}
    if packed:
        tensors |= {name: _packed(tensors[name], problem) for name in ("Q", *results)}
    prepared = pipeline.prepare(kernel, tile, problem, tensors, device, [*given, *makers])
    if missing := results.keys() - {*prepared.tensor_names}:
        raise UnsupportedProblem(
            f"{kernel.name} does not compute {', '.join(sorted(missing))}: omit kernel, or choose another"
        )
    launch, stream = prepared.launch, library.stream(device[1]) if device != HOST else int  # int() is 0
    allocators = [makers[name] for name in results]
    pointer, size, offsets = library.pointer, *_together([scratch[name] for name in makers if name not in results])
    new_scratch = library.allocator(like, (size,), (1,), "float32")

    def plan(arrays: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]:
        made = tuple(map(call, allocators))
        addresses = *addresses, *map(pointer, made)
        if offsets:
            memory = new_scratch()  # its memory is freed in stream order
            start = pointer(memory)
            addresses = *addresses, *[start + offset for offset in offsets]
        launch(addresses, stream())
        return made

    return _converting_plan(plan, to_caller) if to_caller else plan


def with_packed_heads(p: Problem) -> Problem:
    """The problem of a forward's launch. The query heads of a group become queries of one head (packed GQA), so that
    each key is read once for all of them, if all of the following hold: `invariant` is set; the batch is not ragged and
    has one query per entry; a group has several query heads; `causal` is not "top-left"; all options are in
    SAME_FOR_GROUP. Otherwise the problem is `p`. (Without `invariant`, kernels for decoding are chosen, which pack the
    heads themselves.)"""
    alike = p.options <= SAME_FOR_GROUP and p.causal != "top-left"
    if not (p.invariant and p.Sq == 1 and p.group > 1 and alike) or p.ragged:
        return p
    return dataclasses.replace(p, H=p.Hk, Sq=p.group, causal=False)


def _packed(view: ArrayView, p: Problem) -> ArrayView:
    """Q, O or LSE, of (B, Hk * group, 1) rows, as (B, Hk, group) rows; `p`: the problem after packing."""
    b, h, _, *column = view.strides
    shape = (view.shape[0], p.H, p.Sq, *view.shape[3:])
    return ArrayView(view.pointer, shape, (b, p.Sq * h, h, *column), view.dtype, view.device, view.owner)


def _together(scratch: Sequence[_Layout]) -> tuple[int, list[int]]:
    """The size of one array for all scratch, in elements, and the offset of each scratch in bytes, a multiple of
    512."""
    offsets, size = [], 0
    for shape, _, _ in scratch:
        offsets.append(4 * size)
        size += -(-math.prod(shape) // 128) * 128
    return size, offsets


def may_stay_unwritten(problem: Problem) -> tuple[str, ...]:
    """The results with rows that a GPU does not write if a sequence of a ragged batch is longer than max_seqlen."""
    if not problem.ragged or problem.rows == (problem.Sq, problem.Sk):
        return ()
    return "O", "LSE", "dQ", "dK", "dV"


def _nan_filled(library: Library, make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        array = make()
        library.fill(array, math.nan)
        return array

    return made


def _converting_plan(plan: Plan, to_caller: Callable[[Any], Any]) -> Plan:
    """`plan`, with its results converted to the caller's type of array after the launch."""
    return lambda arrays, addresses: tuple(map(to_caller, plan(arrays, addresses)))


def named(kernel: str | Kernel | None, computes: str) -> Kernel | None:
    """The kernel that a caller names, if any. Raises UnknownKernel; UnsupportedProblem for another computation."""
    if kernel is not None and not isinstance(kernel, Kernel):
        kernel = registry.get(kernel, computes)
    if kernel is not None and kernel.computes != computes:
        others = [other.name for other in registry.kernels().values() if other.computes == computes]
        raise UnsupportedProblem(
            f"kernel={kernel.name!r} is not supported for the {computes}: it computes the {kernel.operation.name} "
            f"(omit kernel=, or choose one of {', '.join(others)})"
        )
    return kernel


def _kernel(computes: str, problem: Problem, arch: Arch | None, options: Options) -> Kernel:
    kernel = named(options.kernel, computes)
    if kernel is None:
        return choose.choose_kernel(problem, computes, arch, options.deterministic)
    if options.deterministic and not kernel.deterministic:
        other = choose.choose_kernel(problem, computes, arch, deterministic=True)
        raise UnsupportedProblem(
            f"{kernel.name} is not deterministic: it accumulates with atomics, in any order: choose {other.name}"
        )
    return kernel


def launch_device(home: Device, backend: str | None) -> Device:
    """The device of a launch for arrays on `home`. Raises UnsupportedProblem for an unknown backend."""
    if backend not in (None, "cpu", "cuda"):
        raise UnsupportedProblem(f'backend={backend!r} is not known: choose "cuda" or "cpu"')
    if backend is None or backend == home[0]:
        return home
    return HOST if backend == "cpu" else ("cuda", 0)


def _staged_plan(
    library: Library, kernel: Kernel, tile: Tile, problem: Problem, device: Device, given: list[str],
    makers: Mapping[str, Callable[[], Any]], results: list[str],
) -> Plan:  # fmt: skip
    """A plan for arrays on another device: they are copied to `device`, and the results back."""

    def plan(arrays: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]:
        every = dict(zip(given, arrays, strict=True)) | {name: make() for name, make in makers.items()}
        staged = {name: Staged(library.view(array), device) for name, array in every.items()}
        for name in (*given, *(name for name in may_stay_unwritten(problem) if name in results)):
            staged[name].send()
        prepared = pipeline.prepare(kernel, tile, problem, staged, device)
        prepared.launch(prepared.pointers(staged))
        prepared.wait()
        for name in results:
            staged[name].fetch()
        return tuple(every[name] for name in results)

    return plan
