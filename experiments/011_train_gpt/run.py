"""Trains a small character-level GPT with our attention and with PyTorch's. See README.md beside this file.

python experiments/011_train_gpt/run.py                   trains, appends rows to results.jsonl, draws the curves
python experiments/011_train_gpt/run.py --compile         also inside torch.compile
python experiments/011_train_gpt/run.py --task packed     documents, none of which looks at another; or dropout
python experiments/011_train_gpt/run.py --wrong           attention that is wrong on purpose in place of ours
python experiments/011_train_gpt/run.py plot              draws the curves again
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import curves
import errors
import torch
from contenders import contenders_for, emulated, sdpa, seen
from gpt import GPT, Attend, Config
from rounded import Roundings
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from sandbox.bench import environment
from sandbox.core import jsonl

HERE = Path(__file__).resolve().parent
CONFIGS = {
    "cuda": Config(layers=6, heads=6, width=384, length=512, batch=32, steps=60, rate=1e-3),
    "cpu": Config(layers=2, heads=2, width=64, length=64, batch=4, steps=50, rate=3e-3),
}
STARTS = 8  # other weights and other batches
WARM = 10  # steps before the clock starts
TASKS = ("causal", "dropout", "packed")
CUTS = 3  # of each window: into four documents


# ---- training


def read_text() -> tuple[Tensor, int]:
    """The texts as numbers of their characters, and how many different ones there are."""
    text = "".join(path.read_text() for path in sorted((HERE / "text").glob("*.txt")))
    characters = sorted(set(text))
    return torch.tensor([characters.index(c) for c in text]), len(characters)


def documents(config: Config, device: str) -> Tensor:
    """The ends of every step's documents, as cu_seqlens (steps, batch * (CUTS + 1) + 1): a window's are its own."""
    cuts = torch.rand(config.steps, config.batch, config.length - 1).argsort(-1)[..., :CUTS].sort(-1).values + 1
    begins = torch.arange(config.batch)[:, None] * config.length
    inner = torch.cat((begins.expand(config.steps, -1, 1), cuts + begins), -1).flatten(1)
    total = torch.full((config.steps, 1), config.batch * config.length)
    return torch.cat((inner, total), 1).to(torch.int32).to(device)


def train(
    attend: Attend,
    config: Config,
    device: str,
    task: str = "causal",
    compiler: str | None = None,
    start: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """The loss of every step, and milliseconds a step. The same config, task and start give the same weights and
    batches; `seed` is dropout's."""
    text, characters = read_text()
    text = text.to(device)
    torch.manual_seed(start)
    model = GPT(config, characters, attend).to(device)
    places = torch.randint(len(text) - config.length, (config.steps, config.batch, 1))
    windows = (places + torch.arange(config.length + 1)).to(device)
    ends = documents(config, device) if task == "packed" else None
    run = torch.compile(model, fullgraph=True, backend=compiler) if compiler else model
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.rate, total_steps=config.steps + 1, pct_start=0.1, cycle_momentum=False
    )
    half = layers_in(config, device)
    losses = torch.empty(config.steps, device=device)
    torch.manual_seed(seed)
    for step, window in enumerate(windows):
        if step == min(WARM, config.steps - 1):
            wait(device)
            began = time.perf_counter()
        tokens = text[window]
        with half:
            logits = run(tokens[:, :-1], None if ends is None else ends[step])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()  # stays there: reading it would wait for the GPU
    wait(device)
    seconds = (time.perf_counter() - began) / max(1, config.steps - WARM)
    return {"losses": losses.tolist(), "ms_per_step": seconds * 1e3}


def layers_in(config: Config, device: str) -> torch.autocast:
    return torch.autocast(device, getattr(torch, config.dtype), enabled=config.dtype != "float32")


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- the verb


def measure_errors(contenders: dict[str, Attend], config: Config, device: str, task: str) -> dict[str, Any]:
    """In every layer of the first and the last step, on what SDPA's math kernel has come to there."""
    attend, calls = errors.watched(sdpa(SDPBackend.MATH, 0.0), config.layers, (0, config.steps - 1))
    train(attend, config, device, task)
    alone = {name: attend for name, attend in contenders.items() if "compiled" not in name}
    alone["FlashAttention-2"] = emulated(Roundings())  # which not every device has for every task
    with layers_in(config, device):
        found = [errors.errors(alone, call, seen) for call in calls]
    for name in found[0]:
        figures = (f"{n} {max(f[name]['rms'][n] for f in found):.1e}" for n in errors.NAMES)
        print(f"{name:20}  largest error, root mean square, of {', '.join(figures)}", flush=True)
    verdict = errors.judge(found)
    for name, ratio in verdict["rms"].items():
        said = f"{ratio:.2f} of PyTorch's largest; at most {verdict['bias'][name]:.2f} of one is bias"
        print(f"{name:20}  errors at most {said}", flush=True)
    where = [{"step": call.step, "layer": call.layer} for call in calls]
    return {**verdict, "calls": [{**at, **f} for at, f in zip(where, found, strict=True)]}


