"""Names the cause of a wrong result: which property of the problem the fault depends on, and which weights are wrong.

After a failure, a few small problems are run with the same tile configuration: whole tiles, one tile, a partial key or
query tile, several heads, other strides. The smallest problem that is still wrong is run with one-hot values, which
shows the attention weights that the kernel applies (see `weights`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import SandboxError
from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..cpu.launch import shuffled_threads
from ..launch.dlpack import HOST, Device
from ..reference import attention, errors
from . import trial, weights
from .cases import Array, Case, make_inputs
from .places import where_to_look
from .suite import suite_of
from .weights import Weights

_BUDGET_SECONDS = 2.0
_LONGEST = 512  # rows or keys of a probe
_SPECIAL_ROWS = 96  # the inputs "nan" and "inf" have their special values in rows before this one
_HEADS = r"h / group|/ group|kv_head|blockIdx\.[yz]|\bh\b.*\bb\b"
_SYNC = r"__syncthreads|wait|stage_of|acquire"
_STORE = r"O\.row|query_row >=|head\.Sq|LSE\["


class Probe(NamedTuple):
    """A small problem, and the property in which it differs from the simplest one: `condition` as text, `kind` as
    "heads", "strides", "inputs", or "" for others."""

    case: Case
    condition: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a wrong result, "" if none is known; the condition under which it occurs; where to look. `on`: the
    small problem that shows it, to which rows and keys refer."""

    cause: str = ""
    condition: str = ""
    places: tuple[str, ...] = ()
    on: str = ""

    def __str__(self) -> str:
        said = "; ".join(filter(None, (self.cause, self.condition)))
        said += f"; found on {self.on}" if said and self.on else ""
        look = f"; look at {', '.join(self.places)}" if self.places else ""
        return f"{said}{look}" if said else ""


def supported(kernel: Kernel, p: Problem) -> bool:
    """Whether a wrong result of this kernel can be examined: a forward of a dense batch without options."""
    return kernel.computes == "forward" and p.plain and p.Dv == p.D and not (p.ragged or p.page_size or p.float8)


def diagnose(kernel: Kernel, case: Case, device: Device, tile: Tile, *, fast: bool = False) -> Diagnosis:
    """The cause of a wrong result of `kernel` on a case, as far as it can be told within seconds. Runs the kernel."""
    if not supported(kernel, case.problem):
        return Diagnosis()
    examined = _Examined(kernel, device, tile, fast, time.perf_counter() + _BUDGET_SECONDS)
    try:
        with np.errstate(all="ignore"):
            return _diagnose(examined, case)
    except SandboxError:  # a probe cannot run: the result is reported without a cause
        return Diagnosis()


@dataclass(frozen=True)
class _Examined:
    kernel: Kernel
    device: Device
    tile: Tile
    fast: bool
    deadline: float

    @property
    def M(self) -> int:
        return self.tile.get("BLOCK_M", 64)

    @property
    def N(self) -> int:
        return self.tile.get("BLOCK_N", 64)

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def launch(self, problem: Problem, inputs: dict[str, Array], fill: int = 0xFF) -> dict[str, Array]:
        problem = suite_of(self.kernel).laid_out(problem, inputs)
        return trial.launch(self.kernel, self.tile, problem, inputs, self.device, fast=self.fast, fill=fill).outputs

    def wrong(self, case: Case) -> dict[str, Array] | None:
        """The outputs on a case if one of them is wrong."""
        expected = suite_of(self.kernel).reference(case)
        outputs = self.launch(case.problem, dict(expected.inputs))
        bad = any(
            (~(errors(outputs[n], x.values) <= x.bound)).any() for n, x in expected.outputs.items() if n in outputs
        )
        return outputs if bad else None

    def said(self, cause: str, condition: str, pattern: str) -> Diagnosis:
        return Diagnosis(cause, condition, where_to_look(self.kernel.source, pattern) if pattern and cause else ())


