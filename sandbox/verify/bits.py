"""`bits`: what may change without changing the bits of a row, by experiment.

A problem with random inputs is run, and then again with one thing changed: other batch entries, the order of the heads,
fewer queries, pages, … The rows that both runs have in common are compared bit by bit. Rows of a forward are those of O
and LSE, of a backward those of dQ, dK and dV.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from ..core.errors import SpecError, UnsupportedProblem
from ..core.kernel import INVARIANCES, Kernel
from ..core.normalise import Causal
from ..core.problem import Problem
from ..core.tile import Tile
from ..engine import pipeline
from ..engine.choose import why_tile_unsupported
from ..launch import driver
from ..launch.array_view import numpy_dtype
from ..launch.dlpack import HOST, Device
from ..reference import attention
from . import trial
from .attention import usual_dtypes
from .report import table
from .suite import suite_of

Array = NDArray[Any]
Arrays = Mapping[str, Array]

_WIDTHS = (64, 128, 32, 16)
_PAGE_SIZES = (16, 64, 256)
_OF_KEYS = ("K", "V", "dK", "dV")
_STRIDED = ("Q", "K", "V", "dO", "O")


@dataclass(frozen=True)
class Finding:
    """One change for one kernel and tile. `equal`: whether the rows in common had equal bits; None if the change does
    not apply, for the reason in `detail`. `declared`: whether the spec guarantees it. `detail` of a difference: the
    first one, and how many there are."""

    kernel: str
    tile: Tile
    invariant: bool
    change: str
    equal: bool | None
    declared: bool
    detail: str = ""

    @property
    def violated(self) -> bool:
        """Whether a guarantee does not hold."""
        return self.declared and self.equal is False


@dataclass(frozen=True)
class Run:
    """A problem with inputs, and the index of the rows to compare in its outputs."""

    what: str
    problem: Problem
    inputs: Arrays
    rows: Callable[[str, Array], Array]  # (name of an output, output) -> rows
    tile: Mapping[str, int] = dataclasses.field(default_factory=dict)  # numbers of the tile that differ


@dataclass(frozen=True)
class Base:
    """The problem to which everything is compared, and dense arrays for it."""

    kernel: Kernel
    tile: Tile
    problem: Problem
    arrays: Arrays
    rng: np.random.Generator

    def run(self, what: str, entries: Sequence[int], groups: Sequence[int] | None = None, queries: slice = slice(None),
            keys: slice = slice(None), more: Arrays | None = None) -> Run:  # fmt: skip
        """A run of the dense problem that consists of these batch entries, key/value heads (`groups`, with their query
        heads), queries and keys; all its rows are compared. `more`: arrays that replace those of the base."""
        p, group = self.problem, self.problem.group
        kv = [*range(p.Hk)] if groups is None else [*groups]
        heads = {True: kv, False: [g * group + i for g in kv for i in range(group)]}
        arrays = {
            name: x[np.ix_(entries, heads[name in _OF_KEYS])][:, :, keys if name in _OF_KEYS else queries]
            for name, x in {**self.arrays, **(more or {})}.items()
        }
        Sq, Sk = arrays["Q"].shape[2], arrays["K"].shape[2]
        problem = dataclasses.replace(p, B=len(entries), H=len(heads[False]), Hk=len(kv), Sq=Sq, Sk=Sk)
        return Run(what, problem, arrays, lambda name, x: x)


Pair = tuple[Run, Run]  # their rows must be equal


def _same(base: Base, entries: Sequence[int] = (1,)) -> Run:
    return base.run("", entries)


def _runs(base: Base) -> Iterator[Pair]:
    yield _same(base), base.run("another launch", [1])


def _entries(base: Base) -> Iterator[Pair]:
    others = {name: x.copy() for name, x in base.arrays.items()}
    for x in others.values():
        x[0] = x[0][..., ::-1, :] if x.ndim == 4 else x[0][..., ::-1]
    whole = base.run("", [0, 1])
    changed = base.run("the values of the other batch entry", [0, 1], more=others)
    yield _second(whole), _second(changed)
    lengths = [
        dataclasses.replace(
            whole,
            what=f"the other batch entry has {n} keys",
            problem=dataclasses.replace(whole.problem, key_lengths=True),
            inputs={**whole.inputs, "key_lengths": np.array([n, base.problem.Sk], np.int32)},
        )
        for n in (base.problem.Sk, 7)
    ]
    yield _second(lengths[0]), _second(lengths[1])


def _second(run: Run) -> Run:
    """The run, of which only the rows of its second batch entry count."""
    return dataclasses.replace(run, rows=lambda name, x: x[1:2])


def _batch(base: Base) -> Iterator[Pair]:
    whole = _second(base.run("", [0, 1]))
    yield whole, _same(base)
    many = dataclasses.replace(base.run("the third of five", [0, 0, 1, 0, 0]), rows=lambda name, x: x[2:3])
    yield whole, many


def _heads(base: Base) -> Iterator[Pair]:
    order = [*range(base.problem.Hk)][::-1]
    group = base.problem.group

    def restored(name: str, x: Array) -> Array:
        heads = order if name in _OF_KEYS else [g * group + i for g in order for i in range(group)]
        return x[:, heads]

    yield _same(base), dataclasses.replace(base.run("heads in reverse order", [1], order), rows=restored)
    one = base.run("one key/value head", [1], [0])
    yield dataclasses.replace(_same(base), rows=lambda name, x: x[:, : 1 if name in _OF_KEYS else group]), one


def _queries(base: Base) -> Iterator[Pair]:
    p = base.problem
    for begin, end in ((0, 1), (p.Sq - 1, p.Sq), (3, 20), (p.Sq - 64, p.Sq), (p.Sq // 2, p.Sq // 2 + 1)):
        chunk = base.run(f"queries {begin} to {end - 1} as a chunk", [1], None, slice(begin, end),
                         slice(p.Sk - p.Sq + end if p.causal else None))  # fmt: skip

        def rows(name: str, x: Array, begin: int = begin, end: int = end) -> Array:
            return x[:, :, begin:end]

        yield dataclasses.replace(_same(base), rows=rows), chunk


def _allocation(base: Base) -> Iterator[Pair]:
    exact = _same(base)

    def allocated(run: Run, extra: int, what: str) -> Run:
        p, n = run.problem, run.problem.Sk
        inputs = {**run.inputs, "key_lengths": np.full(p.B, n, np.int32)}
        for name in ("K", "V"):
            x = inputs[name]
            inputs[name] = np.concatenate([x, np.full_like(x[:, :, :1], np.nan).repeat(extra, 2)], 2)
        if p.mask:
            inputs["mask"] = np.pad(inputs["mask"], ((0, 0),) * 3 + ((0, extra),), constant_values=True)
        problem = dataclasses.replace(p, Sk=n + extra, key_lengths=True, mask=inputs["mask"].shape if p.mask else ())
        return Run(what, problem, inputs, run.rows)

    yield allocated(exact, 0, ""), allocated(exact, 77, "77 more keys allocated, which are NaN")
    yield exact, allocated(exact, 1000, "key_lengths, and 1000 more keys allocated")
    masked = _masked(exact, base.rng)
    yield allocated(masked, 0, ""), allocated(masked, 77, "with a mask, 77 more keys allocated, which are NaN")


def _masked(run: Run, rng: np.random.Generator) -> Run:
    """The run with a mask that hides the first half of the keys, of which a block map skips tiles, and some others."""
    p = run.problem
    mask = rng.random((1, 1, p.Sq, p.Sk), np.float32) < 0.8
    mask[..., : p.Sk // 2] = False
    problem = dataclasses.replace(p, mask=mask.shape)
    return dataclasses.replace(run, problem=problem, inputs={**run.inputs, "mask": mask})


def _in_pages(run: Run, size: int, rng: np.random.Generator, what: str) -> Run:
    """The run with its keys in shuffled pages."""
    p, most = run.problem, -(-run.problem.Sk // size) + 1
    pages = p.B * most + 3
    table = rng.permutation(pages)[: p.B * most].reshape(p.B, most).astype(np.int32)
    inputs = {**run.inputs, "block_table": table, "key_lengths": np.full(p.B, p.Sk, np.int32)}
    for name in ("K", "V"):
        x = run.inputs[name]
        padded = np.zeros((p.B, p.Hk, most * size, x.shape[3]), x.dtype)
        padded[:, :, : p.Sk] = x
        stored = np.zeros((pages, size, p.Hk, x.shape[3]), x.dtype)
        stored[table] = padded.reshape(p.B, p.Hk, most, size, -1).transpose(0, 2, 3, 1, 4)
        inputs[name] = stored.swapaxes(1, 2)
    return Run(what, dataclasses.replace(p, Sk=most * size, page_size=size, pages=pages), inputs, run.rows)


def _pages(base: Base) -> Iterator[Pair]:
    yield _same(base), _in_pages(_same(base), _PAGE_SIZES[0], base.rng, f"pages of {_PAGE_SIZES[0]} keys")
    for size in _PAGE_SIZES:
        first, second = (_in_pages(_same(base), size, base.rng, what) for what in ("", f"pages of {size}, other order"))
        yield first, second


def _page_size(base: Base) -> Iterator[Pair]:
    first, *others = (_in_pages(_same(base), size, base.rng, f"pages of {size} keys") for size in _PAGE_SIZES)
    yield from ((first, other) for other in others)


def _ragged(base: Base) -> Iterator[Pair]:
    p = base.problem
    lengths = ((5, 40), (p.Sq, p.Sk), (33, 33))
    ragged = {}
    for name, x in base.arrays.items():
        each = [n[name in _OF_KEYS] for n in lengths]
        ragged[name] = np.concatenate([x[:1, :, : each[0]], x[1:2], x[:1, :, : each[2]]], 2)
    sums = np.cumsum([(0, 0), *lengths], axis=0, dtype=np.int32)
    ragged |= {f"cu_seqlens_{which}": np.ascontiguousarray(sums[:, i]) for i, which in enumerate("qk")}

    def rows(name: str, x: Array) -> Array:
        begin, count = (40, p.Sk) if name in _OF_KEYS else (5, p.Sq)
        return x[:, :, begin : begin + count]

    problem = dataclasses.replace(p, B=0, Sq=0, Sk=0, lengths=lengths)
    yield _same(base), Run("a sequence of a ragged batch", problem, ragged, rows)


def _with_numbers(name: str, values: Sequence[int]) -> Callable[[Base], Iterator[Pair]]:
    def changed(base: Base) -> Iterator[Pair]:
        whole = base.run("", [0, 1])
        for value in values:
            yield whole, dataclasses.replace(whole, what=f"{name}={value}", tile={name: value})

    return changed


def _splits(base: Base) -> Iterator[Pair]:
    whole = base.run("", [0, 1])
    tiles = {n: Tile(**{**base.tile, "BLOCKS": n}) for n in (1, 8, 132, 1000)}
    counts = {base.kernel.numbers["splits"](whole.problem, tile): n for n, tile in tiles.items()}
    first, *others = counts.items()
    whole = dataclasses.replace(whole, tile={"BLOCKS": first[1]})
    for count, n in others:
        yield whole, dataclasses.replace(whole, what=f"{count} splits instead of {first[0]}", tile={"BLOCKS": n})
    if not others:
        yield from _splits_of_long_rows(base)


def _splits_of_long_rows(base: Base) -> Iterator[Pair]:
    """For a kernel whose number of splits depends on the problem and not on BLOCKS. A ragged batch has one split."""
    p = dataclasses.replace(base.problem, B=1, H=base.problem.group, Hk=1, Sq=3, Sk=4200)
    arrays = _drawn(base.kernel, p, base.rng)
    count = base.kernel.numbers["splits"](p, base.tile)
    if count > 1:
        offsets = {f"cu_seqlens_{which}": np.array([0, n], np.int32) for which, n in (("q", p.Sq), ("k", p.Sk))}
        ragged = dataclasses.replace(p, B=0, Sq=0, Sk=0, lengths=((3, 4200),))
        yield (Run("", p, arrays, lambda name, x: x),
               Run(f"one split instead of {count}", ragged, arrays | offsets, lambda name, x: x))  # fmt: skip


def _strides(base: Base) -> Iterator[Pair]:
    dense = _same(base)

    def laid_out(offset: int) -> dict[str, Array]:
        found = dict(dense.inputs)
        for name in found.keys() & {*_STRIDED}:
            x = found[name]
            memory = np.zeros((x.shape[0], x.shape[2] + 1, x.shape[1], x.shape[3] + 24), x.dtype)
            view = memory[:, 1:, :, offset : offset + x.shape[3]].swapaxes(1, 2)
            view[...] = x
            found[name] = view
        return found

    size = dense.inputs["Q"].itemsize
    for nbytes in (16, 8, size):
        problem = dataclasses.replace(dense.problem, alignment=nbytes)
        if nbytes == 16 or not base.kernel.why_unsupported(problem):
            yield dense, dataclasses.replace(dense, what=f"(B, S, H, D), aligned to {nbytes} bytes",
                                             inputs=laid_out(nbytes // size))  # fmt: skip


CHANGES: dict[str, Callable[[Base], Iterator[Pair]]] = {
    "runs": _runs, "entries": _entries, "batch": _batch, "heads": _heads, "queries": _queries,
    "allocation": _allocation, "pages": _pages, "page_size": _page_size, "ragged": _ragged,
    "SMs": _with_numbers("BLOCKS", (1, 7, 78)), "splits": _splits, "cluster": _with_numbers("CLUSTER", (1, 2, 4)),
    "strides": _strides,
}  # fmt: skip
_OF_GRADIENTS = ("runs", "entries", "batch", "ragged", "SMs")  # dK and dV are sums over queries and heads
assert [*CHANGES] == [*INVARIANCES]


def base_of(kernel: Kernel, device: Device, tile: Tile | None, seed: int, invariant: bool = False) -> Base:
    """A problem with random inputs for `kernel`, causal if it supports that. Scores grow along the keys, so that row
    maxima change often. Raises UnsupportedProblem if the kernel supports none."""
    small = device == HOST
    sizes: dict[str, Any] = {"B": 2, "H": 4, "Hk": 2, "Sq": 150 if small else 700, "Sk": 333 if small else 1501}
    dtype, reason = usual_dtypes(kernel)[-1], ""
    rng = np.random.default_rng(seed)
    causal: tuple[Causal, ...] = ("bottom-right", False)
    for mask, D in product(causal, _WIDTHS):
        problem = kernel.adapted(Problem(D=D, dtype=dtype, causal=mask, **sizes))
        problem = dataclasses.replace(problem, invariant=invariant)
        try:
            chosen = pipeline.tile_on(device, kernel, problem, tile)
        except UnsupportedProblem as error:
            reason = reason or str(error)
            continue
        return Base(kernel, chosen, problem, _drawn(kernel, problem, rng), rng)
    raise UnsupportedProblem(reason)


def _drawn(kernel: Kernel, p: Problem, rng: np.random.Generator) -> dict[str, Array]:
    def normal(heads: int, rows: int, columns: int) -> Array:
        return rng.standard_normal((p.B, heads, rows, columns), np.float32)

    growing = np.linspace(0.2, 2.0, p.Sk, dtype=np.float32)[:, None]
    found = {"Q": 3 * normal(p.H, p.Sq, p.D), "K": normal(p.Hk, p.Sk, p.D) * growing, "V": normal(p.Hk, p.Sk, p.Dv)}
    found = {name: x.astype(numpy_dtype(p.dtype_of(name))) for name, x in found.items()}
    if p.latent:
        found["V"] = found["K"][..., : p.Dv]
    if kernel.computes == "backward":
        O, LSE = attention(*(found[name] for name in "QKV"), causal=p.causal, scale=p.scale)
        found |= {"dO": normal(p.H, p.Sq, p.Dv).astype(numpy_dtype(p.dtype)), "O": O.astype(numpy_dtype(p.dtype))}
        found["LSE"] = LSE.astype(np.float32)
    return found


def _launched(base: Base, run: Run, device: Device, done: dict[int, Arrays]) -> Arrays:
    """The rows of a run's outputs. `done`: runs that were launched before."""
    inputs, kernel = dict(run.inputs), base.kernel
    if run.problem.latent:
        inputs["V"] = inputs["K"][..., : run.problem.Dv]
    problem = suite_of(kernel).laid_out(run.problem, inputs)
    if reason := kernel.why_unsupported(problem, pipeline.arch_of(device)):
        raise UnsupportedProblem(reason)
    # With `invariant` only some numbers of the tile are fixed, and the others chosen for each problem.
    own = pipeline.tile_on(device, kernel, problem) if problem.invariant else base.tile
    tile = Tile(**{**own, **run.tile})
    if reason := why_tile_unsupported(kernel, problem, tile, pipeline.arch_of(device)):
        raise UnsupportedProblem(reason)
    if id(run) not in done:
        done[id(run)] = trial.launch(kernel, tile, problem, inputs, device).outputs
    return {name: run.rows(name, x) for name, x in done[id(run)].items()}


