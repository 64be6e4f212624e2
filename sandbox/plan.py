"""What `attention` decides once for arrays of one kind: problem, kernel, tile, where the results lie, how to launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from . import choose, driver, registry, run
from .dlpack import HOST, ArrayView, Device, Library, dense_strides, library_of
from .errors import UnsupportedProblem
from .spec import Kernel, Problem, Tile, normalise_causal
from .staging import Staged


class Plan(Protocol):
    """Computes (out, lse) for arrays of the kind it was made for; `addresses` are those of q, k, v."""

    def __call__(self, q: Any, k: Any, v: Any, addresses: tuple[int, ...]) -> tuple[Any, Any]: ...


def make_plan(
    q: Any, k: Any, v: Any, causal: Any, scale: float | None, kernel: Any, tile: Any, backend: str | None
) -> Plan:
    """Check the arrays, pick kernel and tile, compile, and fix everything that does not change from call to call.

    Raises what `attention_forward` says. The plan keeps none of the arrays alive.
    """
    library = library_of(q)
    for name, array in (("k", k), ("v", v)):
        if library_of(array) is not library:
            raise UnsupportedProblem(
                f"q is a {library.name} array and {name} a {library_of(array).name} array: pass arrays of one library"
            )
    views = {"q": library.view(q), "k": library.view(k), "v": library.view(v)}
    problem = problem_of(views, causal, scale)
    home = views["q"].device
    device = _device(home, backend)
    gpu = driver.device(device[1]) if device[0] == "cuda" else None
    arch = gpu.arch if gpu else None
    if kernel is not None and not isinstance(kernel, Kernel):
        kernel = registry.get(kernel)
    if kernel is None:
        kernel = choose.choose_kernel(problem, "forward", arch)
    if kernel.computes != "forward":
        raise UnsupportedProblem(f"{kernel.name} computes the {kernel.computes}, not the forward")
    tile = choose.choose_tile(kernel, problem, arch, run.as_tile(tile), gpu=gpu.name if gpu else "")
    out_shape, lse_shape = (problem.B, problem.H, problem.Sq, problem.D), (problem.B, problem.H, problem.Sq)
    out_strides, lse_strides = dense_strides(out_shape, views["q"].strides), dense_strides(lse_shape)
    new_out = library.allocator(q, out_shape, out_strides, problem.dtype)
    new_lse = library.allocator(q, lse_shape, lse_strides, "float32")
    if 0 in out_shape:
        return lambda q, k, v, addresses: (new_out(), new_lse())
    if device != home:
        return _staged_plan(library, kernel, tile, problem, device, new_out, new_lse)
    tensors = {
        "Q": views["q"],
        "K": views["k"],
        "V": views["v"],
        "O": library.view(new_out()),
        "LSE": library.view(new_lse()),
    }
    prepared = run.prepare(kernel, tile, problem, tensors, device)
    launch, order = prepared.launch, [list(tensors).index(name) for name in prepared.tensor_names]
    as_given = order == [0, 1, 2, 3, 4]
    pointer, stream = library.pointer, library.stream(device[1]) if device != HOST else int
    del q, k, v, views, tensors  # a plan keeps no array alive

    def plan(q: Any, k: Any, v: Any, addresses: tuple[int, ...]) -> tuple[Any, Any]:
        out, lse = new_out(), new_lse()
        every = (*addresses, pointer(out), pointer(lse))
        launch(every if as_given else tuple(every[i] for i in order), stream())
        return out, lse

    return plan


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
    alignment = min(view.alignment for view in views.values())
    return Problem(
        B, H, Sq, Sk, D, Hk=Hk, dtype=q.dtype, causal=normalise_causal(causal), scale=scale, alignment=alignment  # type: ignore[arg-type]
    )  # fmt: skip


def _name(device: Device) -> str:
    return "cpu" if device == HOST else f"{device[0]}:{device[1]}"


def _device(home: Device, backend: str | None) -> Device:
    if backend not in (None, "cpu", "cuda"):
        raise UnsupportedProblem(f'backend={backend!r} is not known: choose "cuda" or "cpu"')
    if backend is None or backend == home[0]:
        return home
    return HOST if backend == "cpu" else ("cuda", 0)


def _staged_plan(
    library: Library, kernel: Kernel, tile: Tile, problem: Problem, device: Device, new_out: Callable[[], Any],
    new_lse: Callable[[], Any],
) -> Plan:  # fmt: skip
    """A plan for arrays on the other side: copied to `device`, computed there, and copied back."""

    def plan(q: Any, k: Any, v: Any, addresses: tuple[int, ...]) -> tuple[Any, Any]:
        arrays = {"Q": q, "K": k, "V": v, "O": new_out(), "LSE": new_lse()}
        staged = {name: Staged(library.view(array), device) for name, array in arrays.items()}
        for name in ("Q", "K", "V"):
            staged[name].send()
        prepared = run.prepare(kernel, tile, problem, staged, device)
        prepared.launch(prepared.pointers(staged))
        prepared.wait()
        for name in ("O", "LSE"):
            staged[name].fetch()
        return arrays["O"], arrays["LSE"]

    return plan
