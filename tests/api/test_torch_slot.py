"""use_in_torch: PyTorch's own attention on our kernels, in small models; what is not ours stays PyTorch's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from project import leave_process_group

import sandbox
from sandbox import reference
from sandbox.core.errors import SandboxError, UnsupportedProblem

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from sandbox.api import torch_slot  # noqa: E402

Tensor = torch.Tensor
sdpa = F.scaled_dot_product_attention
OPERATORS = [f"_scaled_dot_product_flash_attention_for_cpu{suffix}" for suffix in ("", "_backward")]
EXACT = {"kernel": "fwd_minimal", "backward": "bwd_minimal"}  # the quickest to run on the CPU backend at small sizes


def table() -> list[str]:
    """Whose kernels PyTorch's dispatcher has for the operators."""
    return [torch._C._dispatch_dump_table(f"aten::{name}") for name in OPERATORS]


@pytest.fixture(autouse=True)
def _restored():
    before = table()
    yield
    assert table() == before


def tensors(*heads: int, S: int = 17, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, n, 16, generator=generator).to(dtype) for h, n in zip(heads, (S, 23, 23), strict=True)]


def both(call: Callable[..., Tensor], inputs: list[Tensor], **options: object) -> list[Tensor]:
    """out, dq, dk, dv."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = call(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


HIDDEN = torch.rand(2, 1, 17, 23, generator=torch.Generator().manual_seed(1)) > 0.3
HIDDEN[:, :, 3] = False


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": HIDDEN}, {"attn_mask": torch.randn(17, 23)}],
    ids=["plain", "causal", "scale", "mask that hides a row", "bias"],
)
def test_scaled_dot_product_attention_is_ours(options: dict[str, object]) -> None:
    """The very bits of the kernels that were named, and PyTorch's results within rounding."""
    inputs = tensors(4, 2, 2)
    theirs = both(sdpa, inputs, enable_gqa=True, **options)
    with sandbox.use_in_torch(**EXACT):
        ours = both(sdpa, inputs, enable_gqa=True, **options)
    own = {"is_causal": "causal", "attn_mask": "bias"}
    given = {own.get(name, name): "top-left" if x is True else x for name, x in options.items()}
    if options.get("attn_mask") is HIDDEN:
        given["bias"] = torch.zeros(HIDDEN.shape).masked_fill(~HIDDEN, -torch.inf)
    named = {key: x for key, x in given.items() if x is not None}
    assert torch.equal(ours[0], sandbox.attention_forward(*inputs, kernel="fwd_minimal", **named)[0])
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == y.shape
        assert (x - y).abs().max() < 1e-5


def test_results_lie_as_those_of_pytorchs_operators() -> None:
    """Which is what its compiler counts on, whatever the layout of q, k and v."""
    forward, backward = (getattr(torch.ops.aten, name) for name in OPERATORS)
    heads_last = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(4, 2, 2)]
    for q, k, v in (tensors(4, 2, 2), heads_last):
        found = []
        for _ in range(2):
            results = forward(q, k, v)
            found.append([x.stride() for x in (*results, *backward(q, q, k, v, *results, 0.0, False))])
            with sandbox.use_in_torch(**EXACT):
                results = forward(q, k, v)
                found.append([x.stride() for x in (*results, *backward(q, q, k, v, *results, 0.0, False))])
        assert found[0] == found[1] == found[2]


def test_what_is_not_ours_stays_pytorchs(caplog: pytest.LogCaptureFixture) -> None:
    """And the log says why, once."""
    inputs = tensors(2, 2, 2)
    double = [x.double() for x in inputs]
    expected = both(sdpa, inputs), both(sdpa, double)
    caplog.set_level(logging.INFO, logger="sandbox")
    with sandbox.use_in_torch(kernel="fwd_mma", backward="bwd_mma"):
        found = both(sdpa, inputs), both(sdpa, double)
        both(sdpa, inputs)
    assert all(
        torch.equal(x, y) for one, two in zip(found, expected, strict=True) for x, y in zip(one, two, strict=True)
    )
    said = [record.getMessage() for record in caplog.records if "runs on PyTorch's own kernel" in record.getMessage()]
    assert len(said) == 4  # two operators, two reasons
    assert any("float32 is not supported" in text for text in said)


