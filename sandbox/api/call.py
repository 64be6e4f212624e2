"""Kernels that do not compute attention, on arrays of any library: `call`, `append_kv`, `block_map`.

The first `call` with arrays of some shapes, dtypes and device validates them, selects the tile, compiles, and stores a
plan. Later calls of the same kind find the plan and launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from ..core import registry
from ..core.block_map import remember
from ..core.errors import SpecError, UnsupportedProblem
from ..core.kernel import Kernel
from ..core.operation import Operation, OperationProblem
from ..core.problem import Problem
from ..core.score import Score
from ..engine import choose, pipeline
from ..engine.staging import Staged
from ..launch.arguments import scratch_of
from ..launch.dlpack import HOST, ArrayView, Device, Library, UnsupportedDtype, dense_strides, library_of
from .dispatch import ALIGNED, MAX_PLANS, NO_KEY
from .options import check_dimensions, check_int32, tile_in_key
from .plan import launch_device, naming, one_library
from .validate import check_append

_Run = Callable[[tuple[Any, ...], Sequence[int]], tuple[Any, ...]]


class _Plan(NamedTuple):
    run: _Run
    aligned: tuple[tuple[int, str], ...]  # index and name of the inputs that must begin at a multiple of 16 bytes


class _Plans(dict[tuple, _Plan]):
    """Plans by their keys. A key begins with `registry.generation()`, which each reload increments: a plan that is made
    during a reload is not found after it."""

    generation = -1

    def keep(self, key: tuple, plan: _Plan) -> None:
        """Stores `plan`; clears the cache first if it is full, or has plans of earlier generations."""
        if key[0] > self.generation or len(self) >= MAX_PLANS:
            self.clear()
            self.generation = key[0]
        self[key] = plan


_plans = _Plans()


def call(name: str, *inputs: Any, tile: Any = None, backend: str | None = None) -> Any:
    """The outputs of kernel `name` for `inputs`, in the order of the `sandbox.spec.Operation` in its spec: one array,
    or a tuple of several.

    Arrays may be NumPy, CuPy, PyTorch or any array with `__dlpack__`; outputs are of the same library, on the same
    device. Device arrays are processed on the caller's current stream, host arrays by the CPU backend unless `backend`
    says otherwise. `tile`: as for `sandbox.attention`. Differentiable once for PyTorch tensors if the Operation names
    the kernel of its `gradient`.

    Raises UnknownKernel; UnsupportedProblem for arrays that do not fit the operation or the kernel, are not contiguous,
    or do not begin at a multiple of 16 bytes, unless the Operation declares the input with `strided=True` or
    `aligned=False` (`sandbox.spec.Tensor`); CompileError, SpecError, ToolchainMissing, GpuUnavailable, DriverError,
    LaunchError.
    """
    if not inputs:
        _check_count(registry.get(name, "operation"), 0)  # raises
    if library_of(inputs[0]).requires_grad(*inputs):
        from .torch_autograd import recorded_call

        kernel = registry.get(name, "operation")
        backward = gradient_of(kernel)
        forward, gradient = (lambda x: run(name, x, tile, backend)), (lambda x: run(backward.name, x, None, backend))
        outputs = recorded_call(forward, gradient, operation_of(kernel), operation_of(backward), inputs)
    else:
        outputs = run(name, inputs, tile, backend)
    return outputs[0] if len(outputs) == 1 else outputs


def append_kv(
    k_new: Any, v_new: Any, k_pages: Any, v_pages: Any, block_table: Any, key_lengths: Any, *, cu_seqlens: Any = None
) -> None:
    """Writes new keys and values after the first key_lengths keys of each sequence, in place, in one launch. The host
    never waits for the GPU: the kernel reads block_table, key_lengths and cu_seqlens.

    k_new: (B, Hk, n, D); v_new: (B, Hk, n, Dv). With cu_seqlens, (B + 1,) int32, k_new is (total, Hk, D) and v_new
    (total, Hk, Dv), and rows cu_seqlens[b] to cu_seqlens[b + 1] belong to sequence b. k_pages: (pages, page_size, Hk,
    D); v_pages: (pages, page_size, Hk, Dv); any strides with a unit stride in D. block_table: (B, max_pages) int32, as
    for `attention_paged`; None: k_pages and v_pages are dense caches (B, Hk, S, D) and (B, Hk, S, Dv). key_lengths:
    (B,) int32, the lengths before the call; it is not changed. block_table, key_lengths and cu_seqlens must be
    contiguous. No two new rows may have the same place in a page or cache. Pages have the dtype of the new rows, or
    float8: values are then converted without a factor, and those beyond the range become the largest number.

    A page number out of range, a row beyond the table or the cache and invalid cu_seqlens are errors on the CPU backend
    and with SANDBOX_CHECKED=1; else a GPU skips rows without a place in a page or cache, and with invalid cu_seqlens
    may write wrong rows. Raises UnsupportedProblem naming the unsupported value; CompileError, ToolchainMissing,
    GpuUnavailable, DriverError, LaunchError.
    """
    dense, ragged = block_table is None, cu_seqlens is not None
    given = {"k_new": k_new, "v_new": v_new, "k_pages": k_pages, "v_pages": v_pages, "key_lengths": key_lengths}
    given |= ({} if dense else {"block_table": block_table}) | ({"cu_seqlens": cu_seqlens} if ragged else {})
    one_library([*given], [*given.values()])
    for name, x in (("k_new", k_new), ("v_new", v_new)):
        check_dimensions(name, x, "(total, Hk, D)" if ragged else "(B, Hk, n, D)")
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_dimensions(name, x, "(B, Hk, S, D)" if dense else "(pages, page_size, Hk, D)")
    check_dimensions("key_lengths", key_lengths, "(B,)")
    check_int32("key_lengths", key_lengths)
    if ragged:
        check_dimensions("cu_seqlens", cu_seqlens, "(B + 1,)")
        check_int32("cu_seqlens", cu_seqlens)
    if not dense:
        check_dimensions("block_table", block_table, "(B, max_pages)")
        check_int32("block_table", block_table)
    _check_append_shapes(k_new, v_new, k_pages, v_pages, "(B, Hk, S, D)" if dense else "(pages, page_size, Hk, D)")
    empty = key_lengths[:0]  # passed instead of the table (dense caches), or of the offsets (rows that are not ragged)
    if ragged:
        k_new, v_new = (x.swapaxes(0, 1)[None] for x in (k_new, v_new))
    if not dense:
        k_pages, v_pages = (x.swapaxes(1, 2) for x in (k_pages, v_pages))
    check_append(k_new, k_pages, block_table, key_lengths, cu_seqlens)
    table, offsets = empty.reshape(0, 0) if dense else block_table, cu_seqlens if ragged else empty
    call(_append_kernel(k_new, k_pages), k_new, v_new, table, key_lengths, offsets, k_pages, v_pages)


def _check_append_shapes(k_new: Any, v_new: Any, k_pages: Any, v_pages: Any, layout: str) -> None:
    """Raises UnsupportedProblem for shapes that do not fit. Called before pages and ragged rows are transposed, so that
    messages contain the caller's shapes. `layout`: the dimensions of the pages or caches, as text."""
    heads = 1 if layout.startswith("(B") else 2
    for name, new, pages in (("k", k_new, k_pages), ("v", v_new, v_pages)):
        Hk, D = new.shape[1], new.shape[-1]
        if (pages.shape[heads], pages.shape[3]) != (Hk, D):
            dimensions = "B, Hk, n, D" if len(new.shape) == 4 else "total, Hk, D"
            raise UnsupportedProblem(
                f"{name}_pages has shape {tuple(pages.shape)}: it must be {layout} with "
                f"Hk={Hk} and D={D}, as {name}_new, ({dimensions}), of shape {tuple(new.shape)}"
            )
    for k_name, k, v_name, v in (("k_new", k_new, "v_new", v_new), ("k_pages", k_pages, "v_pages", v_pages)):
        if k.shape[:-1] != v.shape[:-1]:
            raise UnsupportedProblem(
                f"{k_name} has shape {tuple(k.shape)} and {v_name} {tuple(v.shape)}: they must be the same, except for "
                "the last dimension"
            )


