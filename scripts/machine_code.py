"""Compare the machine code of all kernels before and after a refactoring. Needs NVRTC but no GPU.

python scripts/machine_code.py record before.json       in a checkout of the old revision
python scripts/machine_code.py record after.json        in the new one
python scripts/machine_code.py compare before.json after.json --renamed OLD=NEW

`record` compiles every kernel with its default tile for D = 64, 128 and 256, causal and not, plain and with each score
option alone, for sm_80 and sm_90a, and stores a hash of every `.text` section of the cubins. Symbol names, line numbers
and section order do not count. `--sample N` compiles N problems, drawn with `--seed` from these and those of other head
dimensions (16 to 192); `--like FILE` those of another record.

NVRTC is not deterministic: a few compilations of one source in a hundred give other instructions. Look at the problems
that differ with `record --times 10`, which compiles each of them again and again, and stores every result; `compare`
takes two problems as equal if any results of theirs are.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed package

from sandbox.core import registry
from sandbox.core.errors import CompileError, UnsupportedProblem
from sandbox.core.kernel import Kernel
from sandbox.engine import choose, pipeline
from sandbox.spec import Problem
from sandbox.toolchain import arch
from sandbox.verify.scores import OPTIONS

S = 8192
HEAD_DIMS = (64, 128, 256)
SAMPLED_HEAD_DIMS = (16, 32, 40, 48, 96, 192)  # further ones, of which only samples are compiled
ARCHS = ("sm_80", "sm_90a")
CODE = b".text."  # prefix of the names of the sections that hold machine code
LAYOUTS: dict[str, Callable[[Problem], dict[str, Any]]] = {
    "ragged": lambda p: {"ragged": (2 * S, 2 * S)},
    "paged": lambda p: {"page_size": 64, "pages": 512, "key_lengths": True},
    "ragged paged": lambda p: {"page_size": 16, "pages": 512, "ragged": (2 * S, 0)},
}


class Job(NamedTuple):
    """One compilation; `option` is "plain", the name of a score option, or of a layout of the batch."""

    kernel: str
    arch: str
    dtype: str
    D: int
    causal: bool
    option: str

    def problem(self) -> Problem:
        """The problem to compile for."""
        plain = Problem(2, 4, S, S, self.D, dtype=self.dtype, causal="bottom-right" if self.causal else False)
        return plain if self.option == "plain" else replace(plain, **{**OPTIONS, **LAYOUTS}[self.option](plain))


def jobs(kernel: Kernel, head_dims: tuple[int, ...]) -> Iterator[Job]:
    """Every problem that the kernel supports. bfloat16 and float32: without options only."""
    for name, D, causal, option in itertools.product(ARCHS, head_dims, (False, True), ("plain", *OPTIONS, *LAYOUTS)):
        for dtype in kernel.dtypes:
            if dtype == "bfloat16" and option != "plain":
                continue
            if dtype == "float32" and "float16" in kernel.dtypes and option != "plain":
                continue
            job = Job(kernel.name, name, dtype, D, causal, option)
            if not kernel.why_unsupported(job.problem(), arch.parse(name)):
                yield job


def code_hashes(cubin: bytes) -> list[str]:
    """A hash of each code section of an ELF file, sorted."""
    offset, entry_size, count, names_index = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    sections = [(cubin[names + h[0] : cubin.index(b"\0", names + h[0])], cubin[h[4] : h[4] + h[5]]) for h in headers]
    return sorted(hashlib.sha256(body).hexdigest()[:20] for name, body in sections if name.startswith(CODE))


def compiled(job: Job) -> tuple[str, list[str]]:
    """The job's key, and the hashes of its machine code, or the name of the exception."""
    key = " ".join(map(str, job))
    kernel, problem = registry.get(job.kernel), job.problem()
    try:
        tile = choose.choose_tile(kernel, problem, arch.parse(job.arch))
        return key, code_hashes(pipeline.compile_problem(kernel, problem, tile, job.arch)[0].cubin)
    except (UnsupportedProblem, CompileError) as error:
        return key, [type(error).__name__]