def test_few_reasons_are_kept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of a limited number of reasons it is known that they were logged."""
    monkeypatch.setattr(torch_slot, "MAX_PLANS", 2)
    caplog.set_level(logging.INFO, logger="sandbox")
    with sandbox.use_in_torch(kernel="fwd_mma"):
        for D in (4, 4, 12, 12, 20, 4):
            sdpa(*(torch.zeros(1, 1, 8, D, dtype=torch.float16) for _ in range(3)))
    said = [record.getMessage() for record in caplog.records if "runs on PyTorch's own kernel" in record.getMessage()]
    assert [text.count(f"D={D} ") for text, D in zip(said, (4, 12, 20, 4), strict=True)] == [1] * 4


# ---- in and out


def test_contexts_within_contexts_and_pytorchs_registry() -> None:
    q, k, v = tensors(2, 2, 2)
    plain, exact = sdpa(q, k, v), sandbox.attention(q, k, v, kernel="fwd_minimal")
    blocked = sandbox.attention(q, k, v, kernel="fwd_block2d")
    assert len({tuple(x.flatten().tolist()) for x in (plain, exact, blocked)}) == 3
    with sandbox.use_in_torch(kernel="fwd_minimal"):
        assert torch.equal(sdpa(q, k, v), exact)
        with sandbox.use_in_torch(kernel="fwd_block2d"):
            assert torch.equal(sdpa(q, k, v), blocked)
        assert torch.equal(sdpa(q, k, v), exact)
    assert torch.equal(sdpa(q, k, v), plain)
    slot = sandbox.use_in_torch(kernel="fwd_minimal")
    slot.activate()
    with pytest.raises(UnsupportedProblem, match="is already active"):
        slot.activate()
    slot.restore()
    slot.restore()
    assert torch.equal(sdpa(q, k, v), plain)
    for wrong in ({"kernel": "bwd_mma"}, {"backward": "fwd_mma"}):  # not the one for PyTorch to take instead
        with pytest.raises(UnsupportedProblem, match="is not supported for the "):
            sandbox.use_in_torch(**wrong)
    registry = pytest.importorskip("torch.nn.attention")
    if not hasattr(registry, "activate_flash_attention_impl"):
        pytest.skip("this PyTorch has no registry of implementations")
    registry.activate_flash_attention_impl("sandbox")
    assert torch.equal(sdpa(q, k, v), exact)
    with sandbox.use_in_torch(kernel="fwd_block2d"):
        assert torch.equal(sdpa(q, k, v), blocked)
    assert registry.current_flash_attention_impl() == "sandbox"
    registry.restore_flash_attention_impl()
    assert torch.equal(sdpa(q, k, v), plain)


@pytest.mark.parametrize("first", [0, 1], ids=["in their order", "in reverse"])
def test_slots_are_restored_in_any_order(first: int) -> None:
    """The implementation that was active before them is active again, also if a slot was used before."""
    registry = pytest.importorskip("torch.nn.attention")
    if not hasattr(registry, "activate_flash_attention_impl"):
        pytest.skip("this PyTorch has no registry of implementations")
    for name in ("another", "a third"):
        registry.register_flash_attention_impl(name, register_fn=lambda: SimpleNamespace(remove=lambda: None))
    slots = [sandbox.use_in_torch(kernel=name) for name in ("fwd_minimal", "fwd_block2d")]
    try:
        for name in ("another", "a third"):
            registry.activate_flash_attention_impl(name)
            for slot in slots:
                slot.activate()
            slots[first].restore()
            assert registry.current_flash_attention_impl() == "sandbox"
            slots[1 - first].restore()
            assert registry.current_flash_attention_impl() == name
    finally:
        registry.restore_flash_attention_impl()


# ---- whole models


class Attention(nn.Module):
    """Grouped heads where Hk < H; rotated like Llama's where `rotary`."""

    def __init__(self, width: int, H: int, Hk: int, causal: bool, rotary: bool):
        super().__init__()
        self.D, self.causal, self.rotary, self.grouped = width // H, causal, rotary, Hk != H
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * Hk * self.D)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q = self.q(x).view(B, S, -1, self.D).transpose(1, 2)
        k, v = self.kv(x).view(B, S, -1, 2, self.D).transpose(1, 2).unbind(3)
        if self.rotary:
            q, k = self._rotated(q), self._rotated(k)
        y = sdpa(q, k, v, is_causal=self.causal, enable_gqa=self.grouped)
        return self.out(y.transpose(1, 2).reshape(B, S, -1))

    def _rotated(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] / 100 ** torch.linspace(0, 1, self.D // 2)
        a, b = x.float().chunk(2, -1)
        sin, cos = angle.sin(), angle.cos()
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Model(nn.Module):
    """Two blocks over tokens, or, where `tokens` is 0, over patches."""

    def __init__(self, H: int, Hk: int, causal: bool, rotary: bool, tokens: int = 50, width: int = 32):
        super().__init__()
        torch.manual_seed(0)
        self.embed: nn.Module = nn.Embedding(tokens, width) if tokens else nn.Linear(48, width)
        self.place = nn.Parameter(torch.zeros(20, width) if rotary else torch.randn(20, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attend = nn.ModuleList(Attention(width, H, Hk, causal, rotary) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(2)
        )
        self.head, self.pooled, self.keeps = nn.Linear(width, tokens or 10), not tokens, True

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place[: x.shape[1]]
        for i in range(2):
            block = self._block if self.keeps else lambda y, i: checkpoint(self._block, y, i, use_reentrant=False)
            x = block(x, i)
        return self.head(x.mean(1) if self.pooled else x)

    def _block(self, x: Tensor, i: int) -> Tensor:
        x = x + self.attend[i](self.norms[2 * i](x))
        return x + self.mlps[i](self.norms[2 * i + 1](x))


MODELS = {
    "GPT-2": {"H": 4, "Hk": 4, "causal": True, "rotary": False},
    "Llama": {"H": 4, "Hk": 2, "causal": True, "rotary": True},
    "ViT": {"H": 4, "Hk": 4, "causal": False, "rotary": False, "tokens": 0},
}
every_model = pytest.mark.parametrize("name", MODELS)


def batch(name: str, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if name == "ViT":
        return torch.randn(2, 17, 48, generator=generator), torch.randint(0, 10, (2,), generator=generator)
    tokens = torch.randint(0, 50, (2, 20), generator=generator).cumsum(1) % 50
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


@every_model
def test_logits(name: str) -> None:
    """bfloat16 with ours is as far from float32 as with PyTorch's kernel, and by autocast too."""
    model, (x, _) = Model(**MODELS[name]).eval(), batch(name)
    with torch.no_grad():
        expected = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            theirs = model(x)
            with sandbox.use_in_torch(**EXACT):
                ours = model(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert not torch.equal(ours, theirs)  # they are not the same kernel
    assert (ours - expected).abs().max() <= 1.5 * (theirs - expected).abs().max()


def eager(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
    """As textbooks write it."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_greedy_decoding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 weights: ours and PyTorch's kernel choose the same tokens for as long as eager and PyTorch's do."""
    model = Model(**MODELS[name]).bfloat16().eval()
    prompt = torch.randint(0, 50, (8, 4), generator=torch.Generator().manual_seed(2))

    @torch.no_grad()
    def decoded() -> Tensor:
        tokens = prompt
        while tokens.shape[1] < 20:
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), 1)
        return tokens

    def agree(a: Tensor, b: Tensor) -> int:
        """How many tokens, of all sequences, come before the first that differs."""
        return int((a == b).long().cumprod(1).sum())

    theirs = decoded()
    with sandbox.use_in_torch(**EXACT):
        ours = decoded()
    monkeypatch.setitem(Attention.forward.__globals__, "sdpa", eager)
    plain = decoded()
    assert theirs[:, 4:].unique().numel() > 4  # it says something
    assert agree(ours, theirs) >= agree(plain, theirs)


@every_model
def test_training(name: str) -> None:
    """50 steps: the losses of PyTorch's own kernels, and below where they began."""

    def train() -> list[float]:
        model, losses = Model(**MODELS[name]), []
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for step in range(50):
            loss = loss_of(model, *batch(name, step % 5))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    theirs = train()
    with sandbox.use_in_torch(**EXACT):
        ours = train()
    assert ours != theirs
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 2e-3
    assert ours[-1] < 0.8 * ours[0]


def gradients(model: nn.Module, name: str) -> list[Tensor]:
    loss = loss_of(model, *batch(name))
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)]


def same_signature(found: list[Tensor], expected: list[Tensor], by: float = 1e-5) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (x - y).abs().max() <= by


@every_model
def test_compiled_checkpointed_and_distributed(name: str, tmp_path) -> None:
    """The same gradients as of the plain model, in the slot."""
    model = Model(**MODELS[name])
    theirs = gradients(model, name)
    with sandbox.use_in_torch(**EXACT):
        ours = gradients(model, name)
        same_signature(ours, theirs)
        assert not all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True) if x is not None)
        same_signature(gradients(torch.compile(model, backend="aot_eager", fullgraph=True), name), ours)
        model.keeps = False
        same_signature(gradients(model, name), ours, 0)
        model.keeps = True
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            parallel = nn.parallel.DistributedDataParallel(model)
            loss_of(parallel, *batch(name)).backward()
        finally:
            leave_process_group()
        same_signature([p.grad for p in model.parameters()], ours[1:], 1e-6)


