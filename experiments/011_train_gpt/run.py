"""Trains a small character-level GPT with sandbox.attention and with PyTorch's attention. See README.md.

python experiments/011_train_gpt/run.py                   trains, appends rows to results.jsonl, draws the curves
python experiments/011_train_gpt/run.py --compile         also inside torch.compile
python experiments/011_train_gpt/run.py --task packed     packed documents; or dropout
python experiments/011_train_gpt/run.py --wrong           wrong variants in place of ours
python experiments/011_train_gpt/run.py time              time of a step; --length 4096 --task dropout
python experiments/011_train_gpt/run.py plot              draws the curves again
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import curves
import errors
import torch
from contenders import contenders_for, emulated, sdpa, visible
from gpt import GPT, Attend, Config
from rounded import Roundings
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from sandbox.bench import environment, timing
from sandbox.bench.timing import Limits, Stopwatch, Timed
from sandbox.core import jsonl

HERE = Path(__file__).resolve().parent
CONFIGS = {
    "cuda": Config(layers=6, heads=6, width=384, length=512, batch=32, steps=60, rate=1e-3),
    "cpu": Config(layers=2, heads=2, width=64, length=64, batch=4, steps=50, rate=3e-3),
}
STARTS = 8  # random weights and batches
WARM = 10  # steps before the clock starts
TASKS = ("causal", "dropout", "packed")
CUTS = 3  # per window: four documents
UNTIMED = ("plain", "sdpa-math")  # too slow for training
LIMITS = Limits(noise=0.001, rounds=24, seconds=2.0, warmup=2)  # of the time of a step


# ---- training


def read_text() -> tuple[Tensor, int]:
    """The texts as indices of characters, and the number of distinct characters."""
    text = "".join(path.read_text() for path in sorted((HERE / "text").glob("*.txt")))
    characters = sorted(set(text))
    return torch.tensor([characters.index(c) for c in text]), len(characters)


def documents(config: Config, device: str) -> Tensor:
    """The ends of the documents of every step, as cu_seqlens (steps, batch * (CUTS + 1) + 1)."""
    cuts = torch.rand(config.steps, config.batch, config.length - 1).argsort(-1)[..., :CUTS].sort(-1).values + 1
    begins = torch.arange(config.batch)[:, None] * config.length
    inner = torch.cat((begins.expand(config.steps, -1, 1), cuts + begins), -1).flatten(1)
    total = torch.full((config.steps, 1), config.batch * config.length)
    return torch.cat((inner, total), 1).to(torch.int32).to(device)


class Training:
    """A model, its batches and its optimizer. The same config, task and start give the same weights and batches."""

    def __init__(
        self, attend: Attend, config: Config, device: str, task: str, compiler: str | None = None, start: int = 0
    ):
        text, characters = read_text()
        torch.manual_seed(start)
        model = GPT(config, characters, attend).to(device)
        places = torch.randint(len(text) - config.length, (config.steps, config.batch, 1))
        windows = (places + torch.arange(config.length + 1)).to(device)
        self.windows, self.text = windows, text.to(device)
        self.ends = documents(config, device) if task == "packed" else None
        self.parameters = list(model.parameters())
        self.model = torch.compile(model, fullgraph=True, backend=compiler) if compiler else model
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.rate, betas=(0.9, 0.95), weight_decay=0.1)
        self.half = layers_in(config, device)

    def step(self, number: int) -> Tensor:
        """The loss on the device; reading it would synchronise."""
        tokens = self.text[self.windows[number]]
        with self.half:
            logits = self.model(tokens[:, :-1], None if self.ends is None else self.ends[number])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return loss.detach()


def train(
    attend: Attend,
    config: Config,
    device: str,
    task: str = "causal",
    compiler: str | None = None,
    start: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """The loss of every step, and milliseconds per step; `seed` is the seed of dropout."""
    training = Training(attend, config, device, task, compiler, start)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        training.optimizer, config.rate, total_steps=config.steps + 1, pct_start=0.1, cycle_momentum=False
    )
    losses = torch.empty(config.steps, device=device)
    torch.manual_seed(seed)
    for step in range(config.steps):
        if step == min(WARM, config.steps - 1):
            wait(device)
            began = time.perf_counter()
        losses[step] = training.step(step)
        schedule.step()
    wait(device)
    seconds = (time.perf_counter() - began) / max(1, config.steps - WARM)
    return {"losses": losses.tolist(), "ms_per_step": seconds * 1e3}


def layers_in(config: Config, device: str) -> torch.autocast:
    return torch.autocast(device, getattr(torch, config.dtype), enabled=config.dtype != "float32")


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- the time of a step


class Wall:
    """Steps timed by the host clock, as the host launches them."""

    STEPS = 3  # per sample

    def __init__(self, device: str):
        self.device = device

    def ready(self, step: Callable[[], object]) -> Timed:
        step()
        return Timed(lambda: [step() for _ in range(self.STEPS)], self.STEPS)

    def sample(self, timed: Sequence[Timed]) -> list[float]:
        return [self._seconds(each) / each.launches for each in timed]

    def _seconds(self, each: Timed) -> float:
        self.synchronize()
        began = time.perf_counter()
        each.call()
        self.synchronize()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        wait(self.device)


class Queued(timing.Events):
    """Steps that are queued completely before the GPU begins: GPU time without host time."""

    LEAD = 80_000_000  # cycles, some 40 ms

    def sample(self, timed: Sequence[Timed]) -> list[float]:
        return [self._seconds(each) for each in timed]

    def _seconds(self, each: Timed) -> float:
        torch.cuda._sleep(self.LEAD)
        before, after = self._between_events(each.call)
        self.synchronize()
        return before.elapsed_time(after) * 1e-3


def measure_times(
    contenders: dict[str, Attend], config: Config, device: str, task: str, write: Callable[..., None]
) -> None:
    """Whole steps, contenders interleaved: launched and queued. A contender that raises is omitted."""
    stopwatches: dict[str, Stopwatch] = {"launched": Wall(device)}
    if device == "cuda":
        stopwatches["queued"] = Queued()
    for how, stopwatch in stopwatches.items():
        ready: dict[str, Timed] = {}
        for name, attend in contenders.items():
            if name.startswith(UNTIMED):
                continue
            training = Training(attend, config, device, task)
            try:
                ready[name] = stopwatch.ready(partial(training.step, 0))
            except RuntimeError as error:
                print(f"{name}: omitted: {str(error).splitlines()[0]}", flush=True)
        for name, samples in timing.measure(ready, stopwatch, LIMITS).items():
            found = timing.Timing.of(samples)
            ms = {key: value * 1e3 for key, value in dataclasses.asdict(found).items() if key in ("median", "q1", "q3")}
            write({"contender": name, "step": how, "ms": ms, "samples": found.samples})
            text = f"{ms['median']:.3f} ms per step ({ms['q1']:.3f} … {ms['q3']:.3f}, {found.samples} samples)"
            print(f"{task}, S {config.length}, {how:8} {name:20}  {text}", flush=True)


# ---- the command


def measure_errors(contenders: dict[str, Attend], config: Config, device: str, task: str) -> dict[str, Any]:
    """Errors in every layer of the first and the last step of a training with SDPA's math kernel."""
    attend, calls = errors.recorded(sdpa(SDPBackend.MATH, 0.0), config.layers, (0, config.steps - 1))
    train(attend, config, device, task)
    alone = {name: attend for name, attend in contenders.items() if "compiled" not in name}
    alone["FlashAttention-2"] = emulated(Roundings())  # not every device supports it for every task
    with layers_in(config, device):
        found = [errors.errors(alone, call, visible) for call in calls]
    for name in found[0]:
        figures = (f"{n} {max(f[name]['rms'][n] for f in found):.1e}" for n in errors.NAMES)
        print(f"{name:20}  largest RMS error of {', '.join(figures)}", flush=True)
    verdict = errors.compare(found)
    for name, ratio in verdict["rms"].items():
        text = f"{ratio:.2f} of PyTorch's largest; bias at most {verdict['bias'][name]:.2f} of an error"
        print(f"{name:20}  errors at most {text}", flush=True)
    where = [{"step": call.step, "layer": call.layer} for call in calls]
    return {**verdict, "calls": [{**at, **f} for at, f in zip(where, found, strict=True)]}


