"""Tokens per second of greedy generation, one CUDA graph per step, beside PyTorch's attention. See README.md.

python experiments/021_generate/run.py                      needs a GPU
python experiments/021_generate/run.py --backend cpu        a tiny model, to test the script
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model import Attend, Config, Generator
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sandbox
from sandbox.bench import environment
from sandbox.core import jsonl

HERE = Path(__file__).resolve().parent
LARGE = Config(layers=24, heads=32, groups=8, width=128, room=4096, words=32000)
TINY = Config(layers=2, heads=4, groups=2, width=16, room=64, words=50, dtype=torch.float16)
PAGE = 16


def ours(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    return sandbox.attention(q, k, v, causal=True, key_lengths=lengths)


def in_pages(table: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The same cache as a pool of pages in the order of the table."""
    if q.shape[2] > 1:
        return ours(q, k, v, lengths)
    k, v = (x.view(-1, PAGE, *x.shape[2:]) for x in (k, v))
    return sandbox.attention_paged(q, k, v, table, lengths, causal=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The prefill causal; a decoding step with a mask of the valid keys."""
    n, room = q.shape[2], k.shape[1]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if n > 1:
        return scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], is_causal=True, enable_gqa=True)
    counts = torch.arange(room, device=q.device) < lengths[:, None, None, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=counts, enable_gqa=True)


def contenders(c: Config, B: int, device: str) -> dict[str, Attend]:
    table = torch.arange(B * c.room // PAGE, dtype=torch.int32, device=device).view(B, -1)
    return {"fwd_decode": ours, "pages of 16": partial(in_pages, table), "sdpa": sdpa}


def error_of_a_step(model: Generator, prompt: Tensor, attend: Attend) -> float:
    """Largest difference of the logits of a step with the cache (prefill of all but the last token, then the last) from
    those of the complete text, relative to the largest logit."""
    model.lengths.zero_()
    whole = model(prompt, sdpa)
    model.lengths.zero_()
    model(prompt[:, :-1], attend)
    step = model(prompt[:, -1:], attend)
    return float((step - whole).abs().max() / whole.abs().max())


def stepper(model: Generator, prompt: Tensor, attend: Attend) -> Callable[[], Tensor]:
    """Prefills; returns a function that generates one more token of each text, on a GPU by replaying a CUDA graph."""
    model.lengths.zero_()
    tokens = model(prompt, attend).argmax(-1, keepdim=True)

    def step() -> Tensor:
        tokens.copy_(model(tokens, attend).argmax(-1, keepdim=True))
        return tokens

    if prompt.device.type == "cpu":
        return step
    lengths, first = model.lengths.clone(), tokens.clone()
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    model.lengths.copy_(lengths)
    tokens.copy_(first)

    def replay() -> Tensor:
        graph.replay()
        return tokens

    return replay


def seconds(work: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(c: Config, B: int, before: int, steps: int, device: str, rounds: int) -> list[dict[str, Any]]:
    """A row per contender; the contenders generate interleaved."""
    torch.manual_seed(0)
    model, prompt = Generator(c, B, device), torch.randint(c.words, (B, before), device=device)
    named = contenders(c, B, device)
    errors = {name: error_of_a_step(model, prompt[:, : min(before, 33)], attend) for name, attend in named.items()}
    times: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "step": []} for name in named}
    for _ in range(rounds):
        for name, attend in named.items():
            step = stepper(model, prompt, attend)
            took = seconds(lambda step=step: [step() for _ in range(steps)], device)
            times[name]["step"].append(took / steps)
            model.lengths.zero_()
            times[name]["prefill"].append(seconds(lambda attend=attend: model(prompt, attend), device))
    rows = []
    for name, of in times.items():
        prefill, step = (statistics.median(of[what]) for what in ("prefill", "step"))
        rows.append({"contender": name, "B": B, "before": before, "steps": steps, "layers": c.layers,
                     "heads": f"{c.heads}/{c.groups}", "D": c.width, "room": c.room, "error": errors[name],
                     "ok": errors[name] < 0.03, "prefill_ms": 1e3 * prefill, "step_ms": 1e3 * step,
                     "tokens_a_second": B / step})  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args(argv)
    tiny = options.backend == "cpu"
    runs = [(TINY, 2, 9, 2)] if tiny else [(LARGE, B, 2048, 128) for B in (8, 32)]
    right = True
    for c, B, before, steps in runs:
        for row in measure(c, B, before, steps, options.backend, rounds=1 if tiny else options.rounds):
            right = right and row["ok"]
            jsonl.append(options.out / "results.jsonl", {**row, **environment.describe()})
            print(f"{row['contender']:12} B{B}: {row['tokens_a_second']:.0f} tokens per second, "
                  f"prefill {row['prefill_ms']:.1f} ms, error {row['error']:.1e}")  # fmt: skip
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
