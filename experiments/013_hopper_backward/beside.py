"""The Hopper backward beside older states of itself, in order, with options, ragged and with dropout.

python experiments/013_hopper_backward/beside.py before=OLD/kernels_cu undealt=UNDEALT/kernels_cu [STAGE …]

NAME=FOLDER is a folder `kernels_cu` of another commit, made where there is a repository:

    git archive 4f22324 kernels_cu | tar -x -C OLD        before spills were taken out, and with them loads put in a row
    git archive 1bcbdcc kernels_cu | tar -x -C UNDEALT    before pieces of a ragged batch were dealt

At most five minutes on an H200; each stage is a process with a time limit. Rows go to beside.jsonl.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox import Problem
from sandbox.bench import benchmark, ragged
from sandbox.bench.peers import PEERS
from sandbox.bench.rows import problem_of, recorded
from sandbox.bench.timing import Limits
from sandbox.core import registry
from sandbox.core.kernel import Kernel

HERE = Path(__file__).resolve().parent
CAUSAL: Any = "bottom-right"
S = 8192
LONG = Problem(2, 16, S, S, 128, dtype="bfloat16")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"bias": (1, 1, S, S)}, {"bias": (1, 16, S, S), "causal": CAUSAL}, {"softcap": 50.0, "causal": CAUSAL},
    {"softcap": 50.0}, {"alibi": (16,), "causal": CAUSAL}, {"window": (1024, 0), "causal": CAUSAL},
    {"D": 192, "Dv": 128, "causal": CAUSAL},
)  # fmt: skip


def older(name: str, folder: Path) -> Kernel:
    """The backward of another commit's `kernels_cu`, under the name bwd_NAME, with the headers beside it."""
    spec = importlib.util.spec_from_file_location(f"spec_{name}", folder / "bwd_wgmma.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{folder} has no bwd_wgmma.py: NAME=FOLDER names a folder kernels_cu of another commit")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Kernel = next(iter(getattr(module, "kernels", ()))) if hasattr(module, "kernels") else module.kernel
    called, source = f"bwd_{name}", folder / f"bwd_{name}.cu"
    names = {entry.name: called + entry.name.removeprefix("bwd_wgmma") for entry in found.entries}
    renamed = "".join(f"#define {old} {new}\n" for old, new in names.items())
    source.write_text(renamed + (folder / "bwd_wgmma.cu").read_text())
    then = tuple(dataclasses.replace(entry, name=names[entry.name]) for entry in found.then)
    return dataclasses.replace(found, name=called, source=source, then=then)


def problems(stage: str) -> list[Problem]:
    """What a stage times."""
    if stage == "plain":
        return [
            Problem(16384 // n, 2048 // D, n, n, D, dtype="float16", causal=causal)
            for D, causal, n in itertools.product((64, 128, 256), (False, CAUSAL), (512, 2048, 4096, 16384))
        ]
    if stage == "options":
        return [dataclasses.replace(LONG, **fields) for fields in OPTIONS]
    if stage == "ragged":
        return ragged.problems("bfloat16")
    dropped = dataclasses.replace(LONG, dropout=0.1)
    narrow = Problem(2, 32, S, S, 64, dtype="bfloat16", dropout=0.1)
    return [dataclasses.replace(p, causal=causal) for p in (dropped, narrow) for causal in (False, CAUSAL)]


STAGES = {  # contenders of the tree, older states, a peer; a limit in seconds
    "plain": (("bwd_wgmma", "bwd_wgmma_deterministic"), ("before",), "sdpa-cudnn", 150),
    "options": (("bwd_wgmma", "bwd_wgmma_deterministic", "bwd_mma"), (), "sdpa-cudnn", 60),
    "ragged": (("bwd_wgmma", "bwd_mma"), ("undealt",), "", 50),
    "dropout": (("bwd_wgmma",), ("before",), "sdpa-cudnn", 40),
}


def measure(stage: str, folders: dict[str, Path]) -> None:
    """One run of everybody, a line for each problem as it is known."""
    names, states, peer, _ = STAGES[stage]
    kernels = [registry.get(name) for name in names] + [
        older(name, folders[name]) for name in states if name in folders
    ]
    peers, limits = [PEERS[peer]] if peer else [], Limits(rounds=30, seconds=0.06)
    asked = problems(stage)
    rows = recorded(benchmark.run(kernels, asked, peers, limits=limits, computes="backward"), HERE / "beside.jsonl")
    for problem, own in itertools.groupby(rows, key=problem_of):
        print(f"{problem}: {', '.join(map(cell, own))}", flush=True)


def cell(row: Mapping[str, Any]) -> str:
    return f"{row['contender']} {row['tflops']:.0f}" if row.get("tflops") else f"{row['contender']}: {row['message']}"


def main() -> None:
    folders = {name: Path(folder).resolve() for name, _, folder in (a.partition("=") for a in sys.argv[1:]) if folder}
    asked = [argument for argument in sys.argv[1:] if argument in STAGES]
    if len(asked) == 1:
        measure(asked[0], folders)
        return
    given = [argument for argument in sys.argv[1:] if "=" in argument]
    for stage in asked or STAGES:
        start, limit = time.perf_counter(), STAGES[stage][-1]
        try:
            code: object = subprocess.run(
                [sys.executable, __file__, *given, stage], timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit} s"
        print(f"--- {stage}: {code}, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
