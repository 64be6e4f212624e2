"""What `watch` examines in a version of a kernel, and the stages that it reports."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sandbox.core import registry
from sandbox.core.errors import CompileError, LaunchError, SpecError, ToolchainMissing, UnsupportedProblem
from sandbox.core.kernel import Kernel
from sandbox.core.source_line import SourceLine
from sandbox.core.tile import Tile
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Problem
from sandbox.toolchain import nvrtc
from sandbox.verify.cases import Case
from sandbox.verify.check import Result
from sandbox.watch import examine
from sandbox.watch.figures import VersionResult, figures
from sandbox.watch.job import Job

KERNEL = registry.get("fwd_minimal")


def examined(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, known: tuple[Tile, ...] | None = None) -> VersionResult:
    """The result for a modified kernel, without sanitizers."""
    monkeypatch.setattr(registry, "get", lambda name: kernel)
    monkeypatch.setattr(examine, "_sanitizing", lambda *args: [])
    found, _ = examine.examine(Job(kernel.name, HOST, known=known), lambda stage, limit: None)
    assert isinstance(found, VersionResult)
    return found


def test_a_kernel_that_takes_no_problem_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported = dataclasses.replace(KERNEL, supports=lambda p, arch: "it is not supported")
    found = examined(unsupported, monkeypatch)
    assert (found.stage, found.ok) == ("refused", False)
    assert found.message == "fwd_minimal: it is not supported (use fwd_wgmma)"
    assert {r.ok for r in found.results} == {None}


@pytest.mark.parametrize(
    ("error", "stage"),
    [
        (CompileError("why", source="k.cu", options=(), log=""), "compile"),
        (SpecError("why"), "spec"),
        (UnsupportedProblem("why"), "refused"),
        (ToolchainMissing("why"), "refused"),
        (LaunchError("why"), "run"),
        (ZeroDivisionError("why"), "spec"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_stage_of_an_error(error: Exception, stage: str) -> None:
    def work(job: Job, report_stage: examine.ReportStage) -> VersionResult:
        raise error

    found = examine._reported(work, Job("fwd_minimal", HOST), lambda stage, limit: None)
    said = "ZeroDivisionError: why" if isinstance(error, ZeroDivisionError) else "why"
    assert (found.stage, found.message) == (stage, said)


@pytest.mark.parametrize(
    ("oks", "stage"),
    [
        ((None, None), "refused"),
        ((True, None), "ok"),
        ((None, True), "ok"),
        ((True, True), "ok"),
        ((True, False), "wrong"),
    ],
)
def test_one_problem_that_is_right_makes_a_version_ok(oks: tuple[bool | None, ...], stage: str) -> None:
    problem = Problem(1, 1, 1, 1, 16)
    results = tuple(Result("mine", "case", problem, "cpu", ok, error=None if ok is None else 1.0) for ok in oks)
    assert examine._verdict((), results)[0] == stage


def test_a_tile_that_is_new_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    new, wide = Tile(BLOCK_M=32, BLOCK_N=8), Tile(BLOCK_M=2048, BLOCK_N=8)
    more = dataclasses.replace(KERNEL, tiles=(*KERNEL.tiles, new, wide))
    found = examined(more, monkeypatch, KERNEL.tiles)
    assert found.stage == "ok", found
    assert [r.tile for r in found.results if r.case == "new tile"] == [new]
    (note,) = [note for note in found.notes if "tile" in note]
    assert note.startswith(f"new tile {wide} is not run: fwd_minimal: BLOCK_M=2048 is too large")
    assert not [r for r in examined(more, monkeypatch).results if r.case == "new tile"]


def test_a_new_tile_is_verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fault that occurs only with the new tile."""
    source, new = tmp_path / "fwd_minimal.cu", Tile(BLOCK_M=32, BLOCK_N=8)
    text = KERNEL.source.read_text()
    assert "l = alpha * l + row_sum;" in text
    source.write_text(text.replace("l = alpha * l + row_sum;", "l = alpha * l + row_sum + (BLOCK_N == 8);"))
    more = dataclasses.replace(KERNEL, source=source, tiles=(*KERNEL.tiles, new))
    assert examined(more, monkeypatch, KERNEL.tiles).stage == "wrong"


