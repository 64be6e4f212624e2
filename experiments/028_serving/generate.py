"""Continuous batching of a small Llama with random weights: new tokens per second, and agreement of the tokens.

PYTHONPATH=… python experiments/028_serving/generate.py [--seconds 60]      needs a GPU and transformers

Every attn_implementation generates each batch of prompts, after a warm-up with the first one; its speed is the median
of the batches, and the agreement that of all requests, with its standard error. `difference`: that of the agreement to
paged|eager's, request by request. One that would begin after `seconds` is skipped.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

RUNS: tuple[tuple[str, dict[str, bool]], ...] = (
    ("paged|sdpa", {}),
    ("paged|eager", {}),
    ("paged|sandbox", {}),
    ("paged|sandbox", {"use_cuda_graph": True, "use_async_batching": True}),
    ("paged|eager", {"use_cuda_graph": True, "use_async_batching": True}),
    ("paged|sdpa", {"use_cuda_graph": True, "use_async_batching": True}),
    ("paged|flash_attention_2", {}),
    ("paged|flash_attention_3", {}),
    ("paged|flash_attention_4", {}),
)
START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:4.0f} s] {text}", flush=True)


def model_of(given: argparse.Namespace, device: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=given.hidden, intermediate_size=2 * given.hidden, num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 128, num_key_value_heads=max(given.hidden // 512, 1),
        max_position_embeddings=8192,
    )  # fmt: skip
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    return made.eval().to(device)


def generated(model: Any, prompts: list[list[int]], new: int, how: str, options: dict[str, bool]) -> list[list[int]]:
    """The new tokens of each prompt. Raises RuntimeError with the first request's error."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model.set_attn_implementation(how)
    pages = sum(-(-(len(prompt) + new) // 64) for prompt in prompts) + 64
    batching = ContinuousBatchingConfig(block_size=64, num_blocks=pages, max_batch_tokens=2048, **options)
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(
        prompts, generation_config=greedy, continuous_batching_config=batching, progress_bar=False
    )
    if errors := [one.error for one in found.values() if one.error]:
        raise RuntimeError(str(errors[0]))
    return [one.generated_tokens for one in found.values()]


def agreements(tokens: list[list[int]], others: list[list[int]]) -> list[float]:
    """The share of each request's tokens before the first difference."""
    pairs = list(zip(tokens, others, strict=True))
    same = [next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b)) for a, b in pairs]
    return [n / max(len(b), 1) for n, (_, b) in zip(same, pairs, strict=True)]


def mean(shares: list[float]) -> str:
    """The mean with its standard error."""
    return f"{statistics.fmean(shares):.3f} ± {statistics.stdev(shares) / math.sqrt(len(shares)):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--longest", type=int, default=1500, help="Longest prompt.")
    parser.add_argument("--new", type=int, default=48, help="New tokens per request.")
    parser.add_argument("--batches", type=int, default=8, help="Batches of requests.")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()

    import torch
    import transformers

    from sandbox.integrations import transformers as integration

    say(f"transformers {transformers.__version__}, PyTorch {torch.__version__}")
    transformers.logging.set_verbosity_error()
    integration.register()
    model = model_of(given, given.device)
    say("the model is there")
    draw = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(given.batches):
        lengths = torch.randint(min(50, given.longest), given.longest + 1, (given.requests,), generator=draw)
        batches.append([torch.randint(1, 32000, (int(n),), generator=draw).tolist() for n in lengths])
    reference: list[list[int]] = []
    eager: list[float] = []
    for how, options in RUNS:
        if time.monotonic() - START > given.seconds:
            break
        seconds, tokens = [], []
        try:
            generated(model, batches[0], given.new, how, options)
            for prompts in batches:
                begin = time.monotonic()
                tokens += generated(model, prompts, given.new, how, options)
                seconds.append(time.monotonic() - begin)
        except Exception as error:  # an implementation that is not installed
            say(f"{how} {options}: {type(error).__name__}: {str(error)[:300]}")
            continue
        reference = reference or tokens
        shares = agreements(tokens, reference)
        eager = shares if how == "paged|eager" else eager
        difference = mean([a - b for a, b in zip(shares, eager, strict=True)]) if eager else "-"
        speed = given.requests * given.new / statistics.median(seconds)
        say(
            f"{how:24s} {' '.join(options):36s} {speed:8.0f} tokens/s, "
            f"agreement with paged|sdpa {mean(shares)}, difference {difference}"
        )


if __name__ == "__main__":
    main()
