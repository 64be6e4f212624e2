"""What `attention` decides once for arrays of one kind: problem, kernel, tile, where the results lie, how to launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..core import log, registry
from ..core.errors import UnsupportedProblem
from ..core.kernel import Arch, Kernel
from ..core.problem import Problem, normalise_causal
from ..core.tile import Tile
from ..engine import choose, pipeline
from ..engine.staging import Staged
from ..launch import driver
from ..launch.arguments import scratch_of
from ..launch.dlpack import HOST, ArrayView, Device, Library, dense_strides, layout, library_of
from .passes import run_backward

_TENSORS = {"dout": "dO", "q": "Q", "k": "K", "v": "V", "out": "O", "lse": "LSE"}  # a caller's word: a spec's


class Plan(Protocol):
    """Computes the results for arrays of the kind it was made for; `addresses` are the arrays'."""

    def __call__(self, arrays: tuple[Any, ...], addresses: tuple[int, ...]) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class Options:
    """What a caller asks for beside the arrays; see `attention_forward` and `attention_backward`."""

    causal: Any = False
    scale: float | None = None
    kernel: Any = None
    tile: Any = None
    backend: str | None = None
    deterministic: bool = False


def forward_plan(arrays: tuple[Any, ...], options: Options) -> Plan:
    """Of q, k, v: check them, pick kernel and tile, compile, and fix everything that does not change between calls.

    Raises what `attention_forward` says. The plan keeps none of the arrays alive.
    """
    library, views = _views(("q", "k", "v"), arrays)
    problem = problem_of(views, options.causal, options.scale)
    rows = (problem.B, problem.H, problem.Sq)
    results = {"O": _lying_as(views["q"]), "LSE": (rows, dense_strides(rows), "float32")}
    return _plan("forward", problem, library, views, arrays[0], results, options)


def backward_plan(arrays: tuple[Any, ...], options: Options) -> Plan:
    """Of dout, q, k, v, out, lse, as `forward_plan`. Those that no kernel can read as they lie are copied at each call,
    which the log says once."""
    library, views = _views(tuple(_TENSORS), arrays)
    problem = problem_of({name: views[name] for name in ("q", "k", "v")}, options.causal, options.scale)
    copied = _check_results(views, problem)
    if copied:
        for name in copied:
            strides = views[name].strides
            log.logger.log(log.CHOICES, "%s has strides %s: it is copied to a contiguous array", name, strides)
        return _copying_plan(library, [list(_TENSORS).index(name) for name in copied], options)
    results = {name: _lying_as(views[of]) for name, of in (("dQ", "q"), ("dK", "k"), ("dV", "v"))}
    problem = dataclasses.replace(problem, **layout(views.values()))
    return _plan("backward", problem, library, views, arrays[1], results, options)


def _copying_plan(library: Library, copied: list[int], options: Options) -> Plan:
    def copy_first(arrays: tuple[Any, ...], addresses: tuple[int, ...]) -> tuple[Any, ...]:
        readable = tuple(library.contiguous(array) if i in copied else array for i, array in enumerate(arrays))
        return run_backward(readable, tuple(vars(options).values()))  # whose plan depends on where the copies lie

    return copy_first


def _views(names: tuple[str, ...], arrays: tuple[Any, ...]) -> tuple[Library, dict[str, ArrayView]]:
    """The arrays' library, which must be one, and what it says of each."""
    library = library_of(arrays[0])
    for name, array in zip(names, arrays, strict=True):
        if library_of(array) is not library:
            other = library_of(array).name
            raise UnsupportedProblem(
                f"{names[0]} is a {library.name} array and {name} a {other} array: pass arrays of one library"
            )
    return library, {name: library.view(array) for name, array in zip(names, arrays, strict=True)}


_Lying = tuple[tuple[int, ...], tuple[int, ...], str]  # shape, strides, dtype of an array to make


def _lying_as(view: ArrayView) -> _Lying:
    return view.shape, dense_strides(view.shape, view.strides), view.dtype


def _plan(
    computes: str, problem: Problem, library: Library, views: Mapping[str, ArrayView], like: Any,
    results: Mapping[str, _Lying], options: Options,
) -> Plan:  # fmt: skip
    home = views["q"].device
    device = _device(home, options.backend)
    gpu = driver.device(device[1]) if device != HOST else None
    arch = gpu.arch if gpu else None
    kernel = _kernel(computes, problem, arch, options)
    tile = choose.choose_tile(kernel, problem, arch, pipeline.as_tile(options.tile), gpu=gpu.name if gpu else "")
    handed = library.handed(like)
    scratch = {name: (shape, dense_strides(shape), "float32") for name, shape in scratch_of(kernel, problem).items()}
    makers = {name: library.allocator(like, *lying) for name, lying in {**results, **scratch}.items()}
    given = [_TENSORS[name] for name in views]
    if device != home:
        staged = _staged_plan(library, kernel, tile, problem, device, given, makers, list(results))
        return _handing_plan(staged, handed) if handed else staged
    tensors = dict(zip(given, views.values(), strict=True))
    tensors |= {name: library.view(makers[name]()) for name in results}
    prepared = pipeline.prepare(kernel, tile, problem, tensors, device)
    names = [*given, *makers]
    launch, order = prepared.launch, [names.index(name) for name in prepared.tensor_names]
    as_given, news, count = order == list(range(len(names))), tuple(makers.values()), len(results)
    pointer, stream = library.pointer, library.stream(device[1]) if device != HOST else int

    def plan(arrays: tuple[Any, ...], addresses: tuple[int, ...]) -> tuple[Any, ...]:
        made = [new() for new in news]
        every = (*addresses, *map(pointer, made))
        launch(every if as_given else tuple(every[i] for i in order), stream())
        return tuple(made[:count])

    return _handing_plan(plan, handed) if handed else plan