def _append_kernel(k_new: Any, k_pages: Any) -> str:
    """The name of the kernel for these dtypes. Raises UnsupportedProblem if there is none."""
    if k_pages.dtype == k_new.dtype:
        return "append_kv"
    names = [str(x.dtype).rpartition(".")[2] for x in (k_new, k_pages)]
    kernel = {"float8_e4m3fn": "append_kv_e4m3", "float8_e5m2": "append_kv_e5m2"}.get(names[1])
    if kernel is None:
        raise UnsupportedProblem(
            f"k_new is {names[0]} and k_pages is {names[1]}: pages must have the dtype of k_new, or float8_e4m3fn or "
            "float8_e5m2"
        )
    return kernel


def block_map(score: Score, problem: Problem, *, like: Any = None) -> Any:
    """Which tiles of S the mask of `score` hides, shows in part, or shows in full (FlexAttention's BlockMask,
    arXiv:2412.05496).

    Pass the map to `score.with_blocks(...)`. Without it every launch computes its own map, so the tensors of the score
    may change between calls; with it, tiles that were hidden or fully visible when the map was made stay so. One map
    serves the forward and the backward of all dense problems with the same B, H, Sq and Sk and any score option except
    `mask=`. With key_lengths the mask must not name Sk, and must name b unless B is 1. B, H and Sq may differ if the
    mask does not name them (as b, h, i or Sq). Other sizes raise UnsupportedProblem. The sizes are remembered for the
    returned array, not for a copy of it: of a copy only the shape is compared.

    Returns an int32 array (B, H, rows, words); B, H and rows are 1 where the mask does not vary along them. A row
    stands for 64 queries, a bit for 16 keys. Each row has ceil(Sk / 512) words, rounded up to a multiple of 4, for
    "some key is visible", and as many for "all keys are visible". The array has the library and device of the tensors
    that `score` reads; if it reads none, those of `like` (pass q); without `like` it is a NumPy array.

    Raises SpecError for a score without a mask, UnsupportedProblem for tensors of several libraries or devices, and
    what `attention_forward` does.
    """
    if not isinstance(score, Score):
        raise SpecError(f'score={score!r} must be a sandbox.Score, such as sandbox.Score(mask="j <= i")')
    if not score.hides:
        raise SpecError(f"score={score!s} hides no keys: a block map needs a sandbox.Score with a mask")
    if not isinstance(problem, Problem):
        raise SpecError(f"problem={problem!r} must be a sandbox.Problem, such as sandbox.Problem(2, 4, 512, 512, 64)")
    bare = Problem(problem.B, problem.H, problem.Sq, problem.Sk, 64, dtype="float16", score=score.described)
    arrays = tuple(score.tensors.values()) or (_host() if like is None else like,)
    names = [f"score.{name}" for name in score.tensors]
    library, *others = map(library_of, arrays, names or ["like"])
    if any(other is not library for other in others):
        raise UnsupportedProblem("the tensors of score are arrays of several libraries: convert them to one")
    arrays = library.materialise(*arrays)
    views = dict(zip(names, map(library.view, arrays), strict=False))
    device = library.view(arrays[0]).device
    if any(view.device != device for view in views.values()):
        raise UnsupportedProblem("the tensors of score are on several devices: copy them to one")
    made = library.allocator(arrays[0], bare.block_map, dense_strides(bare.block_map), "int32")()
    tensors = {**views, "block_map": library.view(made)}
    kernel = choose.choose_kernel(bare, "block_map", pipeline.arch_of(device))
    prepared = pipeline.prepare(kernel, pipeline.tile_on(device, kernel, bare), bare, tensors, device)
    prepared.launch(prepared.pointers(tensors), library.stream(device[1])() if device != HOST else 0)
    to_caller = library.to_caller(arrays[0])
    blocks = to_caller(made) if to_caller else made
    remember(blocks, (problem.B, problem.H, problem.Sq, problem.Sk))
    return blocks


