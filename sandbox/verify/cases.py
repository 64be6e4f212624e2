"""Test cases: realistic problems for `run`, a sweep for `check`, and inputs that each isolate one kind of fault."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import SpecError
from ..core.kernel import Kernel
from ..core.options import BY_ARGUMENT
from ..core.problem import Problem
from ..launch.dlpack import numpy_dtype
from .pages import in_pages, paged_problems
from .scores import fill_hidden_with_nan, option_cases, score_inputs
from .sequences import by_sequence, forward, offsets_of, ragged_problems

Array = NDArray[Any]
Inputs = tuple[Array, Array, Array]


GIVEN = "given"  # the name of the case that --shape describes


@dataclass(frozen=True)
class Case:
    """A problem, with the kind of its inputs (`INPUTS`) and their memory layout (`LAYOUTS`)."""

    name: str
    problem: Problem
    inputs: str = "normal"
    layout: str = "bhsd"

    @property
    def described(self) -> str:
        """Its name in a sentence; for the case of --shape, the problem."""
        return str(self.problem) if self.name == GIVEN else self.name


def named_cases(small: bool) -> list[Case]:
    """Realistic problems in fp32, fp16 and bf16. `small`: fewer heads and half the context, for the CPU backend."""
    heads = (lambda H: max(1, H // 6)) if small else (lambda H: H)
    S = 512 if small else 1024
    gpt2 = Problem(1, heads(12), S, S, 64, dtype="float16")  # GPT-2 small, one sequence of its full context
    causal = dataclasses.replace(gpt2, causal="bottom-right")
    cross = Problem(2, heads(8), 1000, 77, 40)  # cross-attention: image positions attend to 77 text tokens
    grouped = Problem(2, heads(12), 512, 512, 128, Hk=heads(12) // 2, dtype="bfloat16", causal="bottom-right")
    return [
        Case("gpt2", gpt2),
        Case("causal", causal),
        Case("cross", cross),
        Case("groups", grouped, layout="bshd"),
    ]


def latent_cases(small: bool) -> list[Case]:
    """Decoding with latent attention, of contiguous keys, and of two tokens with keys in pages."""
    B, H, Sk = (2, 16, 320) if small else (16, 128, 4096)
    one = Problem(B, H, 1, Sk, 576, Hk=1, Dv=512, dtype="bfloat16", latent=True)
    two = dataclasses.replace(one, Sq=2, causal="bottom-right", page_size=64)
    return [Case("latent", one), Case("pages", two)]


# H, Hk. Only if Hk is neither 1 nor H, h % Hk and h are wrong in place of h // group.
_HEADS = ((1, 1), (4, 2), (1, 1), (2, 1), (1, 1))
_LENGTHS = ((1, 1), (2, 5), (5, 2), (17, 17), (77, 97), (97, 77), (113, 128), (1, 203), (203, 1), (5, 0), (0, 5))
_LONG = ((1023, 1024), (1024, 203))  # many tiles; with one head and also a small D, for the CPU backend
_WIDTHS = (64, 16, 40, 128, 32, 72, 96, 160, 256, 7)


def sweep_cases(kernel: Kernel) -> Iterator[Case]:
    """Every length pair x mask x dtype that `kernel` supports, cycling through head dimensions, groups and layouts, and
    all isolating cases. A few hundred cases, each small enough for the CPU backend."""
    tile = kernel.tiles[0]
    M, N = tile.get("BLOCK_M", 64), tile.get("BLOCK_N", 64)
    lengths = (*_LENGTHS, (M - 1, N + 1), (M + 1, N - 1), (2 * M, 2 * N + 1), *_LONG)
    masks = (False, "bottom-right", "top-left")
    layouts, heads = itertools.cycle(LAYOUTS), itertools.cycle(_HEADS)
    for dtype in kernel.dtypes:
        ones = {D: kernel.adapted(Problem(1, 1, 1, 1, D, dtype=dtype)) for D in _WIDTHS}
        taken = [D for D, problem in ones.items() if kernel.why_unsupported(problem) is None]
        widths, narrow = itertools.cycle(taken), itertools.cycle([D for D in taken if D <= 64] or taken)
        for (Sq, Sk), causal in itertools.product(lengths if taken else (), masks):
            long, layout = (Sq, Sk) in _LONG, next(layouts)
            B, (H, Hk) = (1, (1, 1)) if long else (2, next(heads))
            for D in (next(widths), next(narrow))[: 1 + long]:
                problem = Problem(B, H, Sq, Sk, D, Hk=Hk, dtype=dtype, causal=causal)  # type: ignore[arg-type]
                problem = kernel.adapted(problem)
                yield Case(f"{problem} {layout}", problem, layout=layout)
        yield from isolating_cases(kernel, dtype)
    variants = itertools.cycle(zip(LAYOUTS, ("normal", "hidden", "hidden", "large", "hidden"), strict=True))
    sizes = itertools.cycle(((77, 97), (M + 5, N + 13), (113, 65), (40, 2 * N + 3)))

    def problem_of(**fields: Any) -> Problem:
        return kernel.adapted(Problem(2, 4, *next(sizes), 64 if kernel.max_D >= 64 else kernel.max_D, Hk=2, **fields))

    for name, problem in option_cases(kernel, problem_of):
        layout, inputs = next(variants)
        if kernel.why_unsupported(problem) is None:
            yield Case(f"{name}: {problem} {layout} {inputs}", problem, inputs, layout)
    yield from ragged_cases(kernel)
    yield from (Case(*named) for named in paged_problems(kernel, options=100))


def ragged_cases(kernel: Kernel) -> Iterator[Case]:
    """Ragged batches, without options and with each option."""
    for name, problem, layout in ragged_problems(kernel):
        yield Case(name, problem, layout=layout)


def isolating_cases(kernel: Kernel, dtype: str) -> Iterator[Case]:
    """Every kind of inputs, and lengths at which an off-by-one error of the mask changes the result."""
    M, N = (kernel.tiles[0].get(name, 64) for name in ("BLOCK_M", "BLOCK_N"))
    grouped: dict[str, Any] = {"H": 4, "Hk": 2}
    # "hidden" needs more than a causal mask: here every key is visible to some row.
    variants = [(inputs, grouped if inputs in _NOT_FINITE else {}) for inputs in INPUTS if inputs != "hidden"]
    # Without a mask: NaN and inf behind a mask may start a kernel's non-finite fallback, which hides their cause.
    variants += [(inputs, {"Sk": 2 * N + 1, "causal": False}) for inputs in ("large", "rising")]
    variants += [("minus_inf", {"causal": False}), ("inf_value", {"causal": "top-left"})]
    variants += [("large", {"Sq": 64, "Sk": 1, "causal": False})]  # unmasked, exp(0 - LSE) of a padding key is inf
    # Sk - Sq is 2 less than a multiple of a tile: the last key of a tile is the first that is hidden from a row.
    variants += [("normal", {"Sq": M + 72, "Sk": M + N + 70, "H": 1})]
    variants += [("normal", {"Sq": 2 * N, "Sk": 2 * N + 1, "Hk": 1})]  # m_block range starts late; several heads
    for inputs, numbers in variants:
        usual: dict[str, Any] = {"B": 1, "H": 2, "Sq": 77, "Sk": 97, "D": 64, "causal": "bottom-right"}
        problem = kernel.adapted(Problem(**{**usual, **numbers}, dtype=dtype))
        if kernel.why_unsupported(problem) is None:
            yield Case(f"{problem} {inputs}", problem, inputs)


# ---- inputs: each isolates one kind of fault


def _normal(q: Array, k: Array, v: Array) -> None:
    """Standard normal, unchanged."""


def _ones_v(q: Array, k: Array, v: Array) -> None:
    """V = 1: O must be 1. Isolates normalisation."""
    v[:] = 1


def _zero_k(q: Array, k: Array, v: Array) -> None:
    """K = 0: O is the mean of the visible V."""
    k[:] = 0


def _ramp_v(q: Array, k: Array, v: Array) -> None:
    """V[:, d] = d: O[:, d] = d. Isolates the order of columns."""
    v[:] = np.arange(v.shape[3])


def _identity(q: Array, k: Array, v: Array) -> None:
    """Q and K multiples of the identity: row i attends to key i. Isolates orientation."""
    for x in (q, k):
        x[:] = 0
        rows = np.arange(x.shape[2])
        x[:, :, rows, rows % x.shape[3]] = 4


def _integers(q: Array, k: Array, v: Array) -> None:
    """Small integers: all products and sums of the scores are exact."""
    for x in (q, k, v):
        np.clip(np.rint(x), -2, 2, out=x)


def _offset(q: Array, k: Array, v: Array) -> None:
    """+0.5: no result is near 0, so that relative errors are meaningful."""
    for x in (q, k, v):
        np.add(x, 0.5, out=x)


def _large(q: Array, k: Array, v: Array) -> None:
    """q x 5, k and v x 3: scores up to 60. P has a few large elements in each row."""
    q *= 5
    k *= 3
    v *= 3


def _raised(q: Array, k: Array, v: Array) -> None:
    """All scores are raised by 900 / sqrt(D), which changes no result: exp without subtraction of the maximum
    overflows."""
    q[..., 0] = k[..., 0] = 30


def _rising(q: Array, k: Array, v: Array) -> None:
    """Scores grow with the key index: every tile raises the row maximum and rescales O."""
    q[:] = 1
    k[:] = np.linspace(-4, 4, k.shape[2])[:, None]


def _nan(q: Array, k: Array, v: Array) -> None:
    """NaN in one row of each tensor: it must reach exactly the rows that see it."""
    q[:, :, 3] = np.nan
    k[:, :, 60, 5] = np.nan
    v[:, :, 80] = np.nan


def _dlse(q: Array, k: Array, v: Array) -> None:
    """For a backward: LSE has a gradient too, generated by `inputs_of`."""


def _hidden(q: Array, k: Array, v: Array) -> None:
    """NaN in all elements that masks hide. They depend on the options: `inputs_of` writes them."""


def _nan_query(q: Array, k: Array, v: Array) -> None:
    """NaN in query 3 and in a row of dO: most of dK and dV must stay finite and correct."""
    q[:, :, 3] = np.nan


def _inf(q: Array, k: Array, v: Array) -> None:
    """inf in one key and in one value, as `_nan`."""
    k[:, :, 50, 0] = np.inf
    v[:, :, 90] = -np.inf


def _inf_value(q: Array, k: Array, v: Array) -> None:
    """inf in one value: of dK and dV it reaches only dK; keys that no query sees must stay unaffected."""
    v[:, :, 60] = np.inf


def _minus_inf(q: Array, k: Array, v: Array) -> None:
    """Every score is -inf: O is 0, as without visible keys."""
    q[..., 0] = 1
    k[..., 0] = -np.inf


INPUTS: dict[str, Callable[[Array, Array, Array], None]] = {
    "normal": _normal,
    "ones_v": _ones_v,
    "zero_k": _zero_k,
    "ramp_v": _ramp_v,
    "identity": _identity,
    "integers": _integers,
    "offset": _offset,
    "large": _large,
    "raised": _raised,
    "rising": _rising,
    "nan": _nan,
    "nan_query": _nan_query,
    "inf": _inf,
    "dlse": _dlse,
    "hidden": _hidden,
    "inf_value": _inf_value,
    "minus_inf": _minus_inf,
}
_NOT_FINITE = ("nan", "nan_query", "inf")  # dO then has NaN or inf, too


# ---- layouts: memory layouts of a (B, H, S, D) tensor


def _bhsd(x: Array) -> Array:
    return x


def _bshd(x: Array) -> Array:
    """A transposed view of a (B, S, H, D) tensor."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def _offset_view(x: Array) -> Array:
    """A slice of a larger tensor of NaN. Rows start at multiples of 16 bytes if D allows it."""
    B, H, S, D = x.shape
    first = 16 if x.itemsize == 1 else 8
    around = np.full((B, H + 1, S + 3, D + 2 * first), np.nan, x.dtype)
    view = around[:, 1:, 2 : 2 + S, first : first + D]
    view[:] = x
    return view


