"""Trains the GPT of experiment 011 on PyTorch's attention, replaced by the kernel that is being edited."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from edited import Edited, Outcome
from torch import Tensor
from torch.nn import functional as F

import sandbox
from sandbox.core.errors import SandboxError, without_options

GPT_FOLDER = Path(__file__).resolve().parent.parent / "011_train_gpt"
sys.path.append(str(GPT_FOLDER))
from gpt import GPT, Config  # noqa: E402

CONFIGS = {
    "cuda": Config(layers=6, heads=6, width=384, length=512, batch=32, steps=0, rate=1e-3),
    "cpu": Config(layers=2, heads=2, width=64, length=32, batch=2, steps=0, rate=3e-3),
}
KERNELS: dict[str, dict[str, str]] = {  # kernels beside the edited one; on a GPU the default
    "cuda": {},
    "cpu": {"kernel": "fwd_minimal", "backward": "bwd_minimal"},  # the fastest on the CPU backend
}
SHOWN = 10  # steps per line of output

Show = Callable[[dict[str, Any]], None]


def attend(q: Tensor, k: Tensor, v: Tensor, ends: None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def batches(config: Config, device: str) -> Iterator[Tensor]:
    """Windows of the texts, (batch, length + 1) indices of characters, the same in each run."""
    text = "".join(path.read_text() for path in sorted((GPT_FOLDER / "text").glob("*.txt")))
    numbers = {character: n for n, character in enumerate(sorted(set(text)))}
    whole = torch.tensor([numbers[character] for character in text], device=device)
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(whole) - config.length, (config.batch, 1), generator=generator)
        yield whole[(starts + torch.arange(config.length + 1)).to(device)]


class Training:
    """A model and its optimizer; `step` repeats a step whose kernel raises."""

    def __init__(self, config: Config, device: str):
        torch.manual_seed(0)
        self.config, self.device, self._batches = config, device, batches(config, device)
        self.model = GPT(config, 128, attend).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), config.rate, betas=(0.9, 0.95))

    def step(self, again: Callable[[SandboxError], None]) -> tuple[float, float]:
        """(loss, seconds). If a kernel raises, the weights are unchanged: calls `again` and repeats the step."""
        tokens = next(self._batches)
        while True:
            start = time.perf_counter()
            try:
                with torch.autocast(self.device, getattr(torch, self.config.dtype)):
                    logits = self.model(tokens[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                self.optimizer.zero_grad()
                loss.backward()
            except SandboxError as error:
                again(error)
                continue
            self.optimizer.step()
            return loss.item(), time.perf_counter() - start  # item() waits for the GPU


def train(config: Config, device: str, edited: Edited, show: Show) -> None:
    """`config.steps` steps, endless if 0. Calls `show` for every SHOWN-th step, every save, and with a summary of each
    version of the kernel when it is replaced and at the end."""
    training, name = Training(config, device), edited.kernel.name
    place = "backward" if edited.kernel.computes == "backward" else "kernel"
    version, losses, seconds = 1, [], []

    def apply(outcome: Outcome) -> bool:
        nonlocal version, losses, seconds
        show({"what": "save", **dataclasses.asdict(outcome)})
        if outcome.ok:
            show(summary(version, losses, seconds, config))
            version, losses, seconds = version + 1, [], []
            sandbox.reload()
        return outcome.ok

    def again(error: SandboxError) -> None:
        """The file changed between the test and the reload: waits for the next correct version."""
        show({"what": "save", "ok": False, "message": without_options(str(error)), "took": 0.0})
        while not apply(edited.wait()):
            pass

    try:
        with sandbox.use_in_torch(**{**KERNELS[device], place: name}):
            for step in range(config.steps) if config.steps else itertools.count():
                for outcome in edited.poll():
                    apply(outcome)
                loss, took = training.step(again)
                losses, seconds = [*losses, loss], [*seconds, took]
                if step % SHOWN == 0:
                    show({"what": "step", "step": step, "version": version, "loss": loss, "seconds": took})
    finally:
        show(summary(version, losses, seconds, config))


def summary(version: int, losses: list[float], seconds: list[float], config: Config) -> dict[str, Any]:
    """Losses of one version, and tokens per second without the first step, which compiles."""
    median = statistics.median(seconds[1:]) if len(seconds) > 1 else None
    speed = config.batch * config.length / median if median else None
    first = seconds[0] if seconds else None
    return {
        "what": "version", "version": version, "losses": losses, "tokens_per_second": speed, "first_step": first,
    }  # fmt: skip
