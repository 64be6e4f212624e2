"""The keyword arguments of the public functions, and the one `Options` object that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ..core.errors import SpecError, UnsupportedProblem
from ..core.normalise import integer, number
from ..core.options import ARRAYS, OPTIONS
from ..core.score import Score
from ..launch.dlpack import library_of, not_an_array

if TYPE_CHECKING:
    from ..core.kernel import Kernel
    from ..core.tile import Tile


class _Keywords(TypedDict, total=False):
    """The keyword arguments that every function of attention.py takes, in addition to causal and scale. Their
    description is that of `ForwardKeywords`.

    causal and scale are ordinary parameters: many calls pass nothing else, and a dict for them takes 0.3 µs."""

    window: tuple[int | None, int | None] | None
    softcap: float
    alibi: Any
    bias: Any
    mask: Any
    sink: Any
    score: Score | None
    dropout: float
    seed: Any
    invariant: bool
    kernel: str | Kernel | None
    tile: Tile | str | Mapping[str, int] | None
    backend: str | None


class BackwardKeywords(_Keywords, total=False):
    """The keyword arguments that `attention_backward` takes as `**options`."""

    key_lengths: Any


class PagedKeywords(_Keywords, total=False):
    """The keyword arguments that `attention_paged` takes as `**options`."""

    descale: tuple[Any, Any, Any] | None
    out_dtype: Any


class ForwardKeywords(BackwardKeywords, PagedKeywords, total=False):
    """The options of `attention`, `attention_forward` and `attention_varlen`, in addition to causal and scale. diagonal
    is Sk - Sq, or 0 with causal="top-left". Arrays are of q's library, on q's device, with any strides.

    Score options are off by default. The first four are applied in this order to x = scale * q . k.
    softcap: x becomes softcap * tanh(x / softcap). alibi: slopes, (H,) or (B, H) float32; slope * |i + diagonal - j|
    is subtracted. bias: broadcastable to (B, H, Sq, Sk), float32 or out's dtype; added. score: a `sandbox.Score`, the
    user's own expressions. window: (left, right); query i attends to keys i + diagonal - left to i + diagonal + right,
    both included; None: no bound. mask: bool, broadcastable to (B, H, Sq, Sk); False hides. sink: (H,) float32;
    exp(sink[h]) is added to the sum of a row. key_lengths: (B,) int32; the number of valid keys per batch entry,
    clamped to 0 … Sk. Causal, diagonal and `score` then use key_lengths[b] as Sk: with causal=True the last query
    attends to the last valid key.
    dropout: the probability that an element of the softmax result is dropped, with a resolution of 2^-16; the others
    are divided by 1 - dropout. seed: determines which elements are dropped (`sandbox.reference.dropout_keep`): an int,
    or an int64 array of one element, which the kernel reads; None draws a seed from the library's own generator.

    descale: required if k is float8: the factors by which q, k and v are multiplied. Each is a positive number, or a
    float32 array >= 0 that broadcasts to (B, heads). If q is float8, fwd_mma_fp8 multiplies P by the largest number of
    v's dtype and rounds it to that dtype (fwd_wgmma_fp8: by 1/16 or 1/32 of this number, so that P can grow with a
    higher score before a row is rescaled); fwd_decode rounds P to float16; fwd_minimal and fwd_block2d keep it in
    float32. out_dtype: bfloat16 (the default), float16 or float32. With q in float16 or bfloat16, k and v are converted
    (exactly) to 16 bits (fwd_minimal, fwd_block2d: to float32), and out has q's dtype.

    invariant: the bits of a row of out and lse depend only on its q, its keys and the options. They do not depend on
    the rest of the batch, on whether the row is decoded or part of a prefill or of a chunk, or on whether its keys are
    dense, ragged or in pages. They are equal on GPUs of one compute capability, with one version of this package and
    of NVRTC (docs/bits.md). With dropout, out also depends on the indices of the row. With q in float8 no kernel with
    tensor cores supports `invariant`.

    kernel: a name from `python -m sandbox list`; by default the one that measurements on an H200 favour
    (docs/limits.md; `python -m sandbox list --shape …` shows the choice). tile: a Tile, {"BLOCK_M": 64, ...} or
    "BLOCK_M=64,...". backend: "cuda" or "cpu"; by default that of the arrays.
    """


FORWARD, BACKWARD, PAGED = (
    frozenset((*keywords.__annotations__, "causal", "scale"))
    for keywords in (ForwardKeywords, BackwardKeywords, PagedKeywords)
)
_PASSED_THROUGH = frozenset(("kernel", "tile", "backend"))  # stored in `Options` as they are passed
_VALIDATORS = {option.name: option.check for option in OPTIONS if option.check}
FIELD_OPTIONS = tuple(_VALIDATORS)  # fields of `Options` that become fields of `Problem` as they are
# Arrays whose last two dimensions, in a ragged batch, are max_seqlen_q and max_seqlen_k (or 1).
_BIAS_AND_MASK = frozenset(name for name, array in ARRAYS.items() if array.broadcast)
DIFFERENTIABLE = tuple(option.name for option in OPTIONS if option.gradient)
DESCALE = ("descale_q", "descale_k", "descale_v")  # names of the elements of `descale`, if they are arrays
# The arrays of a ragged batch, after those of the options. With paged keys there is only cu_seqlens_q.
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")
BLOCK_TABLE = "block_table"  # of a paged batch: the last array


class Options(NamedTuple):
    """What a call computes and how, without its arrays. Part of the key of a plan: `dispatch` makes it hashable, by
    converting a tile that is a dict and a scale that is an array.

    Construct and copy it by keyword only (`Options(causal=True)`, `replace(options, …)`), read it by field. The fields
    that `basic_options` sets come first.
    """

    causal: Any = False
    scale: float | None = None
    kernel: Any = None
    tile: Any = None
    backend: str | None = None
    deterministic: bool = False
    window: Any = None
    softcap: float = 0.0
    score: Score | None = None  # without its tensors
    dropout: float = 0.0
    invariant: bool = False
    descale: tuple[float | None, ...] = ()  # of q, k, v: a number, or None for an array
    out_dtype: str = ""  # "": the default
    # None: the batch is not ragged. Else (max_seqlen_q, max_seqlen_k), each None if it was not passed or is not needed.
    max_seqlen: tuple[int | None, int | None] | None = None
    array_names: tuple[str, ...] = ()  # names of the arrays that follow q, k, v or dout, q, k, v, out, lse
    gradients: tuple[str, ...] = ()  # results of a backward in addition to dq, dk, dv: "dbias", "dsink"

    @property
    def has_more(self) -> bool:
        """Whether any field after `deterministic` is not the default."""
        return self[6:] != _DEFAULT_REST


DEFAULT = Options()
_CAUSAL = Options(causal=True)  # the options of many calls
_AFTER_SCALE = DEFAULT[2:]
_DEFAULT_REST = DEFAULT[6:]
_DEFAULTS: dict[str, Any] = DEFAULT._asdict()
_NUMBERS = frozenset(name for name, value in _DEFAULTS.items() if type(value) is float)
_new = tuple.__new__


def replace(options: Options, **changes: Any) -> Options:
    """A copy with other fields. `Options._replace` returns an empty object under PyTorch 2.11's compiler."""
    return Options(**(dict(zip(Options._fields, options, strict=True)) | changes))


