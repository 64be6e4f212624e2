"""attn_implementation="sandbox": what transformers' own implementations compute, where transformers is installed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from sandbox.integrations import transformers as integration  # noqa: E402

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}
WINDOW = {"sliding_window": 5, "head_dim": 8}
CONFIGS = {
    "GPT-2": lambda: transformers.GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4),
    "Llama": lambda: transformers.LlamaConfig(**GROUPED),
    "Mistral, sliding window": lambda: transformers.MistralConfig(**GROUPED, sliding_window=5),
    "Gemma 2, softcap and window": lambda: transformers.Gemma2Config(**GROUPED, **WINDOW, attn_logit_softcapping=5.0),
    "gpt-oss, sinks and window": lambda: transformers.GptOssConfig(
        **GROUPED, **WINDOW, num_local_experts=2, num_experts_per_tok=1
    ),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def made(config, how: str):
    torch.manual_seed(0)
    settings = config()
    settings._attn_implementation = how
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation=how).eval()
    if hasattr(model.config, "num_local_experts"):
        for name, weight in model.named_parameters():
            if "sinks" in name:
                torch.nn.init.normal_(weight)
    return model


@pytest.fixture(autouse=True)
def _registered():
    integration.register(kernel="fwd_minimal")


def padded(side: str) -> dict[str, torch.Tensor]:
    """Two texts of 13 and 9 tokens; `side` of the shorter one is padded."""
    ids = torch.randint(1, 64, (2, 13), generator=torch.Generator().manual_seed(0))
    seen = torch.ones(2, 13, dtype=torch.long)
    if side:
        seen[1, slice(0, 4) if side == "left" else slice(9, 13)] = 0
    return {"input_ids": ids, "attention_mask": seen}


@pytest.mark.parametrize("side", ["", "left", "right"])
@every_config
def test_logits_and_gradients(config, side: str) -> None:
    inputs, found = padded(side), {}
    for how in ("eager", "sandbox"):
        model = made(config, how)
        logits = model(**inputs).logits[inputs["attention_mask"].bool()]
        logits.square().mean().backward()
        found[how] = [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for x, y in zip(found["sandbox"], found["eager"], strict=True):
        assert (x - y).abs().max() <= 2e-4 * max(1, float(y.abs().max()))
    assert not torch.equal(found["sandbox"][0], found["eager"][0])  # not the same code


@every_config
def test_greedy_decoding(config) -> None:
    """With caches, dynamic and static, and texts padded on the left."""
    inputs = padded("left")
    expected = made(config, "eager").generate(**inputs, max_new_tokens=6, do_sample=False)
    for cache in ("dynamic", "static"):
        model = made(config, "sandbox")
        found = model.generate(**inputs, max_new_tokens=6, do_sample=False, cache_implementation=cache)
        assert torch.equal(found, expected)


PAGED_CONFIGS = {name: config for name, config in CONFIGS.items() if name != "GPT-2"}  # "paged|eager" does not take it


@pytest.mark.parametrize("config", PAGED_CONFIGS.values(), ids=PAGED_CONFIGS)
def test_continuous_batching(config) -> None:
    """Prompts in chunks and single tokens in one batch, over pages; sliding windows overwrite their oldest keys."""
    from transformers.generation import ContinuousBatchingConfig

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 64, (n,), generator=generator).tolist() for n in (13, 5, 40, 1)]
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    found = {}
    for name in ("paged|eager", "paged|sandbox"):
        batching = ContinuousBatchingConfig(block_size=4, num_blocks=64, max_batch_tokens=24)
        results = made(config, name).generate_batch(
            prompts, generation_config=transformers.GenerationConfig(**how), continuous_batching_config=batching
        )
        assert [result.error for result in results.values()] == [None] * len(prompts)
        found[name] = [result.generated_tokens for result in results.values()]
    assert found["paged|sandbox"] == found["paged|eager"]
