"""Profiles one launch with Nsight Compute or Nsight Systems, and reads the report.

The tools start `target`, which warms up and marks the launch of interest. Clocks are not locked, so that the profile
shows the actual speed. A profile is two files: the report of the tool, and PREFIX.zip, which is read on any machine,
without the tools and without a GPU. Its members: subject.json; the report's pages as CSV text; of Nsight Compute also
cubin, whose instruction addresses the pages refer to, and sources.json, the text of its source files.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..bench import environment
from ..core import atomic, process, registry, source_line
from ..core.errors import GpuUnavailable, ToolchainMissing, UnsupportedProblem
from ..core.kernel import Kernel
from ..core.operation import Operation, problem_from_json
from ..core.problem import Problem
from ..core.tile import Tile
from ..disassembly import listing
from ..engine import pipeline
from ..launch import driver
from ..toolchain import arch as architectures
from ..toolchain import disassembly, tools
from ..toolchain.nvrtc import Resources
from . import ncu
from .work import Work, work_of, work_of_operation

TOOLS = ("ncu", "nsys")
_COUNTERS = (
    "this user may not read the GPU's performance counters: run as root, or set NVreg_RestrictProfilingToAdminUsers=0 "
    "for the kernel module nvidia; in a container, --cap-add=SYS_ADMIN (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
)
_OTHER_VERSION = "{} is not a profile of ncu by this version of this package: profile again with it"
_SECONDS = 600
_MOST_OUTPUT = 256 * 2**20  # bytes; a page of a report has a line per instruction
# Floating-point operations per cycle and SM of dense fp16 tensor-core products with fp32 accumulation (NVIDIA's
# architecture white papers). On compute capability 9.0 a kernel with mma.sync reaches about 0.66 of it.
_TENSOR_FLOPS = {(7, 5): 512, (8, 0): 2048, (8, 6): 512, (8, 7): 1024, (8, 9): 512, (9, 0): 4096, (10, 0): 8192}
_FP32_FLOPS = 256  # per cycle and SM: 128 FMA units


@dataclass(frozen=True)
class Subject:
    """The subject of a profile: an entry point of a kernel, or of another `version` of it (see `listing.version`), with
    a problem and a tile."""

    entry: str
    problem: Problem
    tile: Tile
    arch: str
    version: str = ""

    def spec(self) -> Kernel:
        """The kernel that contains the entry point."""
        kernel = registry.entry_owner(self.entry)
        return listing.version(kernel, self.version) if self.version else kernel

    @property
    def label(self) -> str:
        """A label that distinguishes profiles of the same kernel."""
        version = Path(self.version).name if self.version.endswith(".cu") else self.version
        return " ".join(filter(None, (version, str(self.tile))))

    def dumps(self) -> str:
        """Convert to JSON text."""
        return json.dumps(vars(self) | {"problem": self.problem.as_json(), "tile": dict(self.tile)})

    @classmethod
    def loads(cls, text: str) -> Subject:
        """Read from JSON text."""
        read = json.loads(text)
        fields = {field.name: read[field.name] for field in dataclasses.fields(cls)}
        return cls(**fields | {"problem": problem_from_json(read["problem"]), "tile": Tile(**read["tile"])})


@dataclass(frozen=True)
class Profile:
    """Metrics of a launch by Nsight Compute, and its IO model. `where`: device, driver, clocks, commit."""

    subject: Subject
    counters: ncu.Counters
    lines: list[ncu.HotLine]
    where: dict[str, Any]

    @property
    def tflops(self) -> float | None:
        """TFLOP/s by the usual convention (half of the operations if causal); None without products."""
        flops = self.work.flops
        return flops / self.counters.seconds * 1e-12 if self.counters.seconds and flops else None

    @property
    def tensor_peak(self) -> float | None:
        """Peak TFLOP/s of dense products in the problem's dtype at the clock of the launch; None if unknown."""
        capability = architectures.parse(self.subject.arch)
        problem = self.subject.problem
        each = _FP32_FLOPS if problem.dtype == "float32" else _TENSOR_FLOPS.get(capability)
        if each and problem.float8:
            each *= 2
        sms = self.counters.first("device__attribute_multiprocessor_count", "launch__sm_count")
        return each * sms * self.counters.clock * 1e-12 if each and sms and self.counters.clock else None

    @cached_property
    def work(self) -> Work:
        """Operations of the launch, and its bytes: the minimum and the IO model's."""
        s = self.subject
        kernel = registry.entry_owner(s.entry)
        if isinstance(kernel.computes, Operation):
            return work_of_operation(kernel.computes, kernel.entry(s.entry), s.problem)
        return work_of(kernel.entry(s.entry), s.problem, s.tile)