def plain_options(causal: Any, scale: Any) -> Options:
    """`Options` of these fields alone."""
    if scale is None:
        if causal is True:
            return _CAUSAL
        if causal is False:
            return DEFAULT
    elif type(scale) is not float:
        scale = _as_float(scale)
    return _new(Options, (causal, scale) + _AFTER_SCALE)  # noqa: RUF005  # faster


def basic_options(
    causal: Any = False, scale: Any = None, kernel: Any = None, tile: Any = None, backend: Any = None,
    deterministic: bool = False,
) -> Options:  # fmt: skip
    """`Options` of these fields alone, in half the time of its constructor: for calls without keywords other than
    kernel, tile and backend."""
    return _new(Options, (causal, scale, kernel, tile, backend, deterministic) + _DEFAULT_REST)  # noqa: RUF005  # faster


def backward_options(options: Options, deterministic: bool) -> Options:
    """The options of the backward of a forward call: the same problem, with the default kernel and tile."""
    return _new(
        Options,
        (options.causal, options.scale, None, None, options.backend, deterministic) + options[6:],  # noqa: RUF005
    )


def collect(
    function: str, q: Any, causal: Any, scale: Any, keywords: Mapping[str, Any], known: frozenset[str] = FORWARD
) -> tuple[Options, tuple[Any, ...]]:
    """(options, the arrays that `options.array_names` names) of the keyword arguments of a public function.

    With dropout, a seed that is not an array becomes an array of q's library, on q's device; a seed of None is drawn
    there. Raises TypeError for a keyword argument that `function` does not have.
    """
    if scale is not None and type(scale) is not float:
        scale = _as_float(scale)
    if _PASSED_THROUGH.issuperset(keywords):
        return basic_options(causal, scale, **keywords), ()
    fields = _DEFAULTS | {"causal": causal, "scale": scale}
    arrays: dict[str, Any] = {}
    for name, value in keywords.items():
        if name not in known:
            raise TypeError(_unknown_keyword(function, name, known))
        if value is None:
            continue
        if name in ARRAYS:
            arrays[name] = value
        elif name in _NUMBERS and type(value) is float:
            fields[name] = value  # checked later, as a field of Problem
        elif name in _VALIDATORS:
            fields[name] = _value(name, value)
        elif name in _PASSED_THROUGH:
            fields[name] = value
        elif name == "out_dtype":
            fields[name] = _out_dtype(value)
    if "seed" in arrays or fields["dropout"]:
        arrays = _with_seed(q, arrays, fields["dropout"])
    if len(arrays) > 1:
        arrays = {name: arrays[name] for name in ARRAYS if name in arrays}
    if (score := fields["score"]) is not None:
        arrays |= score.arrays
        fields["score"] = score.described
    if keywords.get("descale") is not None:
        fields["descale"], tensors = _descale(keywords["descale"])
        arrays |= tensors
    fields["array_names"] = tuple(arrays)
    return _new(Options, fields.values()), tuple(arrays.values())  # in half the time of the constructor