def first_difference(expected: Arrays, found: Arrays) -> str:
    """The first element whose bits differ, and how many do; "" if none does. All NaN count as equal."""
    for name, x in expected.items():
        a, b = (np.ascontiguousarray(y) for y in (x, found[name]))
        unsigned = np.dtype(f"u{a.itemsize}")
        differ = (a.view(unsigned) != b.view(unsigned)) & ~(np.isnan(a) & np.isnan(b))
        if differ.any():
            at = tuple(int(i) for i in np.argwhere(differ)[0])
            return f"{name}{[*at]} is {float(b[at])!r}, not {float(a[at])!r}; {int(differ.sum())} of {a.size} differ"
    return ""


def compare(base: Base, change: str, device: Device) -> Finding:
    """Whether `change` leaves the bits of all rows that the runs have in common."""
    kernel, invariant = base.kernel, base.problem.invariant
    declared = change in (guaranteed(kernel) if invariant else kernel.invariant_to)
    found = Finding(kernel.name, base.tile, invariant, change, None, declared)
    if change not in kernel.invariances:
        return dataclasses.replace(found, detail="does not apply")
    try:
        for first, second in CHANGES[change](base):
            done: dict[int, Arrays] = {}
            difference = first_difference(*(_launched(base, run, device, done) for run in (first, second)))
            if difference:
                return dataclasses.replace(found, equal=False, detail=f"{second.what}: {difference}")
            found = dataclasses.replace(found, equal=True)
    except UnsupportedProblem as reason:
        return found if found.equal else dataclasses.replace(found, detail=str(reason))
    return found


