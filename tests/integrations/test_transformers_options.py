"""attn_implementation="sandbox": what transformers asks for as options of our functions, with a fake of transformers
where it is not installed. tests/integrations/test_transformers.py compares results."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sandbox import integrations
from sandbox.core.errors import UnsupportedProblem

torch = pytest.importorskip("torch")
Tensor = torch.Tensor
NAME = "sandbox.integrations.transformers"


def causal_mask_function(*at: Any) -> Any:
    """As in transformers."""


def bidirectional_mask_function(*at: Any) -> Any:
    """As in transformers."""


def sliding_window_overlay(width: int) -> Callable[..., Any]:
    def inner_mask(*at: Any) -> Any:
        return width

    return inner_mask


def and_masks(*mask_functions: Callable[..., Any]) -> Callable[..., Any]:
    def and_mask(*at: Any) -> Any:
        return mask_functions

    return and_mask


class Interface:
    """A register of functions by name."""

    def __init__(self) -> None:
        self.known: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, function: Callable[..., Any]) -> None:
        self.known[name] = function


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported with the fake. `calls`: the name, arrays and options of each call of our functions."""
    fake: Any = ModuleType("transformers")
    fake.AttentionInterface, fake.AttentionMaskInterface = Interface(), Interface()
    fake.masking_utils = SimpleNamespace(
        causal_mask_function=causal_mask_function,
        bidirectional_mask_function=bidirectional_mask_function,
        sliding_window_causal_mask_function=lambda n: and_masks(sliding_window_overlay(n), causal_mask_function),
        sdpa_mask=lambda *sizes, **given: (sizes, given),
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    before = vars(integrations).get("transformers")
    module: Any = importlib.import_module(NAME)
    module.calls = []
    for name in ("attention", "attention_varlen", "attention_paged"):

        def record(q: Tensor, *arrays: Any, name: str = name, **options: Any) -> Tensor:
            module.calls.append((name, (q, *arrays), options))
            return q

        monkeypatch.setattr(module, name, record)
    module.fake = fake
    yield module
    del sys.modules[NAME], integrations.transformers
    if before is not None:
        integrations.transformers = before


Q, KV = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8)
PLAIN = {"scale": None, "softcap": 0.0, "sink": None, "dropout": 0.0, "kernel": None, "tile": None, "invariant": False}
PADDING, BIAS, BOOL = (
    torch.ones(2, 7, dtype=torch.bool),
    torch.zeros(2, 1, 5, 7),
    torch.ones(2, 1, 5, 7, dtype=torch.bool),
)
LAYER, ENCODER = SimpleNamespace(), SimpleNamespace(is_causal=False)