def _host() -> Any:
    import numpy as np

    return np.empty(0, np.float32)


def run(name: str, inputs: tuple[Any, ...], tile: Any = None, backend: str | None = None) -> tuple[Any, ...]:
    """The outputs of `call`, without gradients."""
    library = library_of(inputs[0])
    arrays = library.materialise(*inputs)
    try:
        key: tuple = (registry.generation(), name, tile_in_key(tile), backend, *library.signatures(arrays))
        plan = _plans.get(key)
        addresses = [*map(library.pointer, arrays)]
    except NO_KEY:
        key, plan, addresses = (), None, []
    if plan is None:
        plan = _planned(name, arrays, library, tile, backend)
        if key:
            _plans.keep(key, plan)
        addresses = [*map(library.pointer, arrays)]
    if reduce(or_, addresses) % ALIGNED:
        for i, array in plan.aligned:
            if addresses[i] % ALIGNED:
                raise UnsupportedProblem(
                    f"{name}: {array} does not begin at a multiple of {ALIGNED} bytes: pass a copy"
                )
    return plan.run(arrays, addresses)


def operation_of(kernel: Kernel) -> Operation:
    """What the kernel computes. Raises UnsupportedProblem for a kernel of attention."""
    if not isinstance(kernel.computes, Operation):
        what, function = _INSTEAD[kernel.computes]
        raise UnsupportedProblem(f"{kernel.name} computes {what}: use sandbox.{function}")
    return kernel.computes


_INSTEAD = {  # {what an attention kernel computes: (the same in words, the public function to use instead)}
    "forward": ("attention's forward", "attention"),
    "backward": ("attention's backward", "attention_backward"),
    "preprocess": ("a step of attention's backward", "attention_backward"),
    "block_map": ("a block map", "block_map"),
}


