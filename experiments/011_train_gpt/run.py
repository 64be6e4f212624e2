"""Trains a small character-level GPT with our attention and with PyTorch's. See README.md beside this file.

python experiments/011_train_gpt/run.py                   trains, appends rows to results.jsonl, draws the curves
python experiments/011_train_gpt/run.py --compile         also inside torch.compile
python experiments/011_train_gpt/run.py plot              draws the curves again
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from curves import FACTOR, draw, judge
from gpt import GPT, Attend, Config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sandbox
from sandbox.bench import environment
from sandbox.core import jsonl

HERE = Path(__file__).resolve().parent
CONFIGS = {
    "cuda": Config(layers=6, heads=6, width=384, length=512, batch=32, steps=500, rate=1e-3),
    "cpu": Config(layers=2, heads=2, width=64, length=64, batch=4, steps=100, rate=3e-3),
}
WARM = 10  # steps before the clock starts


# ---- attention: (B, H, S, D) each, causal


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sandbox.attention(q, k, v, causal=True)


def sdpa(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As textbooks write it: scores and probabilities are rounded to the dtype too."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT) * q.shape[3] ** -0.5
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).to(v.dtype) @ v


# ---- training


def read_text() -> tuple[Tensor, int]:
    """The texts as numbers of their characters, and how many different ones there are."""
    text = "".join(path.read_text() for path in sorted((HERE / "text").glob("*.txt")))
    characters = sorted(set(text))
    return torch.tensor([characters.index(c) for c in text]), len(characters)


def train(attend: Attend, config: Config, device: str, compiler: str | None = None) -> dict[str, Any]:
    """The loss of every step, and milliseconds a step. The same config gives the same weights and batches."""
    text, characters = read_text()
    text = text.to(device)
    torch.manual_seed(0)
    model = GPT(config, characters, attend).to(device)
    starts = torch.randint(len(text) - config.length, (config.steps, config.batch, 1))
    windows = (starts + torch.arange(config.length + 1)).to(device)
    run = torch.compile(model, fullgraph=True, backend=compiler) if compiler else model
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.rate, total_steps=config.steps + 1, pct_start=0.1, cycle_momentum=False
    )
    half = torch.autocast(device, getattr(torch, config.dtype), enabled=config.dtype != "float32")
    losses = torch.empty(config.steps, device=device)
    for step, window in enumerate(windows):
        if step == min(WARM, config.steps - 1):
            wait(device)
            start = time.perf_counter()
        tokens = text[window]
        with half:
            logits = run(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()  # stays there: reading it would wait for the GPU
    wait(device)
    seconds = (time.perf_counter() - start) / max(1, config.steps - WARM)
    return {"losses": losses.tolist(), "ms_per_step": seconds * 1e3}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- the verb


def measure(config: Config, device: str, compiled: bool, out: Path) -> bool:
    """Trains every contender from the same start and judges; a row for each, and one for the verdict."""
    contenders: dict[str, Attend] = {"ours": ours}
    if compiled:
        contenders["ours, compiled"] = ours
    contenders |= {"sdpa-flash": sdpa(SDPBackend.FLASH_ATTENTION), "sdpa-math": sdpa(SDPBackend.MATH)}
    if device == "cuda":
        contenders["sdpa-efficient"] = sdpa(SDPBackend.EFFICIENT_ATTENTION)
    contenders["plain"] = plain
    if compiled:
        contenders["sdpa-flash, compiled"] = contenders["sdpa-flash"]
    head = {"backend": device, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "config": dataclasses.asdict(config)}
    where = {**head, **environment.describe()}
    curves = {}
    with (out / "results.jsonl").open("a") as file:
        for name, attend in contenders.items():
            compiler = ("inductor" if device == "cuda" else "aot_eager") if name.endswith("compiled") else None
            row = {"contender": name, **train(attend, config, device, compiler)}
            curves[name] = losses = row["losses"]
            file.write(json.dumps({**row, **where}) + "\n")
            end = statistics.fmean(losses[-WARM:])
            print(f"{name:20}  loss {losses[0]:.4f} … {end:.4f}  {row['ms_per_step']:.1f} ms a step", flush=True)
        verdict = judge(curves)
        file.write(json.dumps({"contender": "verdict", **verdict, **where}) + "\n")
    for pair, value in verdict["apart"].items():
        print(f"mean |difference|  {value:.2e}  {pair}")
    for name, ratio in verdict["ratios"].items():
        print(f"{name}: {ratio:.2f} of the noise, {verdict['noise'][name]:.2e}; up to {FACTOR} the curves coincide")
    return verdict["ok"]


def main(argv: list[str] | None = None) -> int:
    """1 when the curves do not coincide."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["measure", "plot"], default="measure")
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="also inside torch.compile")
    parser.add_argument("--steps", type=int, help="instead of the config's")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for rows and pictures")
    options = parser.parse_args(argv)
    config, ok = CONFIGS[options.backend], True
    if options.what == "measure":
        config = dataclasses.replace(config, steps=options.steps or config.steps)
        ok = measure(config, options.backend, options.compile, options.out)
    rows = jsonl.read(options.out / "results.jsonl")
    latest = {row["backend"]: row["time"] for row in rows}
    for backend, when in latest.items():
        run = [row for row in rows if (row["backend"], row["time"]) == (backend, when) and "losses" in row]
        draw(run, options.out / f"curves_{backend}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
