"""transformers (5 and later): models made with attn_implementation="sandbox".

    import sandbox.integrations.transformers

    sandbox.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="sandbox")

Its masks become options of `sandbox.attention` where possible: causal, a sliding window, and padding, left
or right, as a mask of one row; softcaps, learned sinks and position biases too. Any other mask is read as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from ..api.attention import attention
from ..core.errors import UnsupportedProblem

if TYPE_CHECKING:
    from ..core.kernel import Kernel
    from ..core.tile import Tile


def register(
    name: str = "sandbox", kernel: str | Kernel | None = None, tile: Tile | str | Mapping[str, int] | None = None
) -> None:
    """Makes `name` an attn_implementation, whose forward is `kernel` with `tile`, by default what `attention` chooses.
    Registering again replaces it, also for models that are there already."""
    AttentionInterface.register(name, partial(_attend, kernel=kernel, tile=tile))
    AttentionMaskInterface.register(name, _mask)


def _attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Any = None, position_bias: Any = None, cache: Any = None, kernel: Any = None,
    tile: Any = None, **others: Any,
) -> tuple[Any, None]:  # fmt: skip
    """(out, no weights), out (B, Sq, H, D), of query (B, H, Sq, D), key and value (B, Hk, Sk, D)."""
    if cache is not None:
        raise UnsupportedProblem("a paged cache of transformers is not supported: use its default cache")
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
        **options,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


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
    """Whether it is causal or not, with a sliding window or without, and nothing else, such as packed sequences."""
    plain = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    if mask_function in plain:
        return True
    made: Any = masking_utils.sliding_window_causal_mask_function(1)  # an `and` of the window and of causal
    if getattr(mask_function, "__code__", None) is not made.__code__:
        return False
    window, causal = made.__closure__[0].cell_contents
    parts = mask_function.__closure__[0].cell_contents
    return len(parts) == 2 and getattr(parts[0], "__code__", None) is window.__code__ and parts[1] is causal