def tile_in_key(tile: Any) -> Any:
    """`tile` as part of a plan's key: a dict, or another mapping, as a Tile, which is hashable."""
    if not isinstance(tile, Mapping):
        return tile
    from ..core.tile import Tile

    return tile if isinstance(tile, Tile) else Tile(**tile)


def check_dimensions(name: str, x: Any, layout: str) -> None:
    """Raises UnsupportedProblem unless `x` is an array with as many dimensions as `layout`, such as "(rows, D)"."""
    if not hasattr(x, "dtype"):
        raise not_an_array(name, x)
    if len(x.shape) != layout.rstrip(",)").count(",") + 1:
        raise UnsupportedProblem(f"{name} has shape {tuple(x.shape)}: it must be {layout}")


def check_int32(name: str, x: Any) -> None:
    """Raises UnsupportedProblem unless `x` is an int32 array."""
    if not hasattr(x, "dtype"):
        raise not_an_array(name, x)
    if (dtype := str(x.dtype).rpartition(".")[2]) != "int32":
        raise UnsupportedProblem(f"{name} is {dtype}: it must be int32")


def check_keywords(function: str, keywords: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises TypeError for a keyword argument that `function` does not have."""
    for name in keywords:
        if name not in known:
            raise TypeError(_unknown_keyword(function, name, known))


def _unknown_keyword(function: str, name: str, known: frozenset[str]) -> str:
    import difflib  # 2 ms

    known |= _OWN_KEYWORDS.get(function, frozenset())
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]}?" if close else f"the options are {', '.join(sorted(known))}"
    if name in _COUNTERPARTS:
        hint = f"use {_COUNTERPARTS[name]}"
    return f"{function}() got an unexpected keyword argument {name!r}: {hint}"


_OWN_KEYWORDS = {  # parameters of a public function that are no options
    "attention": frozenset(("return_lse",)), "attention_backward": frozenset(("deterministic",)),
    "attention_varlen": frozenset(("cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "return_lse")),
    "attention_paged": frozenset(("cu_seqlens_q", "max_seqlen_q", "return_lse")),
}  # fmt: skip

_COUNTERPARTS = {  # of keyword arguments of FlashAttention, PyTorch and our other functions
    "softmax_scale": "scale", "sm_scale": "scale", "is_causal": "causal", "attn_mask": "mask, or bias if it is added",
    "dropout_p": "dropout", "window_size": "window=(left, right), where None is no bound", "alibi_slopes": "alibi",
    "seqused_k": "key_lengths", "cache_seqlens": "key_lengths", "learnable_sink": "sink", "s_aux": "sink",
    "score_mod": "score=sandbox.Score(…)", "mask_mod": "score=sandbox.Score(mask=…)",
    "block_mask": "score=sandbox.Score(mask=…), with its block map by Score.with_blocks",
    "page_table": "attention_paged, which takes block_table", "block_table": "attention_paged, which takes it",
    "cu_seqlens_q": "attention_varlen, which takes it",
    "cu_seqlens_k": "attention_varlen, which takes it; with pages key_lengths",
    "max_seqlen_q": "attention_varlen, which takes it",
    "max_seqlen_k": "attention_varlen, which takes it; with pages it follows from block_table",
    "enable_gqa": "k and v with fewer heads than q: no option is needed",
    "deterministic": "attention_backward, which takes it; with autograd torch.use_deterministic_algorithms(True)",
    "descale": "q, k and v in float16 or bfloat16: float8 has no gradient",  # only attention_backward does not take it
    "return_lse": "attention, which takes it; attention_forward always returns lse",
}  # fmt: skip


# ---- normalisation of each option


def constant(name: str, value: Any) -> float:
    """`value` as a float, so that a plan depends on the number and not on the array that contains it. Raises SpecError
    for a value that is not a number, UnsupportedProblem for a tensor whose derivative would be lost."""
    if type(value) is float:
        return value  # checked later, as a field of Problem
    if hasattr(value, "requires_grad") and library_of(value).differentiates(value):
        raise UnsupportedProblem(no_derivative(name))
    return number(name, value)


def _as_float(scale: Any) -> Any:
    """An int or a NumPy number as a float, with which `dispatch.known` can find a plan. An array stays as it is:
    reading it may wait for a GPU."""
    return number("scale", scale) if isinstance(scale, Real) else scale


def _value(name: str, value: Any) -> Any:
    if hasattr(value, "requires_grad") and library_of(value).differentiates(value):
        raise UnsupportedProblem(no_derivative(name))
    return _VALIDATORS[name](name, value)


def _out_dtype(dtype: Any) -> str:
    name = getattr(dtype, "__name__", None) or str(dtype)
    return name.rpartition(".")[2]


def _with_seed(q: Any, arrays: dict[str, Any], dropout: float) -> dict[str, Any]:
    seed = arrays.pop("seed", None)
    if not dropout:
        if seed is not None and not hasattr(seed, "__dlpack__"):
            _within_64_bits(seed)  # raises
        return arrays
    if not hasattr(seed, "__dlpack__"):
        seed = library_of(q).seed(q, None if seed is None else _within_64_bits(seed))
    return arrays | {"seed": seed}


def _within_64_bits(seed: Any) -> int:
    """`seed` modulo 2^64, as a signed number. Raises SpecError for a value that is not an integer."""
    try:
        seed = index(seed)
    except TypeError:
        raise SpecError(f"seed={seed!r} must be an integer, or an int64 array of one element") from None
    return seed if -(2**63) <= seed < 2**63 else (seed + 2**63) % 2**64 - 2**63


def _descale(descale: Any) -> tuple[tuple[float | None, ...], dict[str, Any]]:
    """(for each of q, k, v its number, or None if it is an array; the arrays by name). Raises SpecError."""
    if not isinstance(descale, Sequence) or len(descale) != 3:
        raise SpecError(f"descale={descale!r} must have three elements: the factors of q, k and v")
    tensors = {name: x for name, x in zip(DESCALE, descale, strict=True) if hasattr(x, "__dlpack__")}
    numbers = (None if name in tensors else number(name, x) for name, x in zip(DESCALE, descale, strict=True))
    return tuple(numbers), tensors


# ---- options without a gradient


def no_derivative(name: str) -> str:
    """The message for an option, or an array of `Options.array_names`, that requires a gradient and has none."""
    tensor = name.removeprefix("score.")
    what = name if name == tensor else f"score's tensor {tensor}"
    other = _ALTERNATIVES.get(name if name == tensor else "score")
    return (
        f"{what} is a tensor that requires a gradient, and attention has no gradient for it: "
        f"pass {tensor}.detach(){f', or {other}' if other else ''}"
    )


_ALTERNATIVES = {  # other ways to compute the same scores, with a gradient
    "scale": "multiply q by it and pass scale=1.0",
    "alibi": "bias=-slopes[:, None, None] * abs(i + diagonal - j) instead, which has a gradient; diagonal is Sk - Sq, "
    'with key_lengths key_lengths[b] - Sq, with causal="top-left" 0',
    "score": "compute what the score adds, and pass it as bias=, such as bias=table[:, bucket]",
}


def constants(options: Options, arrays: Sequence[Any]) -> list[tuple[str, Any]]:
    """(name, array) of each array after q, k, v for which attention computes no gradient. Arrays of libraries without
    autograd, such as NumPy, are left out."""
    more = zip(options.array_names, arrays[3:], strict=True)
    return [(name, x) for name, x in more if name not in DIFFERENTIABLE and hasattr(x, "requires_grad")]


# ---- options of a ragged batch, a paged batch and a backward, made from those of a dense forward


def ragged(
    options: Options, arrays: tuple[Any, ...], cu_seqlens: tuple[Any, ...], max_seqlen: tuple[int | None, int | None]
) -> tuple[Options, tuple[Any, ...]]:
    """`options` and `arrays`, with the cu_seqlens of a ragged batch: of q and k, or of q alone with pages. `max_seqlen`
    is kept only with a bias or a mask, whose last two dimensions it gives: otherwise calls that differ only in
    `max_seqlen` would need different plans. Raises SpecError for a negative int, and with a bias or a mask for any
    value that is not an integer >= 0."""
    for which, n in zip("qk", max_seqlen, strict=True):
        if type(n) is int and n < 0:
            integer(f"max_seqlen_{which}", n, 0)  # raises
    kept: tuple[int | None, int | None] = None, None
    if not _BIAS_AND_MASK.isdisjoint(options.array_names):
        queries, keys = (
            n if n is None else integer(f"max_seqlen_{which}", n, 0) for which, n in zip("qk", max_seqlen, strict=True)
        )
        kept = queries, keys
    names = CU_SEQLENS[: len(cu_seqlens)]
    return replace(options, max_seqlen=kept, array_names=(*options.array_names, *names)), (*arrays, *cu_seqlens)


def paged(options: Options, arrays: tuple[Any, ...], block_table: Any) -> tuple[Options, tuple[Any, ...]]:
    """`options` and `arrays`, with the block table of a paged batch."""
    return replace(options, array_names=(*options.array_names, BLOCK_TABLE)), (*arrays, block_table)


def for_backward(
    options: Options, arrays: tuple[Any, ...], dlse: Any, gradients: tuple[str, ...]
) -> tuple[Options, tuple[Any, ...]]:
    """`options` and `arrays`, with the gradient of LSE if it is not None, and with `gradients` as additional
    results."""
    if dlse is not None:
        options, arrays = replace(options, array_names=("dlse", *options.array_names)), (dlse, *arrays)
    return (replace(options, gradients=gradients) if gradients else options), arrays