def subject(entry: str, problem: Problem, tile: Tile | None, version: str = "") -> Subject:
    """The subject for an entry point `entry`, with `tile` or the best one for this GPU.

    Raises UnknownKernel, GpuUnavailable, UnsupportedProblem.
    """
    kernel = registry.entry_owner(entry)
    if version.endswith(".cu"):
        version = str(Path(version).resolve())  # the profiler and later readers may have another working directory
    gpu = driver.device()
    old = listing.version(kernel, version) if version else kernel
    old.entry(entry)  # raises UnknownKernel
    chosen = pipeline.tile_on(("cuda", 0), old, problem, tile, tuned=True)
    return Subject(entry, problem, chosen, pipeline.arch_name(old, gpu.arch), version)


def command(tool: str, subject: Subject, prefix: Path) -> list[str]:
    """The command line that profiles `subject` and writes the report."""
    target = [sys.executable, "-m", "sandbox.profile.target", subject.dumps()]
    program = tools.find(tool) or tool
    if tool == "nsys":
        options = ["--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
        return [program, "profile", *options, "--force-overwrite=true", f"--output={prefix}", *target]
    ranges = ["--nvtx"] if importlib.util.find_spec("nvtx") else []
    what = ["--kernel-name", f"regex:^{subject.entry}$", "--launch-count", "1", "--profile-from-start", "off", *ranges]
    how = ["--set", "full", "--import-source", "yes", "--clock-control", "none"]
    return [program, *what, *how, "--force-overwrite", "--export", str(prefix), *target]


def collect(tool: str, subject: Subject, prefix: Path) -> None:
    """Run the tool and write the profile's files.

    Raises ToolchainMissing without the tool, GpuUnavailable if counters are not permitted, UnsupportedProblem if
    no launch was profiled.
    """
    program = tools.need(tool)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    output = _run(command(tool, subject, prefix))
    if tool == "ncu":
        if "No kernels were profiled" in output:
            raise UnsupportedProblem(f"ncu found no launch of {subject.entry}:\n{output[-1000:]}")
        reading = [program, "--import", f"{prefix}.ncu-rep", "--csv", "--print-units", "base", "--page"]
        members: dict[str, str | bytes] = {f"{page}.csv": _run([*reading, page]) for page in ("raw", "source")}
        members |= _code(_cubin(subject))
    else:
        options = ["--report", "cuda_gpu_kern_sum", "--format", "csv", "--force-export=true"]
        members = {"kernels.csv": _run([program, "stats", *options, f"{prefix}.nsys-rep"])}
    members["subject.json"] = json.dumps(json.loads(subject.dumps()) | {"where": environment.describe()})
    store(prefix, members)


def store(prefix: Path, members: Mapping[str, str | bytes]) -> None:
    """Write PREFIX.zip."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    atomic.replace(Path(f"{prefix}.zip"), data.getvalue())


def stored(prefix: Path, *names: str) -> list[bytes]:
    """These members of PREFIX.zip. Raises UnsupportedProblem if it lacks one, or is something else."""
    path = f"{prefix}.zip"
    try:
        with zipfile.ZipFile(path) as archive:
            return [archive.read(name) for name in names]
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else "cannot be read"
        raise UnsupportedProblem(
            f"no stored profile has the prefix {prefix}: {path} {reason} (profile --out PREFIX writes one)"
        ) from None
    except (zipfile.BadZipFile, KeyError):
        raise UnsupportedProblem(_OTHER_VERSION.format(path)) from None


def _code(cubin: bytes) -> dict[str, str | bytes]:
    """The members for machine code: itself, and the text of the source files that it names, without CUDA's headers."""
    try:
        files = {at.file for i in disassembly.sass(cubin) for at in i.where if at.file.endswith((".cu", ".cuh"))}
    except ToolchainMissing:
        files = set()
    sources = {file: "\n".join(source_line.lines_of(file)) for file in sorted(files)}
    return {"cubin": cubin, "sources.json": json.dumps(sources)}


def _run(arguments: Sequence[str]) -> str:
    """The stdout of the tool. Raises GpuUnavailable or ToolchainMissing with its messages, and TooMuchOutput."""
    try:
        done = process.run(arguments, timeout=_SECONDS, most=_MOST_OUTPUT)
    except subprocess.TimeoutExpired:
        raise ToolchainMissing(f"{Path(arguments[0]).name} did not end within {_SECONDS} s") from None
    output = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in output:
        raise GpuUnavailable(_COUNTERS)
    if done.returncode:
        raise ToolchainMissing(
            f"{Path(arguments[0]).name} ended with status {done.returncode}:\n{output.strip()[-1500:]}"
        )
    return done.stdout


def read(prefix: Path) -> Profile:
    """Read a profile written by ncu. Source lines need nvdisasm; without it they are missing.

    Raises UnsupportedProblem if its files are missing or were written by another version of this package.
    """
    subject, where, counters, samples = _read_subject(prefix)
    try:
        lines = ncu.parse_source(samples, _instructions(prefix, subject))
    except ToolchainMissing:
        lines = []
    return Profile(subject, counters, lines, where)


def _read_subject(prefix: Path) -> tuple[Subject, dict[str, Any], ncu.Counters, str]:
    """The last one: the page with samples by instruction."""
    text, raw, source = (x.decode() for x in stored(prefix, "subject.json", "raw.csv", "source.csv"))
    try:
        subject, where = Subject.loads(text), json.loads(text)["where"]
    except (KeyError, TypeError, ValueError):
        raise UnsupportedProblem(_OTHER_VERSION.format(f"{prefix}.zip")) from None
    return subject, where, ncu.parse_raw(raw, subject.entry), source


def executed(prefix: Path) -> tuple[listing.Code, dict[int, int]] | None:
    """The machine code of a profile written by ncu, and {address: samples}; None without nvdisasm.

    Raises as `read` does.
    """
    subject, _, counters, samples = _read_subject(prefix)
    try:
        instructions = _instructions(prefix, subject)
    except ToolchainMissing:
        return None
    used = Resources(int(counters.first("launch__registers_per_thread") or 0), 0, 0, 0, 0)
    what = (subject.label, subject.entry, "sass", subject.arch, subject.problem, subject.tile, used)
    code = listing.Code(*what, tuple(instructions), subject.spec().source.name)
    return code, ncu.parse_samples(samples)


def _instructions(prefix: Path, subject: Subject) -> list[disassembly.Instruction]:
    """The instructions of the profiled entry point only, because addresses are relative to the entry point."""
    cubin, sources = stored(prefix, "cubin", "sources.json")
    source_line.record(json.loads(sources))
    return [i for i in disassembly.sass(cubin) if i.function == subject.entry]


def _cubin(subject: Subject) -> bytes:
    return pipeline.compile_entry(subject.spec(), subject.entry, subject.problem, subject.tile, subject.arch).cubin