def verified(
    job: Job, oks: list[bool | None], monkeypatch: pytest.MonkeyPatch, fast: bool = False
) -> tuple[list[bool | None], list[int]]:
    """Which results `_verify` has for cases with these results, and the launches that each one times."""
    repeats, left = [], iter(oks)

    def verify(kernel: Kernel, case: Case, device: Device, tile: Tile | None, **how: Any) -> Result:
        ok = next(left)
        repeats.append(how["repeats"])
        return Result("mine", "case", case.problem, "cpu", ok, error=1.0 if ok else None)

    monkeypatch.setattr(examine.check, "verify", verify)
    trials = [(Case("case", Problem(1, 1, 1, 1, 16)), None)] * len(oks)
    found = examine._verify(KERNEL, trials, job, lambda stage, limit: None, fast=fast)
    return [r.ok for r in found], repeats


def test_only_the_first_case_is_timed_and_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, both = Job("fwd_minimal", ("cuda", 0)), [True, True]
    assert verified(gpu, both, monkeypatch)[1] == [examine.REPEATS, 1]
    assert verified(gpu, both, monkeypatch, fast=True)[1] == [1, 1]
    assert verified(Job("fwd_minimal", HOST), both, monkeypatch)[1] == [1, 1]


def test_no_case_is_run_after_one_that_fails_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = verified(Job("fwd_minimal", HOST), [True, None, False, True], monkeypatch)
    assert found == [True, None, False]


def test_without_nvrtc_the_host_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> str:
        raise ToolchainMissing("NVRTC is missing: install it\n(the reason)")

    monkeypatch.setattr(nvrtc, "version", version)
    found = examined(KERNEL, monkeypatch)
    assert (found.stage, found.cost) == ("ok", None)
    assert "NVRTC is missing: install it" in found.notes


def test_local_memory_of_any_variant_is_named(tmp_path: Path) -> None:
    """The first problem, whose figures are shown, has no spills."""
    try:
        nvrtc.version()
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    line = "    float m = -INF, l = 0.0f;"
    text = KERNEL.source.read_text()
    assert line in text
    indexed = (
        "float a[64]; for (int j = 0; j < 64; ++j) a[j] = expf(t * j); float m = -INF, l = a[score.Sq & 63] * 0.0f;"
    )
    source = tmp_path / "fwd_minimal.cu"
    source.write_text(text.replace(line, f"#if CAUSAL\n    {indexed}\n#else\n{line}\n#endif"))
    plain = Problem(1, 1, 64, 64, 64, dtype="float16")
    trials = [(Case("case", p), None) for p in (plain, dataclasses.replace(plain, causal="bottom-right"))]
    with ThreadPoolExecutor() as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(examine.pipeline, "load", lambda *args: None)  # of the CPU backend
        kernel = dataclasses.replace(KERNEL, source=source)
        cost, notes = examine._compile(kernel, trials, Job("fwd_minimal", HOST), pool)
        _, silent = examine._compile(KERNEL, trials, Job("fwd_minimal", HOST), pool)
    assert cost is not None
    shown = figures(VersionResult("ok", cost=cost))
    assert (shown["stack"], shown["spills"]) == (256, 0)
    (note,) = notes
    assert note.startswith(f"fwd_minimal on {trials[1][0].problem}, tile ")
    at = text.splitlines().index(line) + 2
    cause = f"the likely cause is an array that is indexed by a variable, at {SourceLine(str(source), at)}"
    assert "256 bytes of stack, in slow local memory" in note
    assert cause in note
    assert silent == []
