"""GPT-2, Llama and ViT of transformers and timm on our kernels and on PyTorch's. See README.md beside this file.

python experiments/022_models/run.py              a row for each model and contender, and one result for each model
python experiments/022_models/run.py --compile    also inside torch.compile
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from models import MODELS, OURS, SIZES, TEXT, attention_of, batch, compiled_of, contenders_of, logits_of, loss_of, made
from models import shorter as for_decoding
from torch import Tensor

from sandbox.bench import environment
from sandbox.core import jsonl

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "011_train_gpt"))
from curves import FACTOR, standing  # noqa: E402  # the measure of experiment 011

STEPS, STARTS, WARM, TOKENS = 50, 8, 10, 32
WITHIN = 1.1  # limit of the RMS error, relative to the largest of PyTorch's and eager attention


def reference(model: str, device: str) -> Tensor:
    """Logits in float32 with eager attention."""
    x, _ = batch(model, SIZES[device], device, 0)
    with torch.no_grad(), attention_of("eager", device):
        return logits_of(made(model, "eager", SIZES[device], device).eval(), x)


def error_of(model: str, contender: str, device: str, compiler: str | None, expected: Tensor) -> float:
    """RMS error of the logits with weights and layers in bfloat16."""
    x, _ = batch(model, SIZES[device], device, 0)
    x = x.bfloat16() if x.is_floating_point() else x
    module = made(model, contender, SIZES[device], device).bfloat16().eval()
    run = torch.compile(module, backend=compiler) if compiler else module
    with torch.no_grad(), attention_of(contender, device):
        return float((logits_of(run, x).float() - expected).square().mean().sqrt())


def decoded(model: str, contender: str, device: str) -> Tensor:
    """Greedy decoding with transformers' cache, weights in bfloat16."""
    size = for_decoding(SIZES[device])
    x, _ = batch(model, size, device, 1)
    module = made(model, contender, size, device).bfloat16().eval()
    with attention_of(contender, device):
        found = module.generate(
            x, attention_mask=torch.ones_like(x), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
    return found[:, x.shape[1] :]


def agreement(a: Tensor, b: Tensor) -> int:
    """The number of tokens before the first difference, summed over the texts."""
    return int((a == b).long().cumprod(1).sum())


def train(
    model: str, contender: str, device: str, compiler: str | None, steps: int, start: int
) -> tuple[list[float], float]:
    """The loss of each step, and milliseconds per step after the warm-up; float32 weights, layers in bfloat16 by
    autocast. `start` is the seed of weights and batches."""
    size, wait = SIZES[device], torch.cuda.synchronize if device == "cuda" else lambda: None
    module, losses, times = made(model, contender, size, device, start).train(), [], []
    run = torch.compile(module, backend=compiler) if compiler else module
    optimizer = torch.optim.AdamW(module.parameters(), 3e-4)
    batches = [batch(model, size, device, 5 * start + step) for step in range(5)]
    with attention_of(contender, device):
        for step in range(steps):
            wait()
            began = time.perf_counter()
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(run, *batches[step % 5])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            wait()
            times.append(time.perf_counter() - began)
    return [float(x) for x in losses], 1e3 * statistics.median(times[min(WARM, steps - 1) :])


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the logits, agreeing tokens and distances of the loss curves of ours, relative to PyTorch's and eager
    attention."""
    mine = [row for row in rows if row["contender"].partition(",")[0] in OURS]
    theirs = [row for row in rows if row not in mine]
    starts = [
        {row["contender"]: losses for row, losses in zip(rows, curves, strict=True)}
        for curves in zip(*(row["losses"] for row in rows), strict=True)
    ]
    most = max(row["error"] for row in theirs)
    found: dict[str, Any] = {"errors": {}, "losses": {}, "tokens": {}}
    for row in mine:
        name = row["contender"]
        found["errors"][name] = row["error"] / most
        found["losses"][name] = standing(starts, name, [other["contender"] for other in theirs])
        if "tokens" in row:
            found["tokens"][name] = row["tokens"] - next(r["tokens"] for r in theirs if r["contender"] == "eager")
    found["own"] = all(row["losses"] != other["losses"] for row in mine for other in theirs)  # other kernels have run
    found["ok"] = (
        found["own"]
        and all(x <= WITHIN for x in found["errors"].values())
        and all(its["ratio"] <= FACTOR for its in found["losses"].values())
        and all(x >= 0 for x in found["tokens"].values())
    )
    return found


def measure(model: str, device: str, compiled: bool, steps: int, starts: int, out: Path, about: dict[str, Any]) -> bool:
    """All contenders on one model; whether ours are as accurate as PyTorch's."""
    expected, flash, rows = reference(model, device), None, []
    names = [(name, None) for name in contenders_of(model, device)]
    if compiled:
        compiler = "inductor" if device == "cuda" else "aot_eager"
        names += [(name, compiler) for name in compiled_of(model, device)]
    for name, compiler in sorted(names, key=lambda pair: pair[0] != "sdpa-flash"):
        row: dict[str, Any] = {"model": model, "contender": f"{name}, compiled" if compiler else name}
        row["error"] = error_of(model, name, device, compiler, expected)
        if model in TEXT and not compiler:
            tokens = decoded(model, name, device)
            flash = tokens if name == "sdpa-flash" else flash
            row["tokens"] = agreement(tokens, flash)
        trained = [train(model, name, device, compiler, steps, start) for start in range(starts)]
        row["losses"], times = map(list, zip(*trained, strict=True))
        row["ms_per_step"] = statistics.median(times)
        rows.append(row)
        jsonl.append(out / "results.jsonl", {**row, **about})
        ends = f"loss {row['losses'][0][0]:.4f} … {row['losses'][0][-1]:.4f}"
        agreed = f"{row['tokens']} tokens as sdpa-flash's" if "tokens" in row else ""
        figures = f"error {row['error']:.3e}  {ends}  {row['ms_per_step']:6.2f} ms  {agreed}"
        print(f"{model:9} {row['contender']:20} {figures}", flush=True)
    verdict = compare(rows)
    jsonl.append(out / "results.jsonl", {"model": model, "contender": "verdict", **verdict, **about})
    for name, its in verdict["losses"].items():
        off = f", standard error a factor of {its['off']:.2f}" if its["off"] else ""
        print(f"{model:9} losses  {name} {its['ratio']:.2f} of the noise, {its['noise']:.2e}{off}")
    for what in ("errors", "tokens"):
        figures = ", ".join(f"{name} {x:.2f}" for name, x in verdict[what].items())
        print(f"{model:9} {what:7} {figures}")
    print(f"{model:9} {'as accurate as PyTorch' if verdict['ok'] else 'NOT as accurate as PyTorch'}", flush=True)
    return verdict["ok"]


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if a model's results are not as accurate as with PyTorch's attention."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=[*SIZES], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="by default all whose library is installed")
    parser.add_argument("--compile", action="store_true", help="also inside torch.compile")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--starts", type=int, default=STARTS, help="of one alone the losses say little")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for rows")
    options = parser.parse_args(argv)
    there = [name for name in MODELS if importlib.util.find_spec("timm" if "timm" in name else "transformers")]
    about = {"backend": options.backend, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **environment.describe()}
    verdicts = [
        measure(model, options.backend, options.compile, options.steps, options.starts, options.out, about)
        for model in options.models or there
    ]
    return 0 if verdicts and all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
