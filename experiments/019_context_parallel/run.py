"""PyTorch's context_parallel on these kernels, cuDNN and flash, and a model of many GPUs. See README.md.

torchrun --nproc-per-node 2 experiments/019_context_parallel/run.py    measures; appends rows to results.jsonl
python experiments/019_context_parallel/run.py predict                 prints the predictions of the model
python experiments/019_context_parallel/run.py plot                    draws scaling.png
python experiments/019_context_parallel/run.py kill --gpus 2           kills one of two processes during a ring
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import killed
import model

HERE = Path(__file__).resolve().parent
POINTS = (
    (128, True),
    (32, True),
    (128, False),
    (32, False),
    (512, True),
    (512, False),
)  # (1024 rows, causal)
SAMPLES, LONG = 7, 1.0  # at most; seconds after which no sample is added
LONG_ROWS = 128 << 10  # beyond, the verified call itself is timed; measure a shorter point before, as a warm-up
RINGS = {  # (kernels, exchange of keys); for the longest rows the first two
    "cuda": (("ours", "alltoall"), ("cudnn", "alltoall"), ("flash", "alltoall"), ("ours", "allgather")),
    "cpu": (("ours", "alltoall"), ("ours", "allgather")),
}


class Rank:
    """This process of those that torchrun started, and its device."""

    def __init__(self, backend: str, seconds: float):
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.torch, self.dist, self.backend = torch, dist, backend
        if backend == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        how = {"backend": "nccl" if backend == "cuda" else "gloo", "timeout": timedelta(seconds=seconds)}
        dist.init_process_group(**how)
        self.number, self.count = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh(backend, (self.count,))

    def inputs(self, S: int) -> list[Any]:
        """The complete q, k, v, dout, the same in every process."""
        heads, D = (2, 16) if self.backend == "cpu" else (model.H, model.D)
        generator = self.torch.Generator(self.backend).manual_seed(S)
        options = {"generator": generator, "device": self.backend, "dtype": self.torch.bfloat16}
        return [self.torch.randn(1, heads, S, D, **options) for _ in range(4)]

    def slowest(self, value: float) -> float:
        """The maximum over all processes."""
        largest = self.torch.tensor(value, dtype=self.torch.float64, device=self.backend)
        self.dist.all_reduce(largest, self.dist.ReduceOp.MAX)
        return float(largest)

    def seconds(self, call: Callable[[], object]) -> float:
        """The median time of the call in the slowest process, host time included; called before."""
        times: list[float] = []
        while len(times) < SAMPLES and sum(times) < LONG:
            times.append(self.once(call)[1])
        return statistics.median(times)

    def once(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """The result, and the seconds in the slowest process."""
        self._wait()
        self.dist.barrier()
        start = time.perf_counter()
        found = call()
        self._wait()
        return found, self.slowest(time.perf_counter() - start)

    def leave(self) -> None:
        time.sleep(0.2)  # PyTorch (2.13) joins gloo's threads with the GIL held; they may need it to end
        self.dist.destroy_process_group()

    def _wait(self) -> None:
        if self.backend == "cuda":
            self.torch.cuda.synchronize()


def point(rank: Rank, S: int, causal: bool, rings: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """One GPU alone on these kernels, then the rings: a row each, verified against the first before it is timed."""
    import ring
    from torch.nn import functional as F

    whole = rank.inputs(S)
    alone = partial(F.scaled_dot_product_attention, is_causal=causal)
    with ring.kernels_of("ours", rank.backend):
        expected, took = rank.once(partial(ring.out_and_gradients, alone, *whole))
        yield {"whose": "ours", "rotate": "one GPU", "excess": 0.0} | timed(rank, S, causal, alone, whole, 1, took)
    for name, rotate in rings:
        with ring.kernels_of(name, rank.backend), ring.ring(rank.mesh, causal, rotate, *whole, *expected) as parts:
            call = partial(ring.attend, rank.mesh, causal=causal)
            found, took = rank.once(partial(ring.out_and_gradients, call, *parts[:4]))
            excess = max(ring.excess(x, y, rank.count) for x, y in zip(found, parts[4:], strict=True))
            del found
            row = {"whose": name, "rotate": rotate, "excess": rank.slowest(excess if excess == excess else 1e9)}
            if row["excess"] <= 1:
                row |= timed(rank, S, causal, call, parts[:4], rank.count, took)
            yield row


def timed(rank: Rank, S: int, causal: bool, call: Any, tensors: list[Any], count: int, took: float) -> dict[str, float]:
    """Milliseconds and TFLOP/s per GPU: forward; forward and backward, for long rows from `took` seconds."""
    import ring

    with rank.torch.no_grad():
        forward = rank.seconds(lambda: call(*tensors[:3]))
    both = took if S > LONG_ROWS else rank.seconds(lambda: ring.out_and_gradients(call, *tensors))
    B, heads, _, D = tensors[0].shape
    work = 4.0 * B * heads * D * S * S / (2 if causal else 1) / count * 1e-12
    return {
        "forward_ms": forward * 1e3, "both_ms": both * 1e3,
        "forward_tflops": work / forward, "both_tflops": 3.5 * work / both,
    }  # fmt: skip


def measure(options: argparse.Namespace) -> int:
    """Exit status 1 if a result is wrong. A point that would exceed --seconds by the model is skipped."""
    from sandbox.bench import environment
    from sandbox.core import jsonl

    start, rank, wrong = time.monotonic(), Rank(options.backend, 120.0), 0
    about = {"backend": options.backend, **environment.describe()}
    points = [(rows << 10, causal) for rows, causal in POINTS] if not options.rows else [
        (rows, causal) for rows in options.rows for causal in (True, False)]  # fmt: skip
    points = [(S, causal) for S, causal in points if causal or not options.causal]
    for S, causal in points:
        rings = RINGS[options.backend][: 2 if S > LONG_ROWS else None][: options.rings]
        works = (1.3 if S > LONG_ROWS else 2) * (1 + len(rings) / rank.count)
        once = 3.5 * model.flops(S, causal) / 600e12 * works if options.backend == "cuda" else 0.0
        if rank.slowest(time.monotonic() - start) + 1.15 * once > options.seconds:
            if rank.number == 0:
                print(f"S {S} causal {causal}: skipped, estimated at {1.15 * once:.0f} s")
            continue
        for found in point(rank, S, causal, rings):
            row = {"gpus": rank.count, "S": S, "causal": causal, **found}
            wrong += not row["excess"] <= 1
            if rank.number == 0:
                jsonl.append(options.out / "results.jsonl", {**row, **about})
                print(line(row), flush=True)
    rank.leave()
    return int(wrong > 0)


def line(row: dict[str, Any]) -> str:
    head = (
        f"{row['gpus']} x S {row['S']:7} {'causal' if row['causal'] else '      '} {row['whose']:6} {row['rotate']:9}"
    )
    if "forward_ms" not in row:
        return f"{head} WRONG: {row['excess']:.3g} times its bound"
    speeds = f"{row['forward_tflops']:7.1f} {row['both_tflops']:7.1f} TFLOP/s per GPU, forward, both"
    return f"{head} {speeds}   {row['excess']:.2f} of its bound"


# ---- a process is killed


def victim(options: argparse.Namespace) -> int:
    """Each process: endless rings; the last process kills itself during the fourth.

    The first ring, which compiles kernels and makes connections, has a limit of BEFORE seconds, the others TIMEOUT.
    """
    import ring

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the watchdog calls abort(): no core dump
    rank = Rank(options.backend, killed.BEFORE)
    whole = rank.inputs(64 if options.backend == "cpu" else 32 << 10)
    with ring.kernels_of("ours", rank.backend), ring.ring(rank.mesh, True, "alltoall", *whole) as parts:
        call = partial(ring.attend, rank.mesh, causal=True)
        for n in range(1 << 30):
            out = call(*parts[:3])
            if n == 3 and rank.number == rank.count - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            float(out.sum())  # synchronises without the GIL, which the watchdog may need
            if n == 0:
                rank.dist.distributed_c10d._set_pg_timeout(timedelta(seconds=killed.TIMEOUT))
    return 0


# ---- the model


def predict() -> None:
    """The points of 2026-11-21 beside the model with the backward of that day; then other numbers of GPUs."""
    print("                 forward: model measured   both: model measured   (TFLOP/s per GPU, causal, 2026-11-21)")
    for (gpus, S), (ours, _) in model.MEASURED.items():
        found = model.tflops("ring", S, gpus, True, model.EARLIER)
        pairs = "            ".join(f"{x:5.0f} {y:8.0f}" for x, y in zip(found, ours, strict=True))
        print(f"{gpus} x S {S >> 10:5}k          {pairs}")
    print("\nforward and backward, TFLOP/s per GPU, causal: ring / all-to-all over heads / both")
    print("GPUs    " + "".join(f"S {S:>6}k            " for S in (128, 512, 2048, 8192)))
    for gpus in (1, 2, 4, 8, 64, 1024):
        cells = []
        for S in (128, 512, 2048, 8192):
            each = [model.tflops(method, S << 10, gpus)[1] for method in model.METHODS]
            texts = [f"{x:.0f}" for x in each]
            texts[1] = texts[1] if gpus <= model.H else "–"
            cells.append(" / ".join(f"{text:>4}" for text in texts))
        print(f"{gpus:4}    " + "   ".join(cells))


def draw(out: Path) -> None:
    """The model (lines) and the measured points of ours, forward and backward, over the number of GPUs."""
    from sandbox.core import jsonl, picture

    rows = [r for r in jsonl.read(out / "results.jsonl") if r["whose"] == "ours" and r["causal"] and "both_ms" in r]
    numbers = [1 << n for n in range(11)]
    with picture.figure(13, 4) as figure:
        for place, S in enumerate((128, 512, 1024, 8192)):
            axis = figure.add_subplot(1, 4, place + 1)
            for method, style in (("ring", "-"), ("heads", "--"), ("both", ":")):
                gpus = [n for n in numbers if method != "heads" or n <= model.H]
                axis.plot(
                    gpus, [model.tflops(method, S << 10, n)[1] for n in gpus], style, label=method, color="#444444"
                )
            there = [
                (r["gpus"] if r["rotate"] != "one GPU" else 1, r["both_tflops"]) for r in rows if r["S"] == S << 10
            ]
            if there:
                axis.plot(*zip(*there, strict=True), "o", color="#d62728", label="measured")
            axis.set_xscale("log", base=2)
            axis.set_title(f"S {S}k, causal, forward and backward", loc="left", fontsize=9)
            axis.set_xlabel("GPUs, 8 per host")
            axis.set_ylim(0, 750)
        figure.axes[0].set_ylabel("TFLOP/s per GPU, by the model")
        figure.axes[0].legend(frameon=False)
        print(f"wrote {picture.compact(picture.save(figure, out / 'scaling')).name}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="measure", choices=["measure", "predict", "plot", "kill", "victim"])
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", type=int, nargs="*", help="sequence lengths, instead of 32k, 128k and 512k")
    parser.add_argument("--causal", action="store_true", help="causal points only")
    parser.add_argument("--rings", type=int, help="number of rings to measure, ours first")
    parser.add_argument("--seconds", type=float, default=200.0, help="time limit: no point begins after it")
    parser.add_argument("--gpus", type=int, default=2, help="number of processes that `kill` starts")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for rows and figures")
    options = parser.parse_args(argv)
    if options.what == "predict":
        predict()
    elif options.what == "plot":
        draw(options.out)
    elif options.what == "kill":
        return killed.kill([sys.executable, __file__, "victim", "--backend", options.backend], options.gpus)
    else:
        return {"measure": measure, "victim": victim}[options.what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
