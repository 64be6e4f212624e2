"""Models of other libraries with random weights, and the attention implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sandbox


@dataclass(frozen=True)
class Size:
    """Size of a model and its batch; a ViT has (`image` / 16)² patches and one more token."""

    layers: int
    heads: int
    width: int
    length: int
    batch: int
    image: int
    vocabulary: int = 128

    def text(self) -> dict[str, Any]:
        """Settings of a decoder in transformers' terms; large weights, so that the largest logit is rarely a tie."""
        return {
            "vocab_size": self.vocabulary, "max_position_embeddings": 1024, "hidden_size": self.width,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "initializer_range": 0.1,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        }  # fmt: skip


SIZES = {"cuda": Size(4, 8, 512, 512, 8, 224), "cpu": Size(2, 4, 64, 32, 2, 64)}


def gpt2(size: Size, how: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(**size.text(), attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=how)


def llama(size: Size, how: str) -> nn.Module:
    """Grouped heads: 2 key/value heads."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    groups = {"num_key_value_heads": 2, "intermediate_size": 3 * size.width}
    return AutoModelForCausalLM.from_config(LlamaConfig(**size.text(), **groups), attn_implementation=how)


def vit(size: Size, how: str) -> nn.Module:
    from transformers import AutoModelForImageClassification, ViTConfig

    config = ViTConfig(
        hidden_size=size.width, num_hidden_layers=size.layers, num_attention_heads=size.heads, num_labels=10,
        intermediate_size=4 * size.width, image_size=size.image, initializer_range=0.1,
    )  # fmt: skip
    return AutoModelForImageClassification.from_config(config, attn_implementation=how)


class TimmViT(nn.Module):
    """timm's ViT, with its own attention or PyTorch's."""

    def __init__(self, size: Size, how: str):
        super().__init__()
        from timm.layers import set_fused_attn
        from timm.models.vision_transformer import VisionTransformer

        set_fused_attn(how != "eager")
        self.inner = VisionTransformer(
            img_size=size.image, embed_dim=size.width, depth=size.layers, num_heads=size.heads, num_classes=10
        )

    def forward(self, pixel_values: Tensor) -> Any:
        return self.inner(pixel_values)


MODELS: dict[str, Callable[[Size, str], nn.Module]] = {"GPT-2": gpt2, "Llama": llama, "ViT": vit, "ViT, timm": TimmViT}
TEXT = ("GPT-2", "Llama")

# attn_implementation, and PyTorch's backend of scaled_dot_product_attention
CONTENDERS = {
    "eager": ("eager", SDPBackend.MATH),
    "sdpa-flash": ("sdpa", SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": ("sdpa", SDPBackend.EFFICIENT_ATTENTION),
    "sdpa-math": ("sdpa", SDPBackend.MATH),
    "slot": ("sdpa", SDPBackend.FLASH_ATTENTION),
    "registered": ("sandbox", SDPBackend.MATH),
}
OURS = ("slot", "registered")
ON_CPU = {"kernel": "fwd_minimal", "backward": "bwd_minimal"}  # the fastest on the CPU backend


def contenders_of(model: str, device: str) -> list[str]:
    """The implementations that support the model: PyTorch's efficient kernel has no grouped heads, timm no registry."""
    left_out = {"sdpa-efficient"} if device == "cpu" or model == "Llama" else set()
    if model == "ViT, timm":
        left_out.add("registered")
    return [name for name in CONTENDERS if name not in left_out]


def compiled_of(model: str, device: str) -> list[str]:
    """The implementations to compile. For torch.compile transformers passes the causal mask as a tensor to SDPA, which
    PyTorch's flash operators do not support, so that the slot is not used."""
    wanted = ("sdpa-math", "registered") if model in TEXT else ("sdpa-flash", *OURS)
    return [name for name in contenders_of(model, device) if name in wanted]


@contextmanager
def attention_of(contender: str, device: str) -> Iterator[None]:
    """Selects the kernels of scaled_dot_product_attention."""
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(CONTENDERS[contender][1]))
        if contender == "slot":
            stack.enter_context(sandbox.use_in_torch(**(ON_CPU if device == "cpu" else {})))
        yield


def made(model: str, contender: str, size: Size, device: str, start: int = 0) -> nn.Module:
    """The same weights for every contender; `start` is their seed."""
    torch.manual_seed(start)
    how = CONTENDERS[contender][0]
    if how == "sandbox":
        from sandbox.integrations import transformers

        transformers.register(kernel=ON_CPU["kernel"] if device == "cpu" else None)
    return MODELS[model](size, how).to(device)


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    found = model(pixel_values=x) if x.is_floating_point() else model(input_ids=x, use_cache=False)
    return found if isinstance(found, Tensor) else found.logits


def batch(model: str, size: Size, device: str, step: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets): texts in which each token is the sum of the last two, or noise and random labels."""
    generator = torch.Generator().manual_seed(step)
    if model not in TEXT:
        pixels = torch.randn(size.batch, 3, size.image, size.image, generator=generator)
        return pixels.to(device), torch.randint(10, (size.batch,), generator=generator).to(device)
    begin = torch.randint(size.vocabulary, (size.batch, 2), generator=generator).to(device)
    tokens = [*begin.unbind(1)]
    for _ in range(size.length - 1):
        tokens.append((tokens[-1] + tokens[-2]) % size.vocabulary)
    text = torch.stack(tokens, 1)
    return text[:, :-1], text[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(model, x).float().flatten(0, -2), y.flatten())


def shorter(size: Size) -> Size:
    """The size for decoding."""
    return replace(size, length=size.length // 4)