# ---- autocast of our own attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_casts_as_it_casts_pytorchs(dtype: torch.dtype) -> None:
    q, k, v = tensors(2, 2, 2, dtype=dtype)
    q.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = sdpa(q, k, v)
        if dtype is torch.float64:
            with pytest.raises(UnsupportedProblem, match="float64"):
                sandbox.attention(q, k, v)
            return
        ours = sandbox.attention(q, k, v, kernel="fwd_minimal")
        compiled = torch.compile(sandbox.attention, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(q, k, v, kernel="fwd_minimal"), ours)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert ((ours - theirs).abs() <= 0.02).all()
    assert torch.autograd.grad(ours.sum(), q)[0].dtype == dtype


# ---- PyTorch's flash operators, which it has no kernels of on the CPU


def test_flash_operators_on_the_cpu() -> None:
    """Dense and ragged, an empty sequence among them: PyTorch's own attention of each sequence."""
    aten, generator = torch.ops.aten, torch.Generator().manual_seed(0)
    q, dout = torch.randn(2, 32, 4, 16, generator=generator)
    k, v = torch.randn(2, 32, 2, 16, generator=generator)
    ends = 5, 20, 20, 32
    offsets = torch.tensor((0, *ends), dtype=torch.int32)
    lengths = offsets, offsets, 15, 15, 0.0, True
    with sandbox.use_in_torch(**EXACT):
        out, lse, *state, _ = aten._flash_attention_forward(q, k, v, *lengths, False)
        found = aten._flash_attention_backward(dout, q, k, v, out, lse, *lengths, *state)
        dense = [x.transpose(0, 1)[None] for x in (q, k, v)]
        whole, statistics, *_ = aten._scaled_dot_product_flash_attention(*dense, 0.0, True, scale=0.3)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        aten._flash_attention_forward(q, k, v, *lengths, False)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    pieces = zip(*(x.transpose(0, 1)[None].tensor_split(ends[:-1], 2) for x in leaves), strict=True)
    each = torch.cat([sdpa(*piece, is_causal=True, enable_gqa=True) for piece in pieces], 2)[0].transpose(0, 1)
    for a, b in zip([out, *found], [each, *torch.autograd.grad(each, leaves, dout)], strict=True):
        assert (a - b).abs().max() < 1e-5
    own = sandbox.attention_forward(*(x.detach() for x in dense), causal=True, scale=0.3, kernel="fwd_minimal")
    assert torch.equal(whole, own[0])
    assert torch.equal(statistics, own[1])