def measure_curves(
    contenders: dict[str, Attend],
    config: Config,
    device: str,
    task: str,
    starts: int,
    seconds: float,
    write: Callable[..., None],
) -> dict[str, Any]:
    """Trains every contender from each start that begins within `seconds`. A contender that raises is omitted."""
    losses: list[dict[str, list[float]]] = []
    times: dict[str, list[float]] = {}
    end = time.monotonic() + seconds
    for start in range(starts):
        if start and time.monotonic() > end:
            break
        losses.append({})
        for name, attend in list(contenders.items()):
            compiler = ("inductor" if device == "cuda" else "aot_eager") if name.endswith("compiled") else None
            try:
                row = train(
                    attend, config, device, task, compiler, start, seed=start + 1000 * name.endswith("reseeded")
                )
            except RuntimeError as error:
                if name.startswith("ours") or start > 0:
                    raise
                print(f"{name}: omitted: {str(error).splitlines()[0]}", flush=True)
                del contenders[name]
                continue
            losses[start][name] = row["losses"]
            times.setdefault(name, []).append(row["ms_per_step"])
            write({"contender": name, "start": start, **row})
            last = statistics.fmean(row["losses"][-WARM:])
            text = f"loss {row['losses'][0]:.4f} … {last:.4f}  {row['ms_per_step']:.1f} ms per step"
            print(f"start {start}  {name:20}  {text}", flush=True)
    for name, ms in times.items():
        print(f"{name:20}  {statistics.median(ms):.2f} ms per step, {min(ms):.2f} at best", flush=True)
    verdict = curves.compare(losses)
    for pair, value in verdict["apart"].items():
        print(f"mean |difference|  {value:.2e}  {pair}")
    for name, its in verdict["standings"].items():
        off = f", standard error a factor of {its['off']:.2f}" if its["off"] else ""
        print(f"{name:20}  {its['ratio']:.2f} of the noise, {its['noise']:.2e}{off}", flush=True)
    return verdict