def measure_curves(
    contenders: dict[str, Attend], config: Config, device: str, task: str, starts: int, write: Callable[..., None]
) -> dict[str, Any]:
    """Trains every contender from each start; one that refuses is left out."""
    losses: list[dict[str, list[float]]] = [{} for _ in range(starts)]
    times: dict[str, list[float]] = {}
    for start in range(starts):
        for name, attend in list(contenders.items()):
            compiler = ("inductor" if device == "cuda" else "aot_eager") if name.endswith("compiled") else None
            try:
                row = train(
                    attend, config, device, task, compiler, start, seed=start + 1000 * name.endswith("reseeded")
                )
            except RuntimeError as error:
                if name.startswith("ours") or start > 0:
                    raise
                print(f"{name}: left out, it refuses: {str(error).splitlines()[0]}", flush=True)
                del contenders[name]
                continue
            losses[start][name] = row["losses"]
            times.setdefault(name, []).append(row["ms_per_step"])
            write({"contender": name, "start": start, **row})
            end = statistics.fmean(row["losses"][-WARM:])
            said = f"loss {row['losses'][0]:.4f} … {end:.4f}  {row['ms_per_step']:.1f} ms a step"
            print(f"start {start}  {name:20}  {said}", flush=True)
    for name, ms in times.items():
        print(f"{name:20}  {statistics.median(ms):.2f} ms a step, {min(ms):.2f} at best", flush=True)
    verdict = curves.judge(losses)
    for pair, value in verdict["apart"].items():
        print(f"mean |difference|  {value:.2e}  {pair}")
    for name, its in verdict["standings"].items():
        off = f", give or take a factor of {its['off']:.2f}" if its["off"] else ""
        print(f"{name:20}  {its['ratio']:.2f} of the noise, {its['noise']:.2e}{off}", flush=True)
    return verdict


def measure(config: Config, device: str, task: str, compiled: bool, wrong: bool, starts: int, out: Path) -> bool:
    """Errors, but with dropout, and curves; a row for each curve, and one for each verdict."""
    contenders = contenders_for(task, device, compiled, wrong)
    head = {"backend": device, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "config": dataclasses.asdict(config)}
    where = {**head, "task": task, **environment.describe()}

    def write(row: dict[str, Any]) -> None:
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps({**row, **where}) + "\n")

    verdicts = []
    if task != "dropout":  # no two drop the same elements
        verdicts.append(measure_errors(contenders, config, device, task))
        write({"contender": "verdict on errors", **verdicts[-1]})
    verdicts.append(measure_curves(contenders, config, device, task, starts, write))
    write({"contender": "verdict", **verdicts[-1]})
    return all(verdict["ok"] for verdict in verdicts)


def main(argv: list[str] | None = None) -> int:
    """1 when errors are larger than PyTorch's own or curves do not coincide."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["measure", "plot"], default="measure")
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="also inside torch.compile")
    parser.add_argument("--task", choices=TASKS, default="causal")
    parser.add_argument("--wrong", action="store_true", help="attention that is wrong on purpose in place of ours")
    parser.add_argument("--steps", type=int, help="instead of the config's")
    parser.add_argument("--starts", type=int, default=STARTS, help="of one alone the verdict says little")
    parser.add_argument("--no-picture", action="store_true", help="run.py plot draws later, elsewhere")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for rows and pictures")
    options = parser.parse_args(argv)
    config, ok = CONFIGS[options.backend], True
    if options.what == "measure":
        config = dataclasses.replace(config, steps=options.steps or config.steps)
        ok = measure(config, options.backend, options.task, options.compile, options.wrong, options.starts, options.out)
        if options.no_picture:
            return 0 if ok else 1
    rows = jsonl.read(options.out / "results.jsonl")
    latest = {(row["backend"], row.get("task", "causal")): row["time"] for row in rows}
    for (backend, task), when in latest.items():
        run = [
            row
            for row in rows
            if (row["backend"], row["time"], row.get("start", 0)) == (backend, when, 0) and "losses" in row
        ]
        curves.draw(run, options.out / ("_".join(["curves", backend, *([task] if task != "causal" else [])])))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