def guaranteed(kernel: Kernel) -> tuple[str, ...]:
    """The changes that leave the bits equal with invariant=True: in a backward only those in `_OF_GRADIENTS`."""
    if kernel.computes == "forward":
        return kernel.invariances
    return tuple(name for name in kernel.invariances if name in _OF_GRADIENTS)


def examine(
    kernels: Iterable[Kernel], device: Device, seed: int, tile: Tile | None = None, changes: Sequence[str] = (),
    invariant: bool | None = None,
) -> Iterator[Finding]:  # fmt: skip
    """`bits`: examines each change for each kernel, without invariant=True and, if the kernel supports it, with it.
    `invariant`: only one of the two. `tile`: by default the one that the spec chooses. Raises UnsupportedProblem for a
    kernel of another computation, and if no kernel can be examined."""
    kernels, examined, reason = [*kernels], False, ""
    if others := [kernel for kernel in kernels if kernel.computes not in ("forward", "backward")]:
        raise UnsupportedProblem(
            f"{others[0].name} is not supported: bits compares rows of attention (choose kernels of the forward or "
            "backward, such as fwd_minimal)"
        )
    for kernel in kernels:
        for mode in (False, True):
            if invariant is (not mode):
                continue
            if mode and kernel.invariant_tile is None:
                reason = reason or f"{kernel.name}: invariant=True is not supported"
                continue
            try:
                base = base_of(kernel, device, tile, seed, mode)
            except UnsupportedProblem as refusal:
                if tile is None and device == HOST:
                    raise
                reason = reason or str(refusal)
                continue
            examined = True
            yield from (compare(base, change, device) for change in changes or CHANGES)
    if not examined:
        raise UnsupportedProblem(reason)