def _unaligned(x: Array) -> Array:
    """As "offset", but with unaligned rows."""
    B, H, S, D = x.shape
    view = np.full((B, H, S + 1, D + 5), np.nan, x.dtype)[:, :, 1:, 3 : 3 + D]
    view[:] = x
    return view


def _broadcast(x: Array) -> Array:
    """One batch entry, broadcast B times with stride 0."""
    return np.broadcast_to(x[:1], x.shape)


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "bhsd": _bhsd,
    "bshd": _bshd,
    "offset": _offset_view,
    "unaligned": _unaligned,
    "broadcast": _broadcast,
}


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """q, k, v of a case as NumPy arrays of its dtype and layout, from a seeded generator."""
    if case.inputs not in INPUTS or case.layout not in LAYOUTS:
        raise SpecError(
            f"inputs={case.inputs!r}, layout={case.layout!r} are not supported: choose inputs from "
            f"{', '.join(INPUTS)}, and a layout from {', '.join(LAYOUTS)}"
        )
    p = case.problem
    rng = np.random.default_rng(seed)
    (queries, keys), entries = p.rows, p.B if p.page_size else p.batches
    shapes = ((p.batches, p.H, queries, p.D), (entries, p.Hk, keys, p.D), (entries, p.Hk, keys, p.Dv))
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    if p.latent:
        v = k[..., : p.Dv]
    INPUTS[case.inputs](q, k, v)
    lay_out = LAYOUTS[case.layout]
    dtypes = (numpy_dtype(p.dtype_of(name)) for name in "QKV")
    return tuple(lay_out(x.astype(dtype)) for x, dtype in zip((q, k, v), dtypes, strict=True))  # type: ignore[return-value]


