"""transformers (5 and later): models made with attn_implementation="sandbox".

    import sandbox.integrations.transformers

    sandbox.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="sandbox")

Its masks become options of `sandbox.attention` where possible: causal, a sliding window, and padding, left
or right, as a mask of one row; softcaps, learned sinks and position biases too. Any other mask is read as it is.

Continuous batching: model.set_attn_implementation("paged|sandbox"), then model.generate_batch(…). Keys are read from
the pages of its cache, without gathering them. CUDA graphs and asynchronous batches are off unless its
ContinuousBatchingConfig has use_cuda_graph=True and use_async_batching=True.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from ..api.attention import attention, attention_paged, attention_varlen
from ..core.errors import UnsupportedProblem
from ..core.normalise import cdiv

if TYPE_CHECKING:
    from ..core.kernel import Kernel
    from ..core.tile import Tile


def register(
    name: str = "sandbox", kernel: str | Kernel | None = None, tile: Tile | str | Mapping[str, int] | None = None,
    invariant: bool = False,
) -> None:  # fmt: skip
    """Makes `name`, and "paged|" and `name`, an attn_implementation, whose forward is `kernel` with `tile`, by default
    what `attention` chooses; invariant: as in `attention_forward`. Registering again replaces it, also for models that
    are there already."""
    how: dict[str, Any] = {"kernel": kernel, "tile": tile, "invariant": invariant}
    AttentionInterface.register(name, partial(_attend, **how))
    AttentionInterface.register(f"paged|{name}", partial(_attend_pages, **how))
    AttentionMaskInterface.register(name, _mask)


def _attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Any = None, position_bias: Any = None, cache: Any = None, kernel: Any = None,
    tile: Any = None, invariant: bool = False, **others: Any,
) -> tuple[Any, None]:  # fmt: skip
    """(out, no weights), out (B, Sq, H, D), of query (B, H, Sq, D), key and value (B, Hk, Sk, D)."""
    if cache is not None:
        raise UnsupportedProblem('a paged cache is not supported by "sandbox": use "paged|sandbox"')
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {"causal": bool(causal)}
    if sliding_window is not None:
        options["window"] = (sliding_window - 1, 0) if causal else (sliding_window, sliding_window)
    if attention_mask is not None and attention_mask.ndim == 2:
        options["mask"] = attention_mask[:, None, None, :]  # (B, Sk): padding
    elif attention_mask is not None:
        options = {"bias" if attention_mask.is_floating_point() else "mask": attention_mask}  # which has it all
    if position_bias is not None:
        options["bias"] = position_bias if "bias" not in options else position_bias + options["bias"]
    sink = None if s_aux is None else s_aux.float()
    out = attention(
        query, key, value, scale=scaling, softcap=softcap or 0.0, sink=sink, dropout=dropout, kernel=kernel, tile=tile,
        invariant=invariant, **options,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


class _Pages(NamedTuple):
    """What the layers of a group have in common in a step: the pages of each sequence, (B, most) int32, and its numbers
    of keys, (B,) int32, with those of the step."""

    block_table: Any
    key_lengths: Any


_PAGES: WeakKeyDictionary[Any, dict[int, _Pages]] = WeakKeyDictionary()  # by cache, then by group of layers


def _attend_pages(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, cache: Any = None, cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None, max_seqlen_q: int = 0, max_seqlen_k: Any = 0, read_index: Any = (),
    write_index: Any = (), scaling: float | None = None, softcap: float | None = None, s_aux: Any = None,
    kernel: Any = None, tile: Any = None, invariant: bool = False, **others: Any,
) -> tuple[Any, None]:  # fmt: skip
    """(out, no weights), out (1, total_q, H, D), of the ragged batch of a step: query (1, H, total_q, D), and key
    and value (1, Hk, total_q, D), which it appends to the cache.

    Sliding windows are caches that overwrite their oldest keys, from which transformers gathers; and a step of whole
    prompts has all its keys in `key`: both are ragged batches.
    """
    if cache is None:
        raise UnsupportedProblem('"paged|sandbox" without a paged cache is not supported: use "sandbox"')
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    window = cache.sliding_windows[module.layer_idx]  # 1: none
    if isinstance(cu_seq_lens_k, dict):
        kind = "full_attention" if window == 1 else "sliding_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    options: dict[str, Any] = {"causal": True, "scale": scaling, "kernel": kernel, "tile": tile, "invariant": invariant}
    options |= {"softcap": softcap} if softcap else {}
    options |= {"sink": s_aux.float()} if s_aux is not None else {}
    q = query[0].transpose(0, 1)
    if window != 1 or not read_index[group].numel():
        options |= {"window": (window - 1, 0)} if window != 1 else {}
        k, v = cache.update(key, value, module.layer_idx, read_index, write_index)
        return attention_varlen(q, k, v, cu_seq_lens_q, cu_seq_lens_k, **options)[None], None
    for rows, new in ((cache.key_cache[layer], key), (cache.value_cache[layer], value)):
        rows.index_copy_(0, write_index[group], new[0].transpose(0, 1))
    k, v = (x[layer].unflatten(0, (-1, cache.block_size)) for x in (cache.key_cache, cache.value_cache))
    steps = _PAGES.setdefault(cache, {})
    if layer == 0:  # the first layer of the group
        steps[group] = _pages(read_index[group], cu_seq_lens_k, max_seqlen_k, cache.block_size)
    if max_seqlen_q == 1 and len(q) == len(cu_seq_lens_q) - 1:  # one query per sequence: a dense batch
        return attention_paged(q[:, :, None], k, v, *steps[group], **options)[None, :, :, 0], None
    return attention_paged(q, k, v, *steps[group], cu_seqlens_q=cu_seq_lens_q, **options)[None], None


def _pages(rows: Any, cu_seqlens: Any, most: int, block_size: int) -> _Pages:
    """The pages of each sequence. rows: of the cache, of every key of all sequences, which begin at cu_seqlens. The
    table's width is a power of two: calls with other shapes need other plans."""
    width = 1 << max(cdiv(most, block_size) - 1, 0).bit_length()
    first_rows = cu_seqlens[:-1, None] + block_size * (rows.new_ones(width).cumsum(0) - 1)
    table = rows[first_rows.clamp_(max=len(rows) - 1)] // block_size
    return _Pages(table.int(), cu_seqlens.diff())


def _mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function, attention_mask: Any = None, **others: Any,
) -> Any:  # fmt: skip
    """What `_attend` is given as attention_mask: None or (B, Sk) where the layer's own is_causal and sliding_window say
    the rest, which they do of keys that end with the queries; otherwise (B, 1, Sq, Sk), True where a key is seen."""
    ends = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if ends and _said_by_the_layer(mask_function):
        return None if attention_mask is None else attention_mask[:, -kv_length:].bool()
    whole = others | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    where = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function}
    return masking_utils.sdpa_mask(batch_size, q_length, kv_length, attention_mask=attention_mask, **where, **whole)


def _said_by_the_layer(mask_function: Any) -> bool:
    """Whether it is causal or not, with a sliding window or without, and nothing else, such as sequences in one row."""
    plain = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    if mask_function in plain:
        return True
    made: Any = masking_utils.sliding_window_causal_mask_function(1)  # an `and` of the window and of causal
    if getattr(mask_function, "__code__", None) is not made.__code__:
        return False
    window, causal = made.__closure__[0].cell_contents
    parts = mask_function.__closure__[0].cell_contents
    return len(parts) == 2 and getattr(parts[0], "__code__", None) is window.__code__ and parts[1] is causal