def measure(what: str, config: Config, device: str, options: argparse.Namespace) -> bool:
    """Times of steps; or errors (except with dropout) and curves. A row per curve and one per result."""
    task = options.task
    contenders = contenders_for(task, device, options.compile, options.wrong)
    head = {"backend": device, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "config": dataclasses.asdict(config)}
    where = {**head, "task": task, **environment.describe()}

    def write(row: dict[str, Any]) -> None:
        with (options.out / "results.jsonl").open("a") as file:
            file.write(json.dumps({**row, **where}) + "\n")

    if what == "time":
        measure_times(contenders, config, device, task, write)
        return True
    verdicts = []
    if task != "dropout":  # implementations drop different elements
        verdicts.append(measure_errors(contenders, config, device, task))
        write({"contender": "verdict on errors", **verdicts[-1]})
    verdicts.append(measure_curves(contenders, config, device, task, options.starts, options.seconds, write))
    write({"contender": "verdict", **verdicts[-1]})
    return all(verdict["ok"] for verdict in verdicts)


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if errors exceed PyTorch's or curves do not coincide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["measure", "time", "plot"], default="measure")
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="also inside torch.compile")
    parser.add_argument("--task", choices=TASKS, default="causal")
    parser.add_argument("--wrong", action="store_true", help="wrong variants of attention in place of ours")
    parser.add_argument("--steps", type=int, help="number of training steps")
    parser.add_argument("--length", type=int, help="sequence length; the characters per batch stay the same")
    parser.add_argument("--starts", type=int, default=STARTS, help="number of starts")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit: no further start begins after it")
    parser.add_argument("--no-picture", action="store_true", help="do not draw the curves")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for rows and figures")
    options = parser.parse_args(argv)
    config, ok = CONFIGS[options.backend], True
    if options.what != "plot":
        length = options.length or config.length
        batch = config.batch * config.length // length
        config = dataclasses.replace(config, steps=options.steps or config.steps, length=length, batch=batch)
        ok = measure(options.what, config, options.backend, options)
        if options.what == "time" or options.no_picture:
            return 0 if ok else 1
    rows = jsonl.read(options.out / "results.jsonl")
    latest = {(row["backend"], row.get("task", "causal")): row["time"] for row in rows if "losses" in row}
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
