"""Trains a small GPT while its attention kernel is edited: every correct save is used. See README.md.

python experiments/017_edit_while_training/run.py --kernel fwd_minimal   trains until Ctrl-C; edit kernels_cu/NAME.cu
python experiments/017_edit_while_training/run.py --json                 the same, one line of JSON per event
python experiments/017_edit_while_training/run.py measure                edits a copy of the project; appends
                                                                         rows to results.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNELS = {"cpu": "fwd_minimal", "cuda": "fwd_mma"}
LINE = "extern __shared__"  # near the beginning of a kernel; edits are inserted before it
EDITS = (  # (name, text inserted before LINE)
    ("a comment", "// {n}\n    "),
    ("not CUDA", "int x = ;\n    "),
    ("a comment again", "// {n}\n    "),
    ("a crash", "*(volatile int*)8 = 1;\n    "),
    ("the original text", ""),
)


def show(event: dict[str, Any]) -> None:
    """Prints an event."""
    if event["what"] == "step":
        print(f"step {event['step']:5}  version {event['version']}  loss {event['loss']:.4f}", flush=True)
    elif event["what"] == "save":
        verdict = "is correct" if event["ok"] else "is not used, the last correct version continues"
        print(f"  a save {verdict}, {event['took']:.2f} s after it: {event['message']}", flush=True)
    elif event["losses"]:
        losses, speed = event["losses"], event["tokens_per_second"]
        pace = f"{speed:,.0f} tokens per second" if speed else "one step"
        ends = f"loss {losses[0]:.4f} … {losses[-1]:.4f}"
        print(f"  version {event['version']}: {len(losses)} steps, {ends}, {pace}", flush=True)


def show_json(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def train(kernel: str, backend: str, steps: int, as_json: bool) -> None:
    from edited import Edited
    from training import CONFIGS, train

    from sandbox.spec import Problem

    config = dataclasses.replace(CONFIGS[backend], steps=steps)
    H, S, D = config.heads, config.length, config.width // config.heads
    causal = "top-left" if backend == "cpu" else "bottom-right"  # as PyTorch's CPU operator: one variant to compile
    problem = Problem(1, H, S, S, D, dtype=config.dtype, causal=causal)
    with suppress(KeyboardInterrupt):
        train(config, backend, Edited(kernel, problem, (backend, 0)), show_json if as_json else show)


# ---- automatic edits


def events_of(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout
    return map(json.loads, process.stdout)


def measure(kernel: str, backend: str, out: Path) -> None:
    """A row per edit: seconds from the save to its result, losses and speed before and after."""
    from sandbox.bench import environment
    from sandbox.core import jsonl

    about = {"kernel": kernel, "backend": backend, **environment.describe()}
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        for name in ("sandbox", "kernels_cu", f"experiments/{HERE.name}", "experiments/011_train_gpt"):
            shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
        source = project / "kernels_cu" / f"{kernel}.cu"
        command = [project / "experiments" / HERE.name / "run.py", "--kernel", kernel, "--backend", backend, "--json"]
        paths = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        own = {**os.environ, "PYTHONPATH": paths}  # instead of the installed project
        process = subprocess.Popen([sys.executable, *command], env=own, stdout=subprocess.PIPE, text=True)
        try:
            events, text = events_of(process), source.read_text()
            for number, (what, edit) in enumerate(EDITS):
                steps = (event for event in events if event["what"] == "step")
                next(steps), next(steps)
                start = time.perf_counter()
                source.write_text(text.replace(LINE, edit.format(n=time.time_ns()) + LINE, 1))
                verdict = next(event for event in events if event["what"] == "save")
                row = {"edit": what, "ok": verdict["ok"], "verdict_after": time.perf_counter() - start}
                if verdict["ok"]:
                    before = next(event for event in events if event["what"] == "version")
                    row |= {
                        "loss_before": before["losses"][-1],
                        "tokens_per_second_before": before["tokens_per_second"],
                    }
                    row["loss_after"] = next(event for event in events if event["what"] == "step")["loss"]
                print(f"{number} {what:16} {'used' if row['ok'] else 'not used'} after {row['verdict_after']:.2f} s")
                jsonl.append(out / "results.jsonl", {**row, "message": verdict["message"][:300], **about})
        finally:
            process.kill()
            process.wait()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["train", "measure"], default="train")
    parser.add_argument("--backend", choices=["cpu", "cuda"], help="by default cuda if there is a GPU")
    parser.add_argument("--kernel", help="forward or backward; by default fwd_mma, fwd_minimal on the CPU backend")
    parser.add_argument("--steps", type=int, default=0, help="by default until Ctrl-C")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for rows")
    options = parser.parse_args(argv)
    if not options.backend:
        from sandbox.launch import driver

        options.backend = "cuda" if driver.available() else "cpu"
    kernel = options.kernel or KERNELS[options.backend]
    if options.what == "measure":
        measure(kernel, options.backend, options.out)
    else:
        train(kernel, options.backend, options.steps, options.json)


if __name__ == "__main__":
    main()