def inputs_of(computes: str, case: Case) -> dict[str, Array]:
    """Inputs of a case for kernels that compute `computes`, by the names in a spec's `args`: Q, K, V, the tensors of
    the options, and what only a backward needs.

    A backward needs a standard normal dO (with NaN or inf in one row if the case has such inputs), and O and LSE. The
    latter come from the reference, rounded, so that errors of a forward kernel have no influence. dO and O have the
    case's dtype and layout.
    """
    p, lay_out = case.problem, LAYOUTS[case.layout]
    inputs = dict(zip(("Q", "K", "V"), make_inputs(case), strict=True)) | score_inputs(p)
    inputs |= offsets_of(p) if p.ragged else {}
    if case.inputs == "hidden":
        fill_hidden_with_nan(p, inputs)
    padded = [name for name, array in BY_ARGUMENT.items() if array.broadcast and name in inputs]
    inputs |= {name: lay_out(inputs[name]) for name in ("K", "V", *padded) if not p.plain}
    inputs |= in_pages(p, inputs) if p.page_size else {}
    if computes in ("forward", "block_map"):
        return inputs
    dout = np.random.default_rng(1).standard_normal((p.batches, p.H, p.rows[0], p.Dv), np.float32)
    if case.inputs in _NOT_FINITE:
        dout[:, :, 7] = np.inf if case.inputs == "inf" else np.nan
    with np.errstate(over="ignore"):
        exact = by_sequence(p, inputs, forward)
        dO, O = (x.astype(numpy_dtype(p.dtype)) for x in (dout, exact["O"]))
        found = {**inputs, "dO": lay_out(dO), "O": lay_out(O), "LSE": exact["LSE"].astype(np.float32)}
    if found["O"].tobytes() != O.tobytes():  # the broadcast layout, with options that differ between batch entries
        found["O"] = O
    if case.inputs == "dlse":
        found["dLSE"] = np.random.default_rng(2).standard_normal(found["LSE"].shape, np.float32)
    return found