@pytest.mark.parametrize(
    ("module", "given", "options"),
    [
        (LAYER, {}, {"causal": True}),
        (ENCODER, {}, {"causal": False}),
        (LAYER, {"is_causal": False}, {"causal": False}),
        (ENCODER, {"is_causal": True}, {"causal": True}),
        (LAYER, {"sliding_window": 3}, {"causal": True, "window": (2, 0)}),
        (ENCODER, {"sliding_window": 3}, {"causal": False, "window": (3, 3)}),
        (LAYER, {"scaling": 0.5, "softcap": 30.0, "dropout": 0.1}, {"causal": True, "scale": 0.5, "softcap": 30.0,
                                                                    "dropout": 0.1}),
        (LAYER, {"kernel": "k", "tile": "t", "invariant": True}, {"causal": True, "kernel": "k", "tile": "t",
                                                                  "invariant": True}),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_a_layer(integration: Any, module: Any, given: dict[str, Any], options: dict[str, Any]) -> None:
    out, weights = integration._attend(module, Q, KV, KV, None, **given, unknown=3)
    assert (out.shape, out.is_contiguous(), weights) == ((2, 5, 4, 8), True, None)
    assert integration.calls == [("attention", (Q, KV, KV), {**PLAIN, **options})]


def test_masks_of_a_layer(integration: Any) -> None:
    """One of padding is a mask of one row, in addition to causal; any other has it all."""
    attend = lambda mask, **given: integration._attend(LAYER, Q, KV, KV, mask, **given) and integration.calls[-1][2]  # noqa: E731
    options = attend(PADDING, sliding_window=3)
    assert (options["causal"], options["window"], options["mask"].shape) == (True, (2, 0), (2, 1, 1, 7))
    options = attend(BOOL, sliding_window=3)
    assert options["mask"] is BOOL
    assert not {"causal", "window", "bias"} & options.keys()
    options = attend(BIAS)
    assert options["bias"] is BIAS
    assert not {"causal", "mask"} & options.keys()
    position = torch.ones(1, 4, 5, 7)
    assert attend(None, position_bias=position)["bias"] is position
    assert torch.equal(attend(BIAS + 2, position_bias=position)["bias"], position + BIAS + 2)
    assert attend(None, s_aux=torch.ones(4, dtype=torch.bfloat16))["sink"].dtype == torch.float32
    with pytest.raises(UnsupportedProblem, match=r'^a paged cache is not supported by "sandbox": use '):
        attend(None, cache=object())


def test_names_that_are_registered(integration: Any) -> None:
    integration.register()
    integration.register("other", kernel="k", tile="t", invariant=True)
    known = integration.fake.AttentionInterface.known
    assert {*known} == {"sandbox", "paged|sandbox", "other", "paged|other"}
    assert integration.fake.AttentionMaskInterface.known == dict.fromkeys(("sandbox", "other"), integration._mask)
    given = {"kernel": "k", "tile": "t", "invariant": True}
    for name, function in (("other", integration._attend), ("paged|other", integration._attend_pages)):
        assert (known[name].func, known[name].keywords) == (function, given)
    assert known["sandbox"].keywords == {"kernel": None, "tile": None, "invariant": False}


def test_masks_that_the_layer_says_itself(integration: Any) -> None:
    """Causal, bidirectional or a sliding window, of keys that end with the queries."""
    window = integration.fake.masking_utils.sliding_window_causal_mask_function(9)
    for function in (causal_mask_function, bidirectional_mask_function, window):
        assert integration._mask(2, 5, 7, 2, 0, function) is None
        assert integration._mask(2, 5, 7, 4, 2, function) is None
    padding = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    mask = integration._mask(2, 3, 3, 0, 0, attention_mask=padding)
    assert (mask.dtype, mask.tolist()) == (torch.bool, [[True] * 3] * 2)
    others = [
        and_masks(sliding_window_overlay(3), bidirectional_mask_function),
        and_masks(lambda *at: None, causal_mask_function),
        and_masks(sliding_window_overlay(3), causal_mask_function, causal_mask_function),
        lambda *at: None,
        print,
    ]
    for function in others:
        sizes, given = integration._mask(2, 5, 7, 2, 0, function, padding, device="cpu")
        assert sizes == (2, 5, 7)
        assert given == {
            "attention_mask": padding, "q_offset": 2, "kv_offset": 0, "mask_function": function, "device": "cpu",
            "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False,
        }  # fmt: skip
    for offset in (1, torch.tensor(2)):
        assert isinstance(integration._mask(2, 5, 7, offset, 0, causal_mask_function), tuple)


# ---- continuous batching


class Cache:
    """Two full layers and one with a window, of pages of 4 rows."""

    layer_index_to_group_indices = ((0, 0), (0, 1), (1, 0))
    sliding_windows = (1, 1, 6)
    block_size = 4

    def __init__(self) -> None:
        self.key_cache, self.value_cache = ([torch.zeros(16, 2, 8) for _ in range(2)] for _ in range(2))

    def update(self, key: Tensor, value: Tensor, layer: int, read: Any, write: Any) -> tuple[str, str]:
        return "gathered k", "gathered v"


def step(lengths: tuple[int, ...] = (2, 1), **changes: Any) -> dict[str, Any]:
    """Queries, and rows of the cache of all keys: sequences of 5 and 3 keys, in pages 2, 0 and 1."""
    total = sum(lengths)
    rows = torch.tensor([8, 9, 10, 11, 0, 4, 5, 6])
    ends = torch.tensor((0, *lengths)).cumsum(0).int()
    return {
        "query": torch.ones(1, 4, total, 8), "key": torch.ones(1, 2, total, 8), "value": 2 * torch.ones(1, 2, total, 8),
        "attention_mask": None, "cu_seq_lens_q": ends, "cu_seq_lens_k": torch.tensor([0, 5, 8]).int(),
        "max_seqlen_q": max(lengths), "max_seqlen_k": 5, "read_index": [rows, rows],
        "write_index": [torch.tensor([11, 0, 6])[:total]] * 2, **changes,
    }  # fmt: skip


def test_a_step_over_pages(integration: Any) -> None:
    """New rows are written; the first layer of a group makes the block table, which the others use."""
    cache = Cache()
    for layer in (0, 1):
        out, weights = integration._attend_pages(SimpleNamespace(layer_idx=layer), cache=cache, **step())
        assert (out.shape, weights) == ((1, 3, 4, 8), None)
        for rows, number in ((cache.key_cache[layer], 1), (cache.value_cache[layer], 2)):
            assert rows[:, 0, 0].nonzero().flatten().tolist() == [0, 6, 11]
            assert rows.max() == number
    (name, arrays, options), (_, again, _) = integration.calls
    q, k, v, table, lengths = arrays
    assert (name, q.shape, k.shape, v.shape) == ("attention_paged", (3, 4, 8), (4, 4, 2, 8), (4, 4, 2, 8))
    assert (k[2, 3, 0, 0], v[2, 3, 0, 0]) == (1, 2)
    assert (table.tolist(), table.dtype, lengths.tolist()) == ([[2, 0], [1, 1]], torch.int32, [5, 3])
    assert again[3] is table
    assert again[4] is lengths
    assert options.pop("cu_seqlens_q").tolist() == [0, 2, 3]
    assert options == {"causal": True, "scale": None, "kernel": None, "tile": None, "invariant": False}


def test_a_step_of_one_query_per_sequence(integration: Any) -> None:
    """It is a dense batch."""
    layer = SimpleNamespace(layer_idx=0)
    given = {"scaling": 0.5, "softcap": 3.0, "s_aux": torch.ones(4, dtype=torch.float16), "kernel": "k", "tile": "t"}
    out, _ = integration._attend_pages(layer, cache=Cache(), **step((1, 1)), **given, invariant=True)
    ((name, arrays, options),) = integration.calls
    assert (name, arrays[0].shape, out.shape) == ("attention_paged", (2, 4, 1, 8), (1, 2, 4, 8))
    assert options.pop("sink").dtype == torch.float32
    assert options == {"causal": True, "scale": 0.5, "softcap": 3.0, "kernel": "k", "tile": "t", "invariant": True}
    integration._attend_pages(layer, cache=Cache(), **step((1, 0)))
    assert integration.calls[-1][1][0].shape == (1, 4, 8)


@pytest.mark.parametrize(
    ("layer", "empty", "window", "keys"),
    [(2, False, {"window": (5, 0)}, "sliding_attention"), (0, True, {}, "full_attention")],
    ids=["a sliding window", "whole prompts"],
)
def test_a_step_with_gathered_keys(
    integration: Any, layer: int, empty: bool, window: dict[str, Any], keys: str
) -> None:
    """It is a ragged batch. Offsets and lengths may differ between the kinds of layers."""
    given = step(
        cu_seq_lens_k={keys: "offsets"}, max_seqlen_k={keys: 5}, read_index=[torch.empty(0), torch.ones(3)]
    ) if empty or layer == 2 else step()  # fmt: skip
    out, _ = integration._attend_pages(SimpleNamespace(layer_idx=layer), cache=Cache(), **given)
    ((name, arrays, options),) = integration.calls
    assert (name, arrays[0].shape, out.shape) == ("attention_varlen", (3, 4, 8), (1, 3, 4, 8))
    assert arrays[1:] == ("gathered k", "gathered v", given["cu_seq_lens_q"], "offsets")
    assert options == {"causal": True, "scale": None, "kernel": None, "tile": None, "invariant": False, **window}


@pytest.mark.parametrize(("most", "width"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 4), (16, 4), (17, 8)])
def test_the_width_of_a_block_table_is_a_power_of_two(integration: Any, most: int, width: int) -> None:
    pages = integration._pages(torch.arange(4 * 8), torch.tensor([0, most]), most, 4)
    assert pages.block_table.tolist() == [list(range(width))]
    assert pages.key_lengths.tolist() == [most]


def test_pages_without_a_cache(integration: Any) -> None:
    with pytest.raises(UnsupportedProblem, match=r'^"paged\|sandbox" without a paged cache is not'):
        integration._attend_pages(LAYER, Q, KV, KV, None)
