"""What `watch` examines in a version of a kernel, and the stages that it reports."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
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
from sandbox.toolchain.nvrtc import Resources
from sandbox.verify.cases import Case
from sandbox.verify.check import Result
from sandbox.verify.findings import Finding
from sandbox.verify.sanitize import Inspection
from sandbox.watch import examine
from sandbox.watch.figures import VersionResult, figures
from sandbox.watch.job import Job, quick_cases

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
    assert found.message == "fwd_minimal: it is not supported (use fwd_wgmma_split)"
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


# ---- verdicts


PROBLEM = Problem(1, 1, 64, 64, 64, dtype="float16")
LINE, OTHER = SourceLine("k.cu", 3), SourceLine("k.cu", 4)


def result(ok: bool | None, message: str = "", error: float | None = 1.0, **more: Any) -> Result:
    return Result("mine", "case", PROBLEM, "cpu", ok, error=error, message=message, **more)


def test_verdicts() -> None:
    """Findings come first, then a failure to run, then the first wrong result, with its cause and place."""
    race, stuck = Finding("data race", on="B1"), Finding("mine did not finish within 3 s: does it end?", on="B2")
    where = SimpleNamespace(text="O is wrong in all rows")
    broken, wrong = result(False, "illegal address", error=None), result(False, "error 2 > 1")
    mapped, explained = result(False, where=where), result(False, where=where, cause="without the scale")
    right, refused = result(True), result(None, "not this one", error=None)
    for findings, results, verdict in (
        ((race, stuck), (), ("sanitize", "data race\non B1")),
        ((stuck, race), (wrong,), ("hang", f"{stuck.what}\non B2")),
        ((), (wrong, broken), ("run", "illegal address")),
        ((), (right, wrong, mapped), ("wrong", "error 2 > 1")),
        ((), (right, mapped, wrong), ("wrong", "O is wrong in all rows")),
        ((), (explained,), ("wrong", "without the scale\nO is wrong in all rows")),
        ((), (refused, right), ("ok", "")),
        ((), (refused, result(None, "another", error=None)), ("refused", "not this one")),
    ):
        assert examine._verdict(findings, results) == verdict  # type: ignore[arg-type]


def test_the_time_of_a_version_that_fails() -> None:
    def work(job: Job, report_stage: examine.ReportStage) -> VersionResult:
        time.sleep(0.02)
        raise SpecError("why")

    assert 0.02 <= examine._reported(work, JOB, silent).seconds < 10


JOB = Job("fwd_minimal", HOST)


def silent(stage: str, limit: float | None) -> None:
    pass


# ---- resources


def compiled(entry: str = "k", stack: int = 0, stores: int = 0, loads: int = 0, ptx: str = "", **more: Any) -> Any:
    resources = Resources(more.pop("registers", 32), more.pop("smem_static", 0), stack, stores, loads)
    return SimpleNamespace(entry=entry, arch="sm_90a", resources=resources, ptx=ptx)


def test_the_cost_of_several_entries_and_variants() -> None:
    """Of the first variant, with the least occupancy; stack and spills are the maxima of all variants."""
    kernel, p = registry.get("bwd_minimal"), dataclasses.replace(PROBLEM, D=64)
    tile = kernel.tiles[0]
    assert len(kernel.entries) == 2
    first = compiled(registers=40, smem_static=100, loads=4), compiled(registers=128, stack=16)
    second = compiled(registers=255, smem_static=9999, stores=8), compiled(stack=24, loads=12)
    cost = examine._cost(kernel, p, tile, [first, second])
    assert (cost.arch, cost.tile, cost.opcodes) == ("sm_90a", tile, {})
    assert cost.resources == Resources(128, 100, 24, 8, 12)
    assert cost.smem_bytes == max(
        entry.smem_bytes(p, tile) + n for entry, n in zip(kernel.entries, (100, 0), strict=True)
    )
    each = [
        examine.pipeline.occupancy(entry, p, tile, made.resources, examine.architectures.parse("sm_90a"))
        for entry, made in zip(kernel.entries, first, strict=True)
    ]
    assert each[0].fraction != each[1].fraction
    assert cost.occupancy == min(each, key=lambda occupancy: occupancy.fraction)


def test_local_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each entry: spills with both numbers, else the stack, at up to three lines of its accesses."""
    tile = Tile(BLOCK_M=64)
    accesses = [("ld.local.f32", LINE), ("st.global.f32", SourceLine("k.cu", 1)), ("st.local.f32", LINE),
                ("st.local.f32", None), *(("ld.local.u8", SourceLine("k.cu", n)) for n in (4, 5, 6))]  # fmt: skip
    found = {"long": [SimpleNamespace(opcode=opcode, line=line) for opcode, line in accesses], "": []}
    monkeypatch.setattr(examine.disassembly, "ptx", found.__getitem__)
    entries = (compiled(), compiled("a", 8, 4, 0), compiled("b", 0, 0, 12), compiled("c", 16, ptx="long"),
               compiled("d", 24))  # fmt: skip
    on, cause = f"on {PROBLEM}, tile {tile}, for sm_90a", "the likely cause is an array that is indexed by a variable"
    assert examine._slow_memory(KERNEL, [(PROBLEM, tile)], [entries]) == [
        f"a {on}: 4 bytes of stores and 0 of loads are spilled with 32 registers: a thread needs more",
        f"b {on}: 0 bytes of stores and 12 of loads are spilled with 32 registers: a thread needs more",
        f"c {on}: 16 bytes of stack, in slow local memory: {cause}, at k.cu:3, k.cu:4, k.cu:5",
        f"d {on}: 24 bytes of stack, in slow local memory: {cause}",
    ]


