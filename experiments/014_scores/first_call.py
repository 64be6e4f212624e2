"""The time of the first call with a new Score: in a new process, with an empty cache. See README.md.

python experiments/014_scores/first_call.py                   needs a GPU; some ten seconds
python experiments/014_scores/first_call.py --backend cpu     with the host's compiler

Appends rows to first_call.jsonl: seconds of the first forward, of the same again, of one with an edited snippet, and of
the first backward. PyTorch's CUDA context exists before; NVRTC and this package are loaded by the first call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox.bench import environment
from sandbox.core import jsonl

OUT = Path(__file__).resolve().parent / "first_call.jsonl"
# Snippets of a user; {n} is edited. `doc` is a tensor.
SNIPPETS = {
    "a score": ("x - 0.{n} * abs(i - j)", "true"),
    "a condition": ("x", "i - j < {n}00"),
    "both, and a tensor": ("x + 0.{n}", "doc(i) == doc(j)"),
}


def measure(what: str, device: str, S: int) -> dict[str, float]:
    """Seconds of each call with one snippet, in a process that has compiled nothing, results included."""
    import torch

    import sandbox

    q, k, v = (torch.randn(1, 16, S, 128, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3))
    doc = torch.arange(S, device=device, dtype=torch.int32) // max(S // 4, 1)
    score, mask = SNIPPETS[what]

    def options(n: int) -> dict[str, Any]:
        tensors = {"doc": doc} if "doc" in mask else {}
        return {"score": sandbox.Score(score.format(n=n), mask.format(n=n), tensors), "causal": True}

    def attend(n: int) -> Any:
        return sandbox.attention(q, k, v, **options(n))

    def seconds(call: Callable[..., object], *arguments: object) -> float:
        start = time.perf_counter()
        call(*arguments)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    with torch.no_grad():
        found = {name: seconds(attend, n) for name, n in (("first", 1), ("again", 1), ("edited", 2))}
    return found | {"backward": seconds(attend(1).sum().backward)}


def in_fresh_process(what: str, backend: str, S: int) -> dict[str, float]:
    """The same in a new process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--backend", backend, "--length", str(S), "--only", what]
        environ = {**os.environ, "SANDBOX_CACHE_DIR": cache}
        return json.loads(subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True, text=True).stdout)


def main(arguments: list[str] | None = None, out: Path = OUT) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--only", choices=SNIPPETS, help="one snippet, in this process, as JSON")
    options = parser.parse_args(arguments)
    if options.only:
        print(json.dumps(measure(options.only, options.backend, options.length)))
        return
    for what in SNIPPETS:
        found = in_fresh_process(what, options.backend, options.length)
        print(f"{what:20}", *(f"{name} {seconds:6.3f} s" for name, seconds in found.items()), flush=True)
        jsonl.append(out, {"what": what, "backend": options.backend, **found, **environment.describe()})


if __name__ == "__main__":
    main()