def _handing_plan(plan: Plan, handed: Callable[[Any], Any]) -> Plan:
    """`plan`, its results turned into what the caller knows once they are written."""
    return lambda arrays, addresses: tuple(map(handed, plan(arrays, addresses)))


def _kernel(computes: str, problem: Problem, arch: Arch | None, options: Options) -> Kernel:
    kernel = options.kernel
    if kernel is None:
        return choose.choose_kernel(problem, computes, arch, options.deterministic)
    if not isinstance(kernel, Kernel):
        kernel = registry.get(kernel)
    if kernel.computes != computes:
        raise UnsupportedProblem(f"{kernel.name} computes the {kernel.computes}, not the {computes}")
    if options.deterministic and not kernel.deterministic:
        other = choose.choose_kernel(problem, computes, arch, deterministic=True)
        raise UnsupportedProblem(
            f"{kernel.name} is not deterministic: it sums by atomics, in any order; {other.name} does not"
        )
    return kernel


def problem_of(views: Mapping[str, ArrayView], causal: bool | str, scale: float | None) -> Problem:
    """The problem that q, k and v pose. Raises UnsupportedProblem naming the value that does not fit."""
    for name, view in views.items():
        if len(view.shape) != 4:
            raise UnsupportedProblem(f"{name} has shape {view.shape}: it must be (B, heads, S, D), four dimensions")
        if view.strides[3] != 1 and view.shape[3] > 1 and 0 not in view.shape:
            raise UnsupportedProblem(
                f"{name} has stride {view.strides[3]} in D: it must be 1 (pass a contiguous copy of {name})"
            )
    q, k, v = views["q"], views["k"], views["v"]
    for name, view in (("k", k), ("v", v)):
        if view.dtype != q.dtype:
            raise UnsupportedProblem(f"q is {q.dtype} and {name} is {view.dtype}: convert one")
        if view.device != q.device:
            raise UnsupportedProblem(f"q is on {_name(q.device)} and {name} on {_name(view.device)}: move one")
        if (view.shape[0], view.shape[3]) != (q.shape[0], q.shape[3]):
            raise UnsupportedProblem(f"q has shape {q.shape} and {name} {view.shape}: B and D must be the same")
    if v.shape != k.shape:
        raise UnsupportedProblem(f"k has shape {k.shape} and v {v.shape}: they must be the same")
    B, H, Sq, D = q.shape
    Hk, Sk = k.shape[1:3]
    if D == 0:
        raise UnsupportedProblem(f"q has shape {q.shape}: D must be at least 1")
    if H % Hk if Hk else H:
        raise UnsupportedProblem(f"q has H={H} heads and k has {Hk}: H must be a multiple of k's heads")
    mask = normalise_causal(causal)
    return Problem(B, H, Sq, Sk, D, Hk=Hk, dtype=q.dtype, causal=mask, scale=scale, **layout(views.values()))  # type: ignore[arg-type]


def _name(device: Device) -> str:
    return "cpu" if device == HOST else f"{device[0]}:{device[1]}"


def _device(home: Device, backend: str | None) -> Device:
    if backend not in (None, "cpu", "cuda"):
        raise UnsupportedProblem(f'backend={backend!r} is not known: choose "cuda" or "cpu"')
    if backend is None or backend == home[0]:
        return home
    return HOST if backend == "cpu" else ("cuda", 0)


def _check_results(views: Mapping[str, ArrayView], problem: Problem) -> list[str]:
    """That dout, out and lse go with q; returns which of them lie as no kernel reads them."""
    q = views["q"]
    unreadable = []
    for name, shape, dtype in (("dout", q.shape, q.dtype), ("out", q.shape, q.dtype), ("lse", q.shape[:3], "float32")):
        view = views[name]
        if view.shape != shape:
            raise UnsupportedProblem(f"{name} has shape {view.shape}: it must be {shape} to go with q")
        if view.dtype != dtype:
            raise UnsupportedProblem(f"{name} is {view.dtype}: it must be {dtype} to go with q, which is {q.dtype}")
        if view.device != q.device:
            raise UnsupportedProblem(f"q is on {_name(q.device)} and {name} on {_name(view.device)}: move one")
        wanted = dense_strides(shape) if name == "lse" else (*view.strides[:3], 1)
        if 0 not in shape and any(s != w for n, s, w in zip(shape, view.strides, wanted, strict=True) if n > 1):
            unreadable.append(name)
    return unreadable


def _staged_plan(
    library: Library, kernel: Kernel, tile: Tile, problem: Problem, device: Device, given: list[str],
    makers: Mapping[str, Callable[[], Any]], results: list[str],
) -> Plan:  # fmt: skip
    """A plan for arrays on the other side: copied to `device`, computed there, and copied back."""

    def plan(arrays: tuple[Any, ...], addresses: tuple[int, ...]) -> tuple[Any, ...]:
        every = dict(zip(given, arrays, strict=True)) | {name: make() for name, make in makers.items()}
        staged = {name: Staged(library.view(array), device) for name, array in every.items()}
        for name in given:
            staged[name].send()
        prepared = pipeline.prepare(kernel, tile, problem, staged, device)
        prepared.launch(prepared.pointers(staged))
        prepared.wait()
        for name in results:
            staged[name].fetch()
        return tuple(every[name] for name in results)

    return plan