@pytest.mark.parametrize(("arch", "target"), [(None, examine.pipeline.DEFAULT_ARCH), ((9, 0), "sm_90")])
def test_what_is_compiled(arch: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant by NVRTC, and without a GPU also by the host. The cost and the counts are of the first one."""
    device: Device = ("cuda", 0) if arch else HOST
    asked: list[Any] = []

    def compile_problem(kernel: Kernel, p: Problem, tile: Tile, arch: str) -> tuple[Any, ...]:
        asked.append(("nvrtc", p.causal, tile, arch))
        made = compiled(registers=40 if p.causal else 32)
        made.cubin = str(p.causal).encode()
        return (made,)

    def load(kernel: Kernel, tile: Tile, p: Problem, device: Device) -> None:
        asked.append(("host", p.causal, tile, device))

    monkeypatch.setattr(examine.pipeline, "arch_of", lambda device: arch)
    monkeypatch.setattr(examine.pipeline, "tile_on", lambda device, kernel, p, tile: tile)
    monkeypatch.setattr(examine.pipeline, "compile_problem", compile_problem)
    monkeypatch.setattr(examine.pipeline, "load", load)
    monkeypatch.setattr(examine.nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(examine.disassembly, "opcode_counts", lambda cubin: {cubin.decode(): 1})
    tile, causal = KERNEL.tiles[0], dataclasses.replace(PROBLEM, causal="top-left")
    trials = [(Case("case", p), tile) for p in (PROBLEM, causal)]
    with ThreadPoolExecutor(1) as pool:
        cost, notes = examine._compile(KERNEL, trials, dataclasses.replace(JOB, device=device), pool)
        assert examine._counted() == {"False": 1}
        nvrtc_ = [("nvrtc", mask, tile, target) for mask in (False, "top-left")]
        on_host = [("host", mask, tile, HOST) for mask in (False, "top-left")]
        assert asked == [*nvrtc_, *([] if arch else on_host)]
        assert cost
        assert (cost.resources.registers, cost.tile, notes) == (32, tile, [])
        del asked[:]

        def missing() -> None:
            raise ToolchainMissing("NVRTC is missing: install it\n(the reason)")

        monkeypatch.setattr(examine.nvrtc, "version", missing)
        cost, notes = examine._compile(KERNEL, trials, dataclasses.replace(JOB, device=device), pool)
        assert (cost, notes, examine._counted()) == (None, ["NVRTC is missing: install it"], {})
        assert asked == ([] if arch else on_host)


# ---- sanitizers


def inspection(tool: str, *findings: Finding, clean: bool | None = True, message: str = "", S: int = 64) -> Inspection:
    problem = dataclasses.replace(PROBLEM, Sq=S)
    return Inspection("mine", problem, Tile(N=S), tool, clean if not findings else False, findings, message)


def futures(*inspections: Inspection) -> list[Any]:
    return [SimpleNamespace(exception=lambda: None, result=lambda i=i: i) for i in inspections]


def test_each_fault_is_reported_once() -> None:
    """With the first problem on which it was found; by its lines, or its text if it has none. And why a tool did not
    run."""
    pending = [
        futures(
            inspection("address", Finding("at 3", (LINE,)), S=1), inspection("thread", clean=None, message="no gcc")
        ),
        futures(inspection("address", Finding("again at 3", (LINE,)), Finding("at 4", (OTHER,)), S=2)),
        futures(inspection("thread", Finding("race"), Finding("race"), clean=None, message="and no clang", S=3)),
        futures(inspection("thread", clean=None, message="another")),
    ]
    findings, notes = examine._collect(pending)
    on = {n: f"{dataclasses.replace(PROBLEM, Sq=n)}, tile N={n}" for n in (1, 2, 3)}
    assert findings == (
        Finding("at 3", (LINE,), on[1]), Finding("at 4", (OTHER,), on[2]), Finding("race", (), on[3])
    )  # fmt: skip
    assert notes == ["no gcc"]
    assert examine._collect([]) == ((), [])


def test_what_a_stray_store_causes_is_not_reported() -> None:
    stray, other = inspection("address", Finding("out of bounds, write of 4 bytes")), Finding("O is not initialised")
    affected = next(iter(examine.sanitize._AFFECTED_BY_STRAY_STORES))
    caused = inspection(affected, other)
    assert [f.what for f in examine._collect([futures(stray, caused)])[0]] == [stray.findings[0].what]
    assert [f.what for f in examine._collect([futures(stray), futures(caused)])[0]] == [
        stray.findings[0].what,
        other.what,
    ]


def test_a_process_that_a_stray_access_ended_is_not_reported() -> None:
    stray, crash = (
        inspection("address", Finding("out of bounds, read of 4 bytes")),
        Finding("k was terminated by SIGSEGV"),
    )
    for what in (crash, Finding("free(): invalid pointer")):
        ended = inspection("undefined", what)
        assert [f.what for f in examine._collect([futures(stray, ended)])[0]] == [stray.findings[0].what]
        assert [f.what for f in examine._collect([futures(ended)])[0]] == [what.what]
    both = inspection("undefined", crash, Finding("signed integer overflow"))
    assert len(examine._collect([futures(stray, both)])[0]) == 3


class Examined:
    """Replaces what `_examine` calls: records which tiles are sanitized, with which tools and limits."""

    def __init__(self, patch: pytest.MonkeyPatch, findings: Sequence[Finding] = ()):
        self.sanitized: list[Any] = []
        self.verified = 0
        self.stages: list[tuple[str, float | None]] = []
        self.results: tuple[Result, ...] = (result(True),)

        def on_host(tool: str, kernel: Kernel, problem: Problem, tile: Tile, seconds: float) -> Inspection:
            self.sanitized.append((tile, problem, tool, seconds))
            return inspection(tool, *(findings if problem.Sq == 5 else ()))

        def verify(*given: Any, **options: Any) -> tuple[Result, ...]:
            self.verified += 1
            return self.results

        problems = [dataclasses.replace(PROBLEM, Sq=Sq) for Sq in (5, 6)]
        patch.setattr(examine.sanitize, "on_host", on_host)
        patch.setattr(examine.sanitize, "small_problems", lambda kernel, tile: problems)
        patch.setattr(examine.sanitize, "shipped_tiles", lambda kernel, arch: [(KERNEL.tiles[1], problems[1])])
        patch.setattr(examine, "_verify", verify)
        patch.setattr(examine, "_compile", lambda *given: (None, ["a note"]))
        patch.setattr(examine, "_counts", None)

    def __call__(self, job: Job) -> VersionResult:
        found, _ = examine.examine(job, lambda stage, limit: self.stages.append((stage, limit)))
        assert isinstance(found, VersionResult)
        return found

    def tiles(self) -> list[Any]:
        return [*dict.fromkeys((tile, problem.Sq, seconds) for tile, problem, _, seconds in self.sanitized)]


SMALL_TILE = examine.sanitize.small_tile(KERNEL)


@pytest.mark.parametrize("seconds", [3.0, 100.0])
def test_shipped_tiles_are_sanitized_while_results_are_compared(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the smallest tile on its first problem, with one more tool; large tiles have at least a minute."""
    run = Examined(monkeypatch)
    found = run(Job("fwd_minimal", HOST, PROBLEM, seconds=seconds))
    assert (found.stage, found.notes, run.verified) == ("ok", ("a note",), 1)
    assert run.tiles() == [(SMALL_TILE, 5, seconds), (KERNEL.tiles[1], 6, max(seconds, 60))]
    assert {tool for tile, _, tool, _ in run.sanitized if tile == SMALL_TILE} == {"address", "thread", "uninitialised"}
    assert {tool for tile, _, tool, _ in run.sanitized if tile != SMALL_TILE} == {"address", "thread"}
    assert [stage for stage, _ in run.stages] == [
        "reading the spec", "compiling", "running it under sanitizers", "running the shipped tiles under sanitizers"
    ]  # fmt: skip
    assert [limit for _, limit in run.stages] == [seconds, *[examine.COMPILE_SECONDS] * 3]
    assert found.setting == f"cpu: {PROBLEM}"
    assert 0 < found.compiling < found.seconds


def test_the_figures_are_of_the_first_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    run, cases = Examined(monkeypatch), quick_cases(KERNEL, HOST)
    assert cases[0].problem != cases[-1].problem
    assert run(JOB).setting == f"cpu: {cases[0].problem}"


def test_a_tile_of_the_user_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Examined(monkeypatch)
    run(Job("fwd_minimal", HOST, PROBLEM, tile=KERNEL.tiles[0], known=()))
    assert run.tiles() == [(KERNEL.tiles[0], 5, 10.0)]


def test_what_is_not_safe_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Examined(monkeypatch, [Finding("data race")])
    found = run(Job("fwd_minimal", HOST, PROBLEM))
    assert (found.stage, found.results, run.verified) == ("sanitize", (), 0)
    assert run.tiles() == [(SMALL_TILE, 5, 10.0)]


def test_on_a_gpu_nothing_is_sanitized(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Examined(monkeypatch)
    gpu = SimpleNamespace(name="a GPU", arch=(9, 0), synchronize=lambda: None)
    monkeypatch.setattr(examine.driver, "device", lambda ordinal: gpu)
    monkeypatch.setattr(examine, "device_usable", lambda device: device == ("cuda", 3))
    found = run(Job("fwd_minimal", ("cuda", 3), PROBLEM))
    assert (found.stage, found.setting, run.sanitized) == ("ok", f"a GPU: {PROBLEM}", [])


# ---- the worker


def test_all_end_before_the_first_error_is_raised() -> None:
    ended: list[int] = []

    def future(n: int, error: Exception | None) -> Any:
        def fail() -> int:
            if error:
                raise error
            return n

        return SimpleNamespace(exception=lambda: ended.append(n), result=fail)

    assert examine._all(future(n, None) for n in range(3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="first"):
        examine._all([future(3, None), future(4, ValueError("first")), future(5, ValueError("second"))])
    assert ended == [0, 1, 2, 3, 4, 5]


def test_one_worker_at_a_time_uses_the_gpu(tmp_path: Path) -> None:
    lock, order = tmp_path / "lock", list[str]()
    lock.touch()
    job = dataclasses.replace(JOB, gpu_lock=lock)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with examine._gpu_locked(job):
            entered.set()
            leave.wait(60)
            order.append("first")

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(60)
    with examine._gpu_locked(JOB):  # without a lock
        order.append("another")
    threading.Timer(0.05, leave.set).start()
    with examine._gpu_locked(job):
        order.append("second")
    thread.join()
    assert order == ["another", "first", "second"]


def test_one_wrong_result_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """An explanation takes time. The limit of the kernel's run is the job's, not that of the reference."""
    explained, stages = list[bool](), list[tuple[str, float | None]]()
    where = SimpleNamespace(text="here")
    left = iter([result(True), result(False, where=where), result(False), result(True)])

    def verify(*given: Any, explain: bool, **how: Any) -> Result:
        explained.append(explain)
        return next(left)

    monkeypatch.setattr(examine.check, "verify", verify)
    trials = [(Case("case", PROBLEM), None)] * 4
    examine._verify(KERNEL, trials, JOB, lambda *stage: stages.append(stage))
    assert explained == [True, True, False, False]
    assert stages[:3] == [
        ("waiting for the GPU", 300.0), (f"preparing {PROBLEM}", 300.0), (f"running {PROBLEM}", 10.0)
    ]  # fmt: skip


def test_a_worker_without_a_gpu_or_nvrtc_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job reports the errors. The references are computed in advance."""
    made: list[Problem] = []

    def fail(*given: object) -> None:
        raise LaunchError("no")

    suite = SimpleNamespace(reference=lambda case: made.append(case.problem))
    monkeypatch.setattr(examine, "suite_of", lambda kernel: suite)
    monkeypatch.setattr(examine.nvrtc, "version", fail)
    examine.prepare(Job("fwd_minimal", HOST, PROBLEM))
    assert made == [PROBLEM]
    monkeypatch.setattr(examine.driver, "device", fail)
    examine.prepare(Job("fwd_minimal", ("cuda", 0), PROBLEM))
    assert made == [PROBLEM]
    ordinals: list[int] = []
    gpu = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(examine.driver, "device", lambda ordinal: ordinals.append(ordinal) or gpu)
    examine.prepare(Job("fwd_minimal", ("cuda", 2), PROBLEM))
    assert (ordinals, made) == ([2], [PROBLEM] * 2)


def test_the_first_verdict_is_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled fast."""
    fast: list[bool] = []
    load = examine.pipeline.load

    def loaded(*given: Any) -> Any:
        fast.append(given[4])
        return load(*given[:4])

    monkeypatch.setattr(examine.pipeline, "load", loaded)
    monkeypatch.setattr(examine.check, "verify", lambda *given, **how: fast.append(how["fast"]) or result(True))
    found, fit = examine.first_verdict(Job("fwd_minimal", HOST, PROBLEM), silent)
    assert found
    assert (found.stage, found.cost, found.findings, found.setting, fit) == ("ok", None, (), f"cpu: {PROBLEM}", True)
    assert fast == [True, True]
    assert 0 < found.compiling < found.seconds


def test_each_binary_is_compiled_once() -> None:
    """Problems that differ in sizes alone share one. Those that the kernel does not support have none."""
    kernel = dataclasses.replace(KERNEL, supports=lambda p, arch: "it is not supported" if p.Sq == 9 else None)
    tiles, causal = KERNEL.tiles, dataclasses.replace(PROBLEM, causal="top-left")
    problems = PROBLEM, dataclasses.replace(PROBLEM, Sq=7), causal, dataclasses.replace(PROBLEM, D=128, Sq=9)
    trials = [(Case("case", p), tile) for p in problems for tile in tiles[:2]]
    assert examine._variants(kernel, trials, JOB) == [(p, tile) for p in (PROBLEM, causal) for tile in tiles[:2]]
    halves = [examine._shared(kernel, trials, dataclasses.replace(JOB, share=(i, 2))) for i in range(2)]
    assert sorted(map(trials.index, [*halves[0], *halves[1]])) == [*range(len(trials))]
    binaries = [examine._variants(kernel, half, JOB) for half in halves]
    assert [len(each) for each in binaries] == [2, 2]
    assert not {*binaries[0]} & {*binaries[1]}


def test_shares_of_a_first_verdict_are_merged() -> None:
    """A failure decides, then a correct result; a share may have no case."""
    correct = VersionResult("ok", results=(result(True),), compiling=1.0, notes=("a",), output="x")
    none, refused = VersionResult("ok"), VersionResult("refused", "no", notes=("a", "b"), compiling=2.0, output="y")
    wrong = VersionResult("wrong", "row 3", results=(result(False),))
    assert examine.merged([correct, none]) == correct
    both = examine.merged([refused, correct])
    assert (both.stage, both.results, both.notes) == ("ok", correct.results, ("a", "b"))
    assert (both.compiling, both.output) == (2.0, "yx")
    assert examine.merged([correct, wrong]).message == "row 3"
    assert examine.merged([correct, wrong]).results == correct.results + wrong.results
    assert examine.merged([none, refused]).stage == "refused"
    assert examine.merged([none, none]).stage == "ok"


def test_counts_are_empty_without_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cubin: bytes) -> None:
        raise ToolchainMissing("no nvdisasm")

    cubin = SimpleNamespace(result=lambda: (SimpleNamespace(cubin=b"first"), SimpleNamespace(cubin=b"second")))
    monkeypatch.setattr(examine.disassembly, "opcode_counts", lambda cubin: {cubin.decode(): 1})
    assert examine._opcodes(cubin) == {"first": 1}
    monkeypatch.setattr(examine.disassembly, "opcode_counts", fail)
    assert examine._opcodes(cubin) == {}
    monkeypatch.setattr(examine, "_counts", None)
    assert examine._counted() == {}
