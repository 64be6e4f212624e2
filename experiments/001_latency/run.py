"""The host time of this package: compiling, launching, importing, training steps. See README.md beside this file.

python experiments/001_latency/run.py                     prints a table and appends rows to results.jsonl
python experiments/001_latency/run.py --parts training    this part only
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle, product
from pathlib import Path

import numpy as np

import sandbox
from sandbox.bench import environment
from sandbox.core import registry
from sandbox.engine import pipeline
from sandbox.launch import dlpack, driver
from sandbox.launch.arguments import ArgumentBlock
from sandbox.toolchain import nvrtc

HERE = Path(__file__).resolve().parent
TOY = """
extern "C" __global__ void toy(float* x, float s) {{
    x[blockIdx.x * blockDim.x + threadIdx.x] *= s + {salt}.0f;
}}
"""
_salt = count(time.time_ns() % 1_000_000)


def timed(call: Callable[[], object], repeats: int, calls: int = 1, after: Callable[[], object] = lambda: None) -> list:
    """Seconds per call, `repeats` times, each the mean of `calls` calls; `after` runs untimed after each."""
    samples = []
    gc.disable()
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls)
        after()
    gc.enable()
    return samples


def source_to_loaded() -> Iterator[tuple[str, list]]:
    """From new source of a toy kernel to a function that can be launched; process and libraries warm."""
    with tempfile.TemporaryDirectory() as folder:
        path, device = Path(folder) / "toy.cu", driver.device()
        arch = f"sm_{device.arch[0]}{device.arch[1]}"

        def ours() -> None:
            path.write_text(TOY.format(salt=next(_salt)))
            driver.CudaFunction(nvrtc.compile(path, "toy", arch).cubin, "toy", device)

        ours()
        others: dict[str, Callable[[], object]] = {}
        try:
            import cupy

            others["CuPy RawModule"] = lambda: cupy.RawModule(code=TOY.format(salt=next(_salt))).get_function("toy")
        except ImportError:
            pass
        try:
            import torch

            others["torch.cuda._compile_kernel"] = lambda: torch.cuda._compile_kernel(
                TOY.format(salt=next(_salt)), "toy"
            )
        except (ImportError, AttributeError):
            pass
        contenders = {"sandbox": ours, **others}
        samples: dict[str, list] = {name: [] for name in contenders}
        for call in contenders.values():
            call()
        for _ in range(20):  # interleaved
            for name, call in contenders.items():
                samples[name] += timed(call, 1)
        for name, values in samples.items():
            yield f"source to loaded, toy: {name}", values


def cached_compile() -> Iterator[tuple[str, list]]:
    """A kernel found in the disk cache."""
    sandbox.compile("fwd_minimal", arch="sm_90a")
    yield "cached compile, fwd_minimal", timed(lambda: sandbox.compile("fwd_minimal", arch="sm_90a"), 50)


def launches() -> Iterator[tuple[str, list]]:
    """Host time; the synchronisation between batches is not timed."""
    import torch

    q, k, v = (torch.randn(1, 1, 32, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    kernel = registry.get("fwd_minimal")
    forward = lambda: sandbox.attention_forward(q, k, v)  # noqa: E731
    out, lse = forward()
    views = {n: dlpack.view(t) for n, t in zip(("Q", "K", "V", "O", "LSE"), (q, k, v, out, lse), strict=True)}
    problem = sandbox.Problem(1, 1, 32, 32, 64, dtype="float16")
    tile = kernel.tiles[0]
    prepared = pipeline.prepare(kernel, tile, problem, views, views["Q"].device)
    pointers = tuple(view.pointer for view in views.values())
    both = (pointers, (pointers[1], pointers[0], *pointers[2:]))

    (function,) = pipeline.load(kernel, tile, problem, ("cuda", 0)).functions
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    table, handle = ArgumentBlock(kernel, problem, tile, views).table, ctypes.c_void_p(int(function._function))
    geometry = [ctypes.c_uint(n) for n in (*kernel.grid(problem, tile), *kernel.block(tile))]
    smem, nothing = ctypes.c_uint(kernel.smem_bytes(problem, tile)), ctypes.c_void_p(0)

    def bare() -> None:
        launch(handle, *geometry, smem, nothing, table, nothing)

    contenders: dict[str, Callable[[], object]] = {
        "launch, bare ctypes cuLaunchKernel": bare,
        "launch, prepared": partial(prepared.launch, pointers),
        "launch, prepared, other addresses each time": partial(next, (prepared.launch(p) for p in cycle(both))),
        "attention_forward, B1 H1 S32 D64 fp16, PyTorch": forward,
        "torch scaled_dot_product_attention, the same": lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v
        ),
    }
    samples: dict[str, list] = {name: [] for name in contenders}
    for call in contenders.values():
        timed(call, 5, 100, torch.cuda.synchronize)
    for _ in range(30):
        for name, call in contenders.items():
            samples[name] += timed(call, 1, 100, torch.cuda.synchronize)
    yield from samples.items()


def training() -> Iterator[tuple[str, list]]:
    """Host time of attention and its gradients with new tensors at every step, as in training."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def tensors() -> list[torch.Tensor]:
        return [torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.float16).requires_grad_() for _ in range(3)]

    steps = cycle([tensors() for _ in range(64)])
    dout, kept = torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.float16), cycle(range(48))
    alive: list[object] = [None] * 48  # keeps results alive, so that new ones have other addresses
    theirs = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Callable[..., torch.Tensor]] = {
        "sandbox": sandbox.attention,
        "SDPA flash": theirs,
        "sandbox, dropout": partial(sandbox.attention, dropout=0.1),
        "SDPA flash, dropout": partial(theirs, dropout_p=0.1),
        "sandbox, window": partial(sandbox.attention, window=(64, 0)),
        "SDPA by use_in_torch": theirs,
    }
    slot = sandbox.use_in_torch()

    def forward(call: Callable[..., torch.Tensor]) -> None:
        alive[next(kept)] = call(*next(steps))

    def both(call: Callable[..., torch.Tensor]) -> None:
        inputs = next(steps)
        out = call(*inputs)
        alive[next(kept)] = out, torch.autograd.grad(out, inputs, dout)

    samples: dict[str, list] = {}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for take in range(-5, 60):  # the first few warm up
            for (name, call), (what, step) in product(
                calls.items(), {"forward": forward, "forward and backward": both}.items()
            ):
                if name == "SDPA by use_in_torch":
                    slot.activate()
                    step(call)
                found = timed(partial(step, call), 1, 20, torch.cuda.synchronize)
                slot.restore()
                samples.setdefault(f"{what}, B1 H4 S128 D64 fp16: {name}", []).extend(found if take >= 0 else [])
    yield from samples.items()