@pytest.mark.parametrize("causal", [False, True])
def test_the_debug_mask_is_the_dropout_that_was_applied(causal: bool) -> None:
    """PyTorch's math with the mask has the same results and gradients, as its tests of dropout ask; more keys than V is
    wide, grouped heads."""
    inputs, p = tensors(4, 2, 2), 0.4
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    with sandbox.use_in_torch(**EXACT):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, _, _, _, _, _, state, _, mask = flash(*leaves, p, causal, True)
        ours = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
        bshd = [x.transpose(1, 2) for x in inputs]
        *_, other, _, same = torch.ops.aten._flash_attention_forward(*bshd, None, None, 17, 23, p, causal, True)
        nothing = flash(*inputs, 0.0, causal, True)[-1]
    assert nothing.numel() == 0
    assert mask.shape == same.shape == (2, 4, 128, 128)
    seen = torch.ones(17, 23, dtype=torch.bool).tril(6 if causal else 23)
    for numbers, found in ((state, mask), (other, same)):
        keep = torch.from_numpy(reference.dropout_keep(int(numbers.view(torch.int64)[0]), 2, 4, 17, 23, p))
        assert torch.equal(found[:, :, :17, :23] > 0, keep & seen)
        assert not found[:, :, 17:].any()
        assert not found[..., 23:].any()
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in leaves)
    P = (q @ k.mT / 4).masked_fill(~seen, -torch.inf).softmax(-1) * (mask[:, :, :17, :23] >= 0) / (1 - p)
    theirs = [P @ v, *torch.autograd.grad((P @ v).square().sum(), leaves)]
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-3 * b.abs().max()