def gradient_of(kernel: Kernel) -> Kernel:
    """The kernel of the backward of `kernel`. Each input of the backward is an input of `kernel` ("x"), an output of
    `kernel` ("y"), or the gradient of an output ("dy"); each output of the backward is the gradient of an input of
    `kernel` ("dx").

    Raises UnsupportedProblem if the Operation names no such kernel, SpecError if inputs or outputs of the backward have
    other names."""
    operation = operation_of(kernel)
    if not operation.gradient:
        raise UnsupportedProblem(
            f"{kernel.name} has no backward: name its kernel in the Operation (gradient=), or pass x.detach()"
        )
    backward = registry.get(operation.gradient)
    theirs = operation_of(backward)
    given = {*(f"d{name}" for name in operation.outputs), *operation.inputs, *operation.outputs}
    wanted = {f"d{name}" for name in operation.inputs}
    for what, names, allowed in (("input", theirs.inputs, given), ("output", theirs.outputs, wanted)):
        if unknown := [name for name in names if name not in allowed]:
            raise SpecError(
                f"{backward.name}: as the gradient of {kernel.name}, its {what} {unknown[0]} must be one of "
                f"{', '.join(sorted(allowed))}"
            )
    return backward


def _check_count(kernel: Kernel, inputs: int) -> None:
    names = operation_of(kernel).inputs
    if inputs != len(names):
        raise UnsupportedProblem(
            f"{kernel.name} takes {len(names)} inputs ({', '.join(names)}), and {inputs} were passed"
        )


def problem_of(kernel: Kernel, views: Sequence[ArrayView]) -> OperationProblem:
    """The problem of these inputs. Raises UnsupportedProblem if they do not fit the operation."""
    operation = operation_of(kernel)
    sizes: dict[str, tuple[int, str]] = {}
    dtype, dtype_from = "", ""
    for (name, tensor), view in zip(operation.inputs.items(), views, strict=True):
        dims = ", ".join(map(str, tensor.dims))
        if len(view.shape) != len(tensor.dims):
            raise UnsupportedProblem(f"{kernel.name}: {name} has shape {view.shape}: it must be ({dims})")
        for dim, size in zip(tensor.dims, view.shape, strict=True):
            expected, first = (dim, "") if isinstance(dim, int) else sizes.setdefault(dim, (size, name))
            if size != expected:
                where = f", and {dim} is {expected} in {first}" if first else ""
                raise UnsupportedProblem(f"{kernel.name}: {name} has shape {view.shape}: it must be ({dims}){where}")
        wanted = tensor.dtype or dtype
        if wanted and view.dtype != wanted:
            reason = f"{dtype_from} has" if not tensor.dtype else "the spec gives"
            raise UnsupportedProblem(f"{kernel.name}: {name} has dtype {view.dtype}, and {reason} {wanted}: convert it")
        if not tensor.dtype:
            dtype, dtype_from = view.dtype, name
        _check_strides(kernel, name, view, tensor.strided)
        if view.device != views[0].device:
            first = next(iter(operation.inputs))
            raise UnsupportedProblem(f"{kernel.name}: {name} is on another device than {first}: move it")
    return operation.sized({dim: size for dim, (size, _) in sizes.items()}, dtype or kernel.dtypes[0])


def _check_strides(kernel: Kernel, name: str, view: ArrayView, strided: bool) -> None:
    dense = (*view.strides[:3], 1) if strided else dense_strides(view.shape)
    if any(n > 1 and s != d for n, s, d in zip(view.shape, view.strides, dense, strict=True)) and 0 not in view.shape:
        raise UnsupportedProblem(
            f"{kernel.name}: {name} with shape {view.shape} and strides {view.strides} is not supported: pass a "
            "contiguous copy"
        )


class _Making(NamedTuple):
    """What a plan is made from."""

    kernel: Kernel
    problem: Any
    tile: Any
    device: Device
    library: Library
    outputs: Mapping[str, Callable[[], Any]]  # allocators; without outputs that are updated in place
    scratch: Mapping[str, tuple[int, ...]]

    def results(self, arrays: tuple[Any, ...], made: Mapping[str, Any]) -> tuple[Any, ...]:
        """The outputs of a launch that read `arrays` and wrote to them and to `made`."""
        operation = operation_of(self.kernel)
        known = {**dict(zip(operation.inputs, arrays, strict=True)), **made}
        self.library.mark_written(*(known[name] for name in operation.in_place))
        return tuple(known[name] for name in operation.outputs)