def cpu_backend() -> Iterator[tuple[str, list]]:
    """One OS thread; the kernel is built before."""
    os.environ["SANDBOX_CPU_WORKERS"] = "1"
    q, k, v = (np.random.default_rng(i).standard_normal((1, 1, 512, 64)).astype(np.float16) for i in range(3))
    call = lambda: sandbox.attention_forward(q, k, v, kernel="fwd_minimal", backend="cpu")  # noqa: E731
    call()
    yield "CPU backend, fwd_minimal B1 H1 S512 D64 fp16, one core", timed(call, 20)


def imports() -> Iterator[tuple[str, list]]:
    """`import sandbox` in a new process that has imported NumPy."""
    code = (
        "import numpy, sys, time; start = time.perf_counter(); import sandbox; print(time.perf_counter() - start);"
        "assert not {'torch', 'cupy'} & set(sys.modules)"
    )
    run_once = lambda: subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: E731
    yield "import sandbox, beyond NumPy", [float(run_once().stdout) for _ in range(10)]


PARTS = {part.__name__: part for part in (imports, cached_compile, cpu_backend, source_to_loaded, launches, training)}
ON_A_GPU = ("source_to_loaded", "launches", "training")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results.jsonl", help="append rows to this file")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure; all by default"
    )
    options = parser.parse_args()
    where = environment.describe()
    parts = [PARTS[name] for name in options.parts if where["device"] or name not in ON_A_GPU]
    with options.out.open("a") as file:
        for part in parts:
            for what, samples in part():
                low, median, high = statistics.quantiles(samples, n=4)
                row = {"what": what, "median_s": median, "q1_s": low, "q3_s": high, "samples": len(samples), **where}
                file.write(json.dumps(row) + "\n")
                print(f"{what:58} {median * 1e6:12.1f} µs   [{low * 1e6:.1f}, {high * 1e6:.1f}]", flush=True)


if __name__ == "__main__":
    main()