def test_the_debug_mask_does_not_depend_on_alibi() -> None:
    """With steep slopes P of distant keys underflows in float16: they are not dropped."""
    x, slopes, p = torch.randn(1, 40, 2, 16, dtype=torch.float16), torch.tensor([[1.0, 2.0]]), 0.4
    with sandbox.use_in_torch(**EXACT):
        *_, state, _, mask = torch.ops.aten._flash_attention_forward(
            x, x, x, None, None, 40, 40, p, False, True, alibi_slopes=slopes
        )
    keep = torch.from_numpy(reference.dropout_keep(int(state.view(torch.int64)[0]), 1, 2, 40, 40, p))
    assert torch.equal(mask[:, :, :40, :40] > 0, keep)


@pytest.mark.parametrize("mode", [None, "error", "warn"])
def test_deterministic_algorithms_select_a_deterministic_backward(
    mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With warn_only=True the backward warns that it is not deterministic, as that of PyTorch's flash attention."""
    chosen, theirs = [], torch_slot.run_backward
    monkeypatch.setattr(
        torch_slot, "run_backward", lambda arrays, options: (chosen.append(options), theirs(arrays, options))[1]
    )
    try:
        torch.use_deterministic_algorithms(mode is not None, warn_only=mode == "warn")
        warns = pytest.warns(UserWarning, match="defaults to a non-deterministic") if mode == "warn" else nullcontext()
        with sandbox.use_in_torch(**EXACT), warns:
            both(sdpa, tensors(2, 2, 2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [options.deterministic for options in chosen] == [mode == "error"]


@pytest.mark.parametrize(
    ("kind", "given", "own"),
    [
        ("dense", {"window_size_left": 0, "window_size_right": -1}, {"window": (0, None)}),
        ("ragged", {"window_size_left": 3}, {"window": (3, None)}),
        ("dense", {"window_size_left": -1, "window_size_right": 0}, {"window": (None, 0)}),
        ("ragged", {"window_size_left": -1, "window_size_right": -1}, {}),
    ],
    ids=["left of dense", "left of ragged", "right", "none"],
)
def test_windows_of_flash_operators(kind: str, given: dict[str, int], own: dict[str, object]) -> None:
    """A negative bound is none. Forward and backward, the bits of our own functions."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(12, h, 16, generator=generator) for h in (4, 2, 2, 4))
    ends, aten = torch.tensor([0, 5, 12], dtype=torch.int32), torch.ops.aten
    if kind == "dense":
        q, k, v, dout = (x[None] for x in (q, k, v, dout))
    lengths = (ends, ends, 7, 7) if kind == "ragged" else (None, None, 12, 12)
    with sandbox.use_in_torch(**EXACT):
        out, lse, *state, _ = aten._flash_attention_forward(q, k, v, *lengths, 0.0, False, False, **given)
        found = aten._flash_attention_backward(dout, q, k, v, out, lse, *lengths, 0.0, False, *state, **given)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if kind == "dense":
        heads_first = [x.transpose(1, 2) for x in leaves]
        expected = sandbox.attention(*heads_first, kernel="fwd_minimal", **own).transpose(1, 2)
    else:
        expected = sandbox.attention_varlen(*leaves, ends, kernel="fwd_minimal", **own)
    assert torch.equal(out, expected)
    for x, y in zip(found, torch.autograd.grad(expected, leaves, dout), strict=True):
        assert (x - y).abs().max() < 1e-5


def test_key_lengths_and_alibi_of_a_flash_operator() -> None:
    """And the operator that writes into a tensor. Pages are not supported."""
    q, k, v = (x.transpose(1, 2) for x in tensors(4, 2, 2))
    lengths, slopes = torch.tensor([23, 9], dtype=torch.int32), torch.tensor([[0.5, 1.0, 2.0, 0.0]])
    rest = None, None, 17, 23, 0.0, False, False
    given = {"seqused_k": lengths, "alibi_slopes": slopes.expand(2, 4).contiguous()}
    with sandbox.use_in_torch(**EXACT):
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *rest, **given)
        written = torch.zeros_like(out)
        if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
            inplace = torch.ops.aten._flash_attention_forward_no_dropout_inplace
            assert torch.equal(inplace(written, q, k, v, *rest, **given), lse)
            assert torch.equal(written, out)
        with pytest.raises(UnsupportedProblem, match=r"^block_table, an argument of PyTorch's flash attention, is not"):
            torch.ops.aten._flash_attention_forward(q, k, v, *rest, block_table=lengths[:, None])
    expected = sandbox.attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)), kernel="fwd_minimal", key_lengths=lengths, alibi=given["alibi_slopes"]
    )
    assert torch.equal(out, expected[0].transpose(1, 2))
    assert torch.equal(lse, expected[1])


def test_dropout_of_the_cpu_operator_is_pytorchs() -> None:
    """It has no argument for the seed. A flash operator draws a new one for each call."""
    q, k, v = tensors(2, 2, 2)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    with sandbox.use_in_torch(**EXACT):
        torch.manual_seed(0)
        first, second = (flash(q, k, v, 0.5) for _ in range(2))
        torch.manual_seed(0)
        again = flash(q, k, v, 0.5)
        with pytest.raises(UnsupportedProblem, match=r"^dropout, an argument of PyTorch's flash attention, is not"):
            torch_slot._cpu_forward(None, q, k, v, 0.5)  # type: ignore[arg-type]
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[6].view(torch.int64), again[6].view(torch.int64))
    assert not torch.equal(first[6].view(torch.int64), second[6].view(torch.int64))
    assert first[6].shape == (2,)
    assert (first[4], first[5]) == (17, 23)  # max_q and max_k


@pytest.mark.parametrize(
    ("kernels", "error", "message"),
    [
        (
            {"kernel": "fwd_minimal", "backward": "bwd_mma"},
            SandboxError,
            "^with dropout, sandbox computed the forward, and",
        ),
        (
            {"kernel": "fwd_mma", "backward": "bwd_minimal"},
            UnsupportedProblem,
            "^fwd_mma: dtype float32 is not supported",
        ),
    ],
    ids=["only the forward is ours", "only the backward is ours"],
)
def test_forward_and_backward_with_dropout_must_both_be_ours(
    kernels: dict[str, str], error: type[Exception], message: str
) -> None:
    """PyTorch's kernels drop other elements. Without dropout each may be PyTorch's."""
    q, k, v = tensors(2, 2, 2)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    state = torch.zeros(2, dtype=torch.int64).view(torch.uint64)
    with sandbox.use_in_torch(**kernels), pytest.raises(error, match=message) as caught:
        backward(q, q, k, v, q, torch.zeros(2, 2, 17), None, None, 17, 23, 0.5, False, state, state)
    assert isinstance(caught.value, UnsupportedProblem) == (error is UnsupportedProblem)
    with sandbox.use_in_torch(**EXACT):
        lse = torch.zeros(2, 2, 17)
        found = backward(q, q, k, v, q, lse, None, None, 17, 23, 0.0, False, state, state)
    expected = sandbox.attention_backward(q, q, k, v, q, lse)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_a_debug_mask_of_a_ragged_batch_is_refused() -> None:
    """Even where PyTorch has a kernel: our backward would follow, and drop other elements."""
    x, offsets = torch.randn(12, 2, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
    with sandbox.use_in_torch(**EXACT), pytest.raises(SandboxError, match="return_debug_mask of a ragged batch") as e:
        torch.ops.aten._flash_attention_forward(x, x, x, offsets, offsets, 7, 7, 0.5, False, True)
    assert not isinstance(e.value, UnsupportedProblem)  # which PyTorch's own kernel answers for


def test_int64_offsets_of_a_ragged_batch_are_rejected() -> None:
    x, offsets = torch.randn(12, 2, 16), torch.tensor([0, 5, 12])
    with sandbox.use_in_torch(**EXACT), pytest.raises(UnsupportedProblem, match="cum_seq_k is int64: it must be int32"):
        torch.ops.aten._flash_attention_forward(x, x, x, offsets.int(), offsets, 7, 7, 0.0, False, False)


@pytest.mark.parametrize("place", ["heads", "rows", "both"])
def test_results_of_broadcast_inputs_lie_as_pytorchs(place: str) -> None:
    """Those of nested tensors whose batch or heads are broadcast: PyTorch views out as one row of numbers."""
    there = {"heads": (12, 1, 16), "rows": (1, 4, 16), "both": (1, 1, 16)}[place]
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    aten, generator = torch.ops.aten, torch.Generator().manual_seed(0)
    q = torch.randn(there, generator=generator).expand(12, 4, 16)
    lengths = offsets, offsets, 7, 7, 0.0, False
    dense = q.transpose(0, 1)[None].expand(2, 4, 12, 16)
    with sandbox.use_in_torch(**EXACT):
        out, lse, *state, _ = aten._flash_attention_forward(q, q, q, *lengths, False)
        found = aten._flash_attention_backward(q, q, q, q, out, lse, *lengths, *state)
        copy = q.contiguous()
        expected, *_ = aten._flash_attention_forward(copy, copy, copy, *lengths, False)
        whole = aten._scaled_dot_product_flash_attention(dense, dense, dense)[0]
        bshd = aten._flash_attention_forward(*(dense.transpose(1, 2),) * 3, None, None, 12, 12, 0.0, False, False)[0]
    assert torch.equal(out.view(-1), expected.view(-1))
    assert all(x.stride() == torch.empty_like(q).stride() for x in found)
    assert whole.stride() == torch.empty_like(dense).stride()
    assert bshd.stride() == torch.empty_like(dense.transpose(1, 2)).stride()


def test_flash_operators_after_inference_mode() -> None:
    """What a first call there leaves behind may be saved for a backward."""
    leaves = [x.requires_grad_() for x in tensors(2, 2, 2)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    with sandbox.use_in_torch(**EXACT):
        torch_slot._unused.clear()
        with torch.inference_mode():
            flash(*leaves)
        out = flash(*leaves)[0]
        found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for x, y in zip((out.detach(), *found), both(sdpa, leaves), strict=True):
        assert (x - y).abs().max() < 1e-5


# ---- on a GPU: dense, ragged, dropout


def on_gpu(*shape: int) -> Tensor:
    return torch.randn(
        shape, device="cuda", dtype=torch.float16, generator=torch.Generator("cuda").manual_seed(len(shape))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_on_a_gpu(dropout: float, causal: bool) -> None:
    """The bits of our own calls with the seed that PyTorch keeps for the backward."""
    q, k, v, dout = (on_gpu(2, h, 130, 64) for h in (4, 2, 2, 4))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    with sandbox.use_in_torch():
        out, lse, *rest = flash(q, k, v, dropout, causal)
        options = (
            {"causal": causal, "dropout": dropout, "seed": rest[4].view(torch.int64)[:1]}
            if dropout
            else {"causal": causal}
        )
        expected = sandbox.attention_forward(q, k, v, **options)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(1)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            found = sdpa(*leaves, dropout_p=dropout, is_causal=causal, enable_gqa=True)
        state = (
            found.grad_fn._saved_rng_state
            if hasattr(found.grad_fn, "_saved_rng_state")
            else found.grad_fn._saved_philox_seed
        )
        got = torch.autograd.grad(found, leaves, dout)
    options |= {"seed": state.view(torch.int64)[:1]} if dropout else {}
    out, lse = sandbox.attention_forward(q, k, v, **options)
    assert torch.equal(found, out)
    for x, y in zip(got, sandbox.attention_backward(dout, q, k, v, out, lse, **options), strict=True):
        assert (x - y).abs().max() < 2e-2
    if dropout:
        with (
            sandbox.use_in_torch(backward="bwd_wgmma"),
            pytest.raises(SandboxError, match="no backward kernel of sandbox"),
        ):
            torch.ops.aten._scaled_dot_product_flash_attention_backward(
                dout, q, k, v, out, lse, None, None, 130, 130, dropout, causal, state, state, scale=1e9
            )


OFFSETS = (0, 5, 135, 135, 212)


@pytest.mark.gpu
def test_ragged_on_a_gpu() -> None:
    """`attention_varlen`'s results and gradients, an empty sequence among them."""
    x, dout = on_gpu(212, 4, 64), on_gpu(212, 4, 64, 1)[..., 0]
    offsets = torch.tensor(OFFSETS, device="cuda", dtype=torch.int32)
    lengths = offsets, offsets, 130, 130, 0.0, True
    with sandbox.use_in_torch():
        out, lse, *state, _ = torch.ops.aten._flash_attention_forward(x, x, x, *lengths, False, window_size_left=50)
        found = torch.ops.aten._flash_attention_backward(dout, x, x, x, out, lse, *lengths, *state, window_size_left=50)
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    options = {"causal": True, "window": (50, None)}
    expected = sandbox.attention_varlen(*leaves, offsets, return_lse=True, **options)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    for a, b in zip(found, torch.autograd.grad(expected[0], leaves, dout), strict=True):
        assert (a - b).abs().max() < 2e-2


@pytest.mark.gpu
def test_nested_tensors_on_a_gpu() -> None:
    rows = [on_gpu(n, 4, 64) for n in (5, 130, 77)]
    jagged = [torch.nested.nested_tensor(rows, layout=torch.jagged).requires_grad_() for _ in range(3)]
    q, k, v = (x.transpose(1, 2) for x in jagged)
    with sandbox.use_in_torch(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = sdpa(q, k, v).transpose(1, 2)
        out.values().sum().backward()
    ragged = [torch.cat(rows).requires_grad_() for _ in range(3)]
    expected = sandbox.attention_varlen(*ragged, torch.tensor([0, 5, 135, 212], device="cuda", dtype=torch.int32))
    expected.sum().backward()
    assert torch.equal(out.values(), expected)
    for x, y in zip(jagged, ragged, strict=True):
        assert (x.grad.values() - y.grad).abs().max() < 2e-2