# ---- tables

LEGEND = (
    "yes: guaranteed by the spec, and confirmed; (yes): equal here; no: different; -: does not apply, or the problem "
    "that was tried is not supported"
)
_BROKEN = "BROKEN"  # a guarantee that does not hold


def mark(finding: Finding) -> str:
    """The finding in a cell of a table."""
    if finding.violated:
        return _BROKEN
    if finding.equal is None:
        return "-"
    return "no" if not finding.equal else "yes" if finding.declared else "(yes)"


def _rows(findings: Sequence[Finding]) -> Iterator[list[str]]:
    """The cells of each kernel, in the order of the changes."""
    for kernel, invariant in dict.fromkeys((f.kernel, f.invariant) for f in findings):
        cells = {f.change: mark(f) for f in findings if (f.kernel, f.invariant) == (kernel, invariant)}
        yield [f"{kernel}, invariant" if invariant else kernel, *(cells.get(change, "") for change in CHANGES)]


def table_of(findings: Sequence[Finding]) -> Table:
    """One line per kernel, and one with invariant=True; a column for each change."""
    shown = table("kernel", *CHANGES)
    for row in _rows(findings):
        shown.add_row(*row)
    return shown


def sentence(finding: Finding) -> str:
    """A difference as a sentence."""
    mode = " with invariant=True" if finding.invariant else ""
    state = f"{_BROKEN} " if finding.violated else ""
    return f"{state}{finding.kernel}{mode}, {finding.change}: {finding.detail}"


def write_page(path: Path, findings: Sequence[Finding], seed: int, device: Device) -> None:
    """Replaces the table between the two marks in the Markdown file `path`."""
    lines = ["| kernel |" + "".join(f" {change} |" for change in CHANGES), "| --- |" + " --- |" * len(CHANGES)]
    lines += [f"| `{name}` |" + "".join(f" {cell} |" for cell in cells) for name, *cells in _rows(findings)]
    where = "an " + driver.device(device[1]).name if device != HOST else "the CPU backend"
    body = "\n".join([*lines, "", f"{LEGEND}. Measured on {where}, seed {seed}."])
    head, rest = page_parts(path)
    path.write_text(f"{head}{body}\n{rest}")


def page_parts(path: Path) -> tuple[str, str]:
    """The text of a Markdown file before and after the table. Raises OSError; SpecError if it has no marks."""
    head, begin, rest = path.read_text().partition(_BEGIN)
    if _END not in rest:
        raise SpecError(f"{path} does not contain the lines {_BEGIN.strip()} and {_END}")
    return head + begin, rest[rest.index(_END) :]


_BEGIN, _END = "<!-- bits: written by python -m sandbox bits --page -->\n", "<!-- end of bits -->"