def compiled_anew(job: Job) -> tuple[str, list[str]]:
    """As `compiled`, without results of the cache."""
    with TemporaryDirectory() as folder:
        os.environ["SANDBOX_CACHE_DIR"] = folder
        return compiled(job)


def record(path: Path, found: list[Job], times: int, workers: int) -> None:
    """Compile, and write {key: hashes} as JSON. A second different result of the same problem has the key "KEY #2".
    Progress goes to stderr."""
    results: dict[str, list[list[str]]] = {}
    start = time.monotonic()
    # NVRTC's results vary with the addresses in its process: a process for each compilation
    once, compiling, chunk = (None, compiled, 4) if times == 1 else (1, compiled_anew, 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=once) as pool:
        for done, (key, hashes) in enumerate(pool.map(compiling, found * times, chunksize=chunk), 1):
            if hashes not in results.setdefault(key, []):
                results[key].append(hashes)
            if done % 100 == 0:
                print(f"{done} of {len(found) * times}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    named = {f"{k} #{i}" if i > 1 else k: x for k, each in sorted(results.items()) for i, x in enumerate(each, 1)}
    path.write_text(json.dumps(named, indent=0) + "\n")
    print(f"{len(results)} problems written to {path}")


def read(path: Path, renamed: dict[str, str]) -> dict[str, list[list[str]]]:
    """{key: different results} of a record, with the kernel names that `renamed` gives."""
    found: dict[str, list[list[str]]] = {}
    for key, hashes in json.loads(path.read_text()).items():
        kernel, rest = key.partition(" #")[0].split(" ", 1)
        found.setdefault(f"{renamed.get(kernel, kernel)} {rest}", []).append(hashes)
    return found


def compare(before: Path, after: Path, renamed: dict[str, str]) -> bool:
    """Print the differences; returns whether there are none. Only problems in both records are compared."""
    old, new = read(before, renamed), read(after, {})
    both = sorted(old.keys() & new.keys())
    different = [key for key in both if not any(hashes in new[key] for hashes in old[key])]
    for key in different:
        print("differs:", key)
    for label, only in (("before", old.keys() - new.keys()), ("after", new.keys() - old.keys())):
        if only:
            print(f"{len(only)} problems only {label}, such as {min(only)}")
    print(f"{len(both)} problems compared, {len(different)} differ")
    return bool(both) and not different


def drawn(names: list[str], like: set[str], sample: int, seed: int) -> list[Job]:
    """The problems to record: those of the kernels `names`, by default of all, and of `like` unless it is empty."""
    head_dims = HEAD_DIMS + SAMPLED_HEAD_DIMS if sample or like else HEAD_DIMS
    found = [job for name in names or registry.kernels() for job in jobs(registry.get(name), head_dims)]
    if like:
        found = [job for job in found if " ".join(map(str, job)) in like]
    return random.Random(seed).sample(found, min(sample, len(found))) if sample else found


def main() -> int:
    """Exit status: 0 if the machine code is equal, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("kernels", nargs="*")
    recording.add_argument("--sample", type=int, default=0)
    recording.add_argument("--seed", type=int, default=0)
    recording.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    recording.add_argument("--like", type=Path, help="only the problems of this record")
    recording.add_argument("--times", type=int, default=1, help="compilations of each problem")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    for command in (recording, comparing):
        command.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW", help="a kernel's new name")
    args = parser.parse_args()
    pairs = dict(pair.split("=", 1) for pair in args.renamed)
    if args.command == "record":
        like = set(read(args.like, pairs)) if args.like else set()
        record(args.file, drawn(args.kernels, like, args.sample, args.seed), args.times, args.jobs)
        return 0
    return 0 if compare(args.before, args.after, pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