def _planned(name: str, arrays: tuple[Any, ...], library: Library, tile: Any, backend: str | None) -> _Plan:
    kernel = registry.get(name, "operation")
    _check_count(kernel, len(arrays))
    one_library([*operation_of(kernel).inputs], arrays)
    views = [_view(kernel, library, *named) for named in zip(operation_of(kernel).inputs, arrays, strict=True)]
    problem: Any = problem_of(kernel, views)
    home = views[0].device
    device = launch_device(home, backend)
    chosen = pipeline.tile_on(device, kernel, problem, pipeline.as_tile(tile), tuned=True)
    outputs = {
        output: library.allocator(arrays[0], shape, dense_strides(shape), tensor.dtype_in(problem))
        for output, tensor in operation_of(kernel).outputs.items()
        if output not in operation_of(kernel).in_place
        for shape in (tensor.shape(problem),)
    }
    making = _Making(kernel, problem, chosen, device, library, outputs, scratch_of(kernel, problem, chosen))
    launch = _direct(making, arrays) if device == home else _staged(making)
    if operation_of(kernel).in_place:
        launch = _checking(making, launch)
    aligned = tuple((i, n) for i, (n, tensor) in enumerate(operation_of(kernel).inputs.items()) if tensor.aligned)
    if convert := library.to_caller(arrays[0]):
        return _Plan(lambda arrays, addresses: tuple(map(convert, launch(arrays, addresses))), aligned)
    return _Plan(launch, aligned)


def _view(kernel: Kernel, library: Library, name: str, array: Any) -> ArrayView:
    """The view of an input. Raises UnsupportedProblem with its name if its dtype is not supported."""
    try:
        return library.view(array)
    except UnsupportedDtype as error:
        message = naming(error, name, operation_of(kernel).inputs[name].dtype)
        raise UnsupportedProblem(f"{kernel.name}: {message}") from None


def _checking(making: _Making, plan: _Run) -> _Run:
    """A function that first checks whether arrays that are updated in place are writable, and then calls `plan`. It
    checks at each call: the key of a plan does not contain whether an array is writable."""
    operation, library = operation_of(making.kernel), making.library
    updated = [(n, name) for n, name in enumerate(operation.inputs) if name in operation.in_place]

    def check_first(arrays: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]:
        for n, name in updated:
            if reason := library.unwritable(arrays[n]):
                raise UnsupportedProblem(
                    f"{making.kernel.name} writes into {name}, which {reason}: pass a writable array"
                )
        return plan(arrays, addresses)

    return check_first


def _direct(making: _Making, arrays: tuple[Any, ...]) -> _Run:
    """For arrays on the device of the launch."""
    library, like = making.library, arrays[0]
    names = operation_of(making.kernel).reads
    scratch = {
        n: library.allocator(like, shape, dense_strides(shape), "float32") for n, shape in making.scratch.items()
    }
    makers = {**making.outputs, **scratch}
    tensors = dict(zip(names, map(library.view, arrays), strict=True))
    tensors |= {name: library.view(make()) for name, make in makers.items()}
    prepared = pipeline.prepare(making.kernel, making.tile, making.problem, tensors, making.device, [*names, *makers])
    launch, pointer = prepared.launch, library.pointer
    stream = library.stream(making.device[1]) if making.device != HOST else int  # int() is 0
    allocators, count = [*makers.values()], len(making.outputs)
    in_place = operation_of(making.kernel).in_place

    def run(arrays: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]:
        made = [allocate() for allocate in allocators]  # scratch is freed in stream order
        launch((*addresses, *map(pointer, made)), stream())
        return making.results(arrays, dict(zip(makers, made, strict=True))) if in_place else tuple(made[:count])

    return run


def _staged(making: _Making) -> _Run:
    """For arrays on another device: they are copied there, and the results back."""
    library, names = making.library, operation_of(making.kernel).reads

    def run(arrays: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]:
        scratch = (library.allocator(arrays[0], s, dense_strides(s), "float32") for s in making.scratch.values())
        made = {name: make() for name, make in (*making.outputs.items(), *zip(making.scratch, scratch, strict=True))}
        every = {**dict(zip(names, arrays, strict=True)), **made}
        staged = {name: Staged(library.view(array), making.device) for name, array in every.items()}
        for name in names:
            staged[name].send()
        prepared = pipeline.prepare(making.kernel, making.tile, making.problem, staged, making.device)
        prepared.launch(prepared.pointers(staged))
        prepared.wait()
        for name in operation_of(making.kernel).outputs:
            staged[name].fetch()
        return making.results(arrays, made)

    return run