def _simplest(e: _Examined, p: Problem) -> Problem:
    """One head, whole tiles: at least two of queries and of keys, and Sq = Sk if the tile sizes allow it."""
    Sq = 2 * e.M
    Sk = max(2, -(-Sq // e.N)) * e.N
    return replace(p, B=1, H=1, Hk=1, Sq=min(Sq, _LONGEST), Sk=Sk)


def _variations(e: _Examined, case: Case, base: Problem) -> Iterator[Probe]:
    """Problems that differ from the simplest one in one property of the failing case, then that case with one head."""
    p = case.problem
    small: dict[str, Any] = {"Sq": e.M, "Sk": e.N}
    shapes: tuple[tuple[bool, dict[str, Any], str, str], ...] = (
        (
            p.Sk % e.N > 0 or p.Sk < base.Sk,
            {"Sk": base.Sk - e.N // 2 - 1},
            f"{_WHOLE} if the last key tile is partial",
            "",
        ),
        (p.Sq % e.M > 0, {"Sq": base.Sq - e.M // 2 - 1}, f"{_WHOLE} if the last query tile is partial", ""),
        (p.Sq != p.Sk, {"Sk": base.Sk + e.N}, f"{_WHOLE} with other lengths of queries and keys", ""),
        (p.Sq != p.Sk, {"Sq": 2 * base.Sq}, "correct with more keys than queries, wrong with fewer", ""),
        (p.H > 1, {**small, "H": 2, "Hk": 2}, "correct with one head, wrong with two", "heads"),
        (p.B > 1, {**small, "B": 2}, "correct with one batch entry, wrong with two", "heads"),
        (p.Hk < p.H, {**small, "H": 4, "Hk": 2}, "wrong only if query heads share key/value heads", "heads"),
    )
    for present, sizes, condition, kind in shapes:
        if present:
            yield Probe(Case("probe", replace(base, **sizes)), condition, kind)
    if case.layout != "bhsd":
        strided = replace(base, **small, H=2, Hk=2, B=min(p.B, 2))
        condition = "correct with contiguous tensors, wrong with other strides"
        yield Probe(Case("probe", strided, layout=case.layout), condition, "strides")
    kind = "" if case.inputs == "normal" else "inputs"
    if kind:
        condition = _INPUTS.get(case.inputs, f"wrong with inputs {case.inputs!r}")
        Sq, Sk = (max(n, -(-_SPECIAL_ROWS // tile) * tile) for n, tile in ((base.Sq, e.M), (base.Sk, e.N)))
        yield Probe(Case("probe", replace(base, Sq=Sq, Sk=Sk), inputs=case.inputs), condition, kind)
    if max(p.Sq, p.Sk) <= _LONGEST:
        own = replace(case, problem=replace(p, B=1, H=1, Hk=1), layout="bhsd")
        yield Probe(own, f"{_WHOLE} with {p.Sq} queries and {p.Sk} keys", kind)


_WHOLE = "correct with whole tiles, wrong"
_INPUTS = {
    "large": "correct with small scores, wrong with large ones",
    "raised": "correct with small scores, wrong with large ones",
    "rising": "wrong if every key tile raises the row maximum",
    "nan": "wrong with NaN in the inputs",
    "inf": "wrong with infinities in the inputs",
}


def _diagnose(e: _Examined, case: Case) -> Diagnosis:
    base = Probe(Case("probe", _simplest(e, case.problem)))
    outputs = e.wrong(base.case)
    if outputs and base.case.problem.causal:  # hidden keys show less of a fault that is not one of the mask
        plain = base._replace(case=replace(base.case, problem=replace(base.case.problem, causal=False)))
        if of_plain := e.wrong(plain.case):
            base, outputs = plain, of_plain
    if outputs is None:
        for probe in _variations(e, case, base.case.problem):
            if e.late:
                return Diagnosis()
            if (outputs := e.wrong(probe.case)) is not None:
                return replace(_explain(e, probe, outputs), on=str(probe.case.problem))
        return Diagnosis()
    condition = _condition_of_base(e, base.case.problem)
    return replace(_explain(e, base._replace(condition=condition), outputs), on=str(base.case.problem))


def _condition_of_base(e: _Examined, base: Problem) -> str:
    """Which simpler problem is correct, as text; "" if none is."""
    if e.wrong(Case("probe", replace(base, Sq=e.M, Sk=e.N, causal=False))) is None:
        if base.causal:  # else `_diagnose` would examine the problem without a mask
            return "correct without a causal mask"
        if e.wrong(Case("probe", replace(base, Sq=e.M, causal=False))) is not None:
            return "correct if a row has one key tile, wrong with two"
    return ""


def _explain(e: _Examined, probe: Probe, outputs: dict[str, Array]) -> Diagnosis:
    """The cause on the smallest wrong problem."""
    if missing := _unwritten(e, outputs, probe) or _race(e, outputs, probe):
        return missing
    finite = all(np.isfinite(x.astype(np.float64)).all() for x in outputs.values())
    if probe.kind == "inputs" and (probe.case.inputs in ("nan", "inf") or not finite):
        if probe.case.inputs in ("large", "raised"):
            return e.said(
                "exp overflows: the row maximum is not subtracted, or is not the maximum of all keys",
                probe.condition,
                weights.EXP,
            )
        return e.said(_not_finite_input(e, probe.case), probe.condition, weights.MASK)
    if probe.kind in ("heads", "strides"):
        said = _wrong_head(probe.case, outputs) or "the address of a batch entry, head or row"
        return e.said(said, probe.condition, _HEADS)
    if columns := _columns(probe.case, outputs):
        return e.said(columns, probe.condition, r"O\.row|mma_AB|O_smem|pack|column")
    if other := _wrong_tensor(probe.case, outputs):
        return e.said(other, probe.condition, r"K_map|V_map|Q_map|\bload|K_smem|V_smem")
    if e.late:
        return Diagnosis(condition=probe.condition)
    cause = weights.cause_of(_measure(e, probe.case))
    return e.said(cause.what, probe.condition, cause.lines) if cause else Diagnosis(condition=probe.condition)


def _unwritten(e: _Examined, outputs: dict[str, Array], probe: Probe) -> Diagnosis | None:
    """Elements that a launch leaves as they were: NaN or 0, whichever was there before."""
    if all(np.isfinite(x.astype(np.float64)).all() for x in outputs.values()):
        return None
    again = e.launch(probe.case.problem, dict(suite_of(e.kernel).reference(probe.case).inputs), fill=0)
    for name, x in outputs.items():
        untouched = np.isnan(x.astype(np.float64)) & (again[name] == 0)
        if not untouched.any():
            continue
        rows = np.unique(np.nonzero(untouched)[2])
        some = x.ndim == 4 and not untouched.any((0, 1, 2)).all()
        part = f", columns {_first_run(np.nonzero(untouched.any((0, 1, 2)))[0])}" if some else ""
        return e.said(
            f"{name} is not written in {len(rows)} of {x.shape[2]} rows: {_first_run(rows)}{part}",
            probe.condition,
            r"LSE\[" if name == "LSE" else _STORE,
        )
    return _read_too_early(e, probe)


def _read_too_early(e: _Examined, probe: Probe) -> Diagnosis | None:
    """NaN without any large score, from shared memory, which is NaN before it is written. An infinite LSE, such as that
    of a row sum of 0, has other causes."""
    problem = replace(probe.case.problem, causal=False)
    zeros = _zero_scores(replace(probe.case, problem=problem))
    if probe.kind in ("heads", "strides") or zeros is None:
        return None
    outputs = {name: x.astype(np.float64) for name, x in e.launch(problem, zeros).items()}
    lse, O = outputs.get("LSE"), outputs["O"]
    if lse is None or not np.isnan(O).any() or (np.isinf(lse).any() and not np.isnan(lse).any()):
        return None
    which = "Q or K" if np.isnan(lse).any() else "V or P"
    said = (
        f"{which} is read from shared memory before it is written, or from a stage that is never loaded (NaN even "
        "with K = 0): a missing barrier or wait, or the wrong stage"
    )
    return e.said(said, probe.condition, _SYNC)


def _race(e: _Examined, outputs: dict[str, Array], probe: Probe) -> Diagnosis | None:
    """On the CPU backend: results that depend on the order in which threads run."""
    if e.device != HOST:
        return None
    with shuffled_threads(1):
        again = e.launch(probe.case.problem, dict(suite_of(e.kernel).reference(probe.case).inputs))
    differ = next((name for name, x in outputs.items() if x.tobytes() != again[name].tobytes()), "")
    said = f"{differ} depends on the order of threads: a race, such as a missing barrier (sanitize shows the lines)"
    return e.said(said, probe.condition, _SYNC) if differ else None


def _not_finite_input(e: _Examined, case: Case) -> str:
    """Which tensor's NaN or infinity gives a wrong result."""
    p = case.problem
    special, finite = make_inputs(case), make_inputs(replace(case, inputs="normal"))
    for n, name in enumerate("QKV"):
        rows = np.nonzero(~np.isfinite(special[n].astype(np.float64)))[2]
        mixed = [special[i] if i == n else finite[i] for i in range(3)]
        expected, _ = attention(*mixed, causal=p.causal, scale=p.scale)
        got = e.launch(p, dict(zip("QKV", mixed, strict=True)))["O"].astype(np.float64)
        wrong = np.argwhere(
            errors(got, expected) > 0.02 * float(np.nanmax(abs(np.where(np.isfinite(expected), expected, 0))))
        )
        if rows.size and wrong.size:
            how = "does not reach" if np.isfinite(got[tuple(wrong[0])]) else "reaches"
            sees = "sees" if how == "does not reach" else "does not see"
            value = special[n][~np.isfinite(special[n])][0]
            return f"{value} in row {rows[0]} of {name} {how} row {wrong[0][2]} of O, which {sees} it"
    return "NaN or infinity reaches rows that do not see it, or does not reach rows that do"


def _zero_scores(case: Case) -> dict[str, Array] | None:
    """Inputs for which no score can overflow: K = 0. None if the inputs are not finite by design."""
    if case.inputs not in ("normal", "large", "raised", "rising"):
        return None
    q, k, v = make_inputs(replace(case, inputs="zero_k"))
    return {"Q": q, "K": k, "V": v}


def _first_run(rows: Array) -> str:
    end = next((i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1), len(rows))
    return f"{rows[0]} to {rows[end - 1]}{' and others' if end < len(rows) else ''}"


def _columns(case: Case, outputs: dict[str, Array]) -> str:
    """Columns of O that are wrong while others are correct, and which column's values they have."""
    expected, tolerance = _reference(case)
    got, ref = outputs["O"].astype(np.float64)[0, 0], expected[0, 0]
    error = errors(got, ref)
    wrong, right = (error > tolerance).mean(0) > 0.3, (error > tolerance / 4).mean(0) < 0.02
    if not wrong.any() or not np.isfinite(got).all():
        return ""
    moved = weights.matches(got.T, ref.T)
    c, count = int(np.nonzero(wrong)[0][0]), int(wrong.sum())
    if (moved >= 0).all() and moved[c] != c:
        return f"column {c} of O has the values of column {moved[c]} ({count} of {len(wrong)} columns are wrong)"
    if right.any() and (right | wrong).all():
        return f"only columns of O are wrong, the first is {c} ({count} of {len(wrong)}): P V or their store"
    return ""


def _wrong_tensor(case: Case, outputs: dict[str, Array]) -> str:
    """Which tensor is read in place of another."""
    p, inputs = case.problem, dict(zip("QKV", make_inputs(case), strict=True))
    if p.B * p.H > 1:
        return ""
    mixed = ("QKK", "QVV", "QVK", *(("QKQ", "QQV", "KKV") if p.Sq == p.Sk else ()))
    got, (_, tolerance) = outputs["O"].astype(np.float64), _reference(case)
    for names in mixed:
        guess, _ = attention(*(inputs[name] for name in names), causal=p.causal, scale=p.scale)
        if (errors(got, guess) <= tolerance).mean() > 0.98:
            wrong = [f"{name} is read as {own}" for own, name in zip("QKV", names, strict=True) if own != name]
            return f"another tensor is read: {' and '.join(wrong)}"
    return ""


def _reference(case: Case) -> tuple[Array, float]:
    """O of a plain case in float64, and the error above which an element counts as wrong."""
    q, k, v = make_inputs(case)
    p = case.problem
    out, _ = attention(q, k, v, causal=p.causal, scale=p.scale)
    return out, 0.02 * float(np.nanmax(abs(out)))


def _wrong_head(case: Case, outputs: dict[str, Array]) -> str:
    """Which head or batch entry of Q, K or V a wrong head reads."""
    p = case.problem
    q, k, v = (x.astype(np.float64) for x in make_inputs(case))
    out, tolerance = _reference(case)
    got = outputs["O"].astype(np.float64)

    def alike(b: int, h: int, of_q: tuple[int, int], of_k: tuple[int, int], of_v: tuple[int, int]) -> bool:
        Q, K, V = (x[b : b + 1, h : h + 1] for x, (b, h) in ((q, of_q), (k, of_k), (v, of_v)))
        guess, _ = attention(Q, K, V, causal=p.causal, scale=p.scale)
        return bool((errors(got[b, h], guess[0, 0]) <= tolerance).mean() > 0.95)

    for b, h in np.ndindex(p.B, p.H):
        if (errors(got[b, h], out[b, h]) <= tolerance).all():
            continue
        own = (b, h // p.group)
        others: list[Any] = [*np.ndindex(p.B, p.Hk)]
        for of_k, of_v in itertools.product(others, others):
            if (of_k, of_v) != (own, own) and alike(b, h, (b, h), of_k, of_v):
                which = "K and V" if of_k == of_v else "V" if of_k == own else "K"
                other = of_v if of_k == own else of_k
                return (
                    f"query head {h} of batch entry {b} reads {which} of key/value head {other[1]}, batch entry "
                    f"{other[0]}, instead of {own[1]}, {own[0]}"
                )
        for other in np.ndindex(p.B, p.H):
            if other != (b, h) and alike(b, h, other, own, own):
                return f"head {h} of batch entry {b} reads Q of head {other[1]}, batch entry {other[0]}"
            if other != (b, h) and (errors(got[b, h], out[other]) <= tolerance).mean() > 0.95:
                return f"O of head {h}, batch entry {b} is that of head {other[1]}, batch entry {other[0]}"
    return ""


def _measure(e: _Examined, case: Case) -> Weights:
    """The weights of a problem with one head: one launch for every D keys."""
    p = case.problem
    q, k, _ = make_inputs(case)
    got = np.zeros((p.Sq, p.Sk))
    for first in range(0, p.Sk, p.Dv):
        v = np.zeros((1, 1, p.Sk, p.Dv), q.dtype)
        count = min(p.Dv, p.Sk - first)
        v[0, 0, first + np.arange(count), np.arange(count)] = 1
        outputs = e.launch(p, {"Q": q, "K": k, "V": v})
        got[:, first : first + count] = outputs["O"].astype(np.float64)[0, 0, :, :count]
    Q, K = (x.astype(np.float64)[0, 0] for x in (q, k))
    expected, lse = attention(q, k, np.eye(p.Sk)[None, None], causal=p.causal, scale=p.scale)
    cut = [slice(c, c + 16) for c in range(0, p.D, 16)]
    parts = np.zeros((len(cut), len(cut), p.Sq, p.Sk))
    for (x, c), (y, d) in itertools.product(enumerate(cut), enumerate(cut)):
        if Q[:, c].shape == Q[:, d].shape:
            parts[x, y] = Q[:, c] @ K[:, d].T * p.scale
    scores = Q @ K.T * p.scale
    i, j = np.arange(p.Sq)[:, None], np.arange(p.Sk)[None]
    seen = (j <= i + p.diagonal) if p.causal else np.ones((p.Sq, p.Sk), bool)
    written = outputs["LSE"].astype(np.float64)[0, 0] if "LSE" in outputs else lse[0, 0]
    return Weights(got, expected[0, 0], written, lse[0, 0], scores, parts, seen, e.M, e.N, Q * p.scale, K)
