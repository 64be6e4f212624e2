"""The verdict on a kernel's outputs, and the fields of a result; kernels are replaced by the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sandbox.core import registry
from sandbox.core.errors import (
    CompileError,
    DriverError,
    NoFastCompilation,
    SpecError,
    ToolchainMissing,
    UnsupportedProblem,
)
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Kernel, Problem, Tile
from sandbox.toolchain.nvrtc import Resources
from sandbox.verify import check, isolated
from sandbox.verify.cases import Case
from sandbox.verify.references import ReferenceOutput
from sandbox.verify.suite import suite_of

KERNEL = registry.get("fwd_minimal")
PROBLEM = Problem(1, 2, 40, 40, 16, dtype="float16")
CASE = Case("one", PROBLEM)
TILE = KERNEL.tiles[0]
RESOURCES = Resources(40, 512, 0, 0, 0)
COMPILED = SimpleNamespace(arch="sm_80", seconds=0.5, cached=False, resources=RESOURCES)


# ---- verdicts


def answers(**bounds: Any) -> dict[str, ReferenceOutput]:
    return {name: ReferenceOutput(np.zeros(3), bound) for name, bound in bounds.items()}


@pytest.mark.parametrize(
    ("errors", "tensor"),
    [
        ({"dQ": 1, "dK": 2, "dV": 1}, "dK"),  # ratios of 0.5, 0.5 and 0.25
        ({"dQ": 1.1, "dK": 2, "dV": 1}, "dQ"),
        ({"dQ": 3, "dK": 2, "dV": 1}, "dQ"),
        ({"dQ": 1, "dK": 2, "dV": np.nan}, "dV"),
        ({"dQ": 1, "dV": 1}, "dQ"),
    ],
)
def test_the_worst_output(errors: dict[str, float], tensor: str) -> None:
    """That with the largest ratio of error and bound; outputs that a kernel lacks do not count."""
    given = answers(dQ=2.0, dK=3.99, dV=4.0)
    found = check._verdict(given, {name: np.array([0, -error, 0]) for name, error in errors.items()})
    assert (found.tensor, found.bound) == (tensor, given[tensor].bound)
    assert found.error == (np.inf if np.isnan(errors[tensor]) else errors[tensor])
    assert (found.lse_error, found.lse_excess) == (None, None)


def test_integers_have_no_bound() -> None:
    """Their bound is 0: a wrong one is worse than a correct float, a correct one is not."""
    given = answers(n=0.0, x=1.0)
    assert check._verdict(given, {"n": np.zeros(3), "x": np.full(3, 0.5)}).tensor == "x"
    assert check._verdict(given, {"n": np.array([0, 1, 0]), "x": np.full(3, 0.5)}).tensor == "n"


def test_lse_apart() -> None:
    """The largest excess of an element over its bound."""
    given = answers(O=1.0, LSE=np.array([1.0, 2.0, 3.0]))
    found = check._verdict(given, {"O": np.full(3, 0.5), "LSE": np.array([0.5, 2.25, 2.5])})
    assert (found.tensor, found.error, found.bound, found.lse_error, found.lse_excess) == ("O", 0.5, 1.0, 2.5, 0.25)
    found = check._verdict(given, {"O": np.full(3, 0.5), "LSE": np.array([0.5, 1.5, 2.5])})
    assert found.lse_excess == -0.5
    nothing = {"O": ReferenceOutput(np.zeros(0), 1.0), "LSE": ReferenceOutput(np.zeros(0), np.zeros(0))}
    assert check._verdict(nothing, {"O": np.zeros(0), "LSE": np.zeros(0)}).lse_excess == -1


# ---- results


class Launch:
    """In place of `trial.launch`: the reference's outputs, changed by `change`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Any = None, stray: tuple[str, ...] = (),
                 error: Exception | None = None):  # fmt: skip
        self.given: list[dict[str, Any]] = []
        self._change, self._stray, self._error = change, stray, error
        monkeypatch.setattr(check.trial, "launch", self)
        monkeypatch.setattr(check.diagnosis, "diagnose", lambda *given, **how: f"a cause ({given[1].name})")

    def __call__(self, kernel: Kernel, tile: Tile, p: Problem, inputs: Any, device: Device, **how: Any) -> Any:
        self.given.append({"tile": tile, **how})
        if self._error:
            raise self._error
        outputs = {name: x.values.copy() for name, x in suite_of(kernel).reference(CASE).outputs.items()}
        if self._change:
            self._change(outputs)
        prepared = SimpleNamespace(kernel=kernel, problem=p, tile=tile, compiled=(COMPILED,), seconds=0.25, cached=True)
        return SimpleNamespace(prepared=prepared, outputs=outputs, stray_writes=self._stray, seconds=0.125)


def wrong_O(outputs: Any) -> None:
    outputs["O"][0, 1, 5, 3] += 1


def wrong_LSE(outputs: Any) -> None:
    outputs["LSE"][0, 1, 5] += 1


def verified(device: Device = HOST, **how: Any) -> check.Result:
    return check.verify(KERNEL, CASE, device, TILE, **how)


def test_a_correct_result(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(monkeypatch)
    found = verified(repeats=3)
    assert launch.given == [{"tile": TILE, "repeats": 3, "fast": False}]
    assert (found.ok, found.error, found.tensor, found.message, found.where, found.cause) == (
        True,
        0,
        "O",
        "",
        None,
        "",
    )
    assert (found.kernel, found.case, found.problem, found.backend) == ("fwd_minimal", "one", PROBLEM, "cpu")
    assert (found.tile, found.arch, found.seconds, found.tflops, found.sanitize) == (TILE, "sm_80", 0.125, None, False)
    assert (found.compile_seconds, found.cached, found.resources) == (0.5, False, RESOURCES)
    assert found.smem == KERNEL.entries[0].smem_bytes(PROBLEM, TILE) + 512


def test_a_result_of_the_fast_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without times and resources."""
    Launch(monkeypatch)
    found = verified(fast=True)
    assert (found.ok, found.seconds, found.resources, found.arch, found.smem) == (True, None, None, "", None)


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize(("change", "name", "first"), [(wrong_O, "O", (0, 1, 5, 3)), (wrong_LSE, "LSE", (0, 1, 5))])
def test_a_wrong_result(change: Any, name: str, first: Any, explain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    Launch(monkeypatch, change)
    found = verified(explain=explain)
    assert (found.ok, found.sanitize) == (False, True)
    assert found.where
    assert (found.where.name, found.where.first) == (name, first)
    at = ", ".join(f"{axis} {i}" for axis, i in zip(("b", "h", "row", "column"), first, strict=False))
    assert found.cause == (f"{name} on one, first wrong at {at}: a cause (one)." if explain else "")


def test_a_stray_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is wrong although all outputs are correct."""
    Launch(monkeypatch, stray=("O", "LSE"))
    found = verified(explain=True)
    assert (found.ok, found.where, found.cause, found.sanitize) == (False, None, "", True)
    assert found.message == "memory beside O, LSE was written"


@pytest.mark.parametrize(
    ("error", "ok", "sanitize"),
    [
        (UnsupportedProblem("no"), None, False),
        (CompileError("no", source="", options=(), log=""), False, False),
        (SpecError("no"), False, False),
        (DriverError("no", code=700, name="x"), False, True),
    ],
)
def test_a_launch_that_fails(
    error: Exception, ok: bool | None, sanitize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Launch(monkeypatch, error=error)
    found = verified()
    assert (found.ok, found.message, found.sanitize, found.error, found.tile) == (ok, "no", sanitize, None, None)
    assert (found.kernel, found.case, found.problem, found.backend) == ("fwd_minimal", "one", PROBLEM, "cpu")


def test_no_fast_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    Launch(monkeypatch, error=NoFastCompilation("no"))
    with pytest.raises(NoFastCompilation):
        verified(fast=True)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ToolchainMissing("no NVRTC\nmake setup"), "no NVRTC"),
        (UnsupportedProblem("fwd_minimal: too large\nchoose"), "regs and smem are not shown: for sm_90a, too large"),
    ],
)
def test_resources_that_are_not_known(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note; then the time is that of the emulation's compilation."""

    def compile_problem(*given: Any) -> Any:
        raise error

    Launch(monkeypatch)
    monkeypatch.setattr(check.pipeline, "DEFAULT_ARCH", "sm_90a")
    monkeypatch.setattr(check.pipeline, "compile_problem", compile_problem)
    found = verified(report=True)
    assert (found.ok, found.message, found.resources, found.smem) == (True, message, None, None)
    assert (found.compile_seconds, found.cached, found.arch) == (0.25, True, "")


def test_a_source_that_nvrtc_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_problem(*given: Any) -> Any:
        raise CompileError("refused", source="", options=(), log="")

    Launch(monkeypatch)
    monkeypatch.setattr(check.pipeline, "compile_problem", compile_problem)
    found = verified(report=True)
    assert (found.ok, found.message) == (False, "refused")
    assert verified().ok  # without the report NVRTC is not asked


def test_speed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Launch(monkeypatch)
    monkeypatch.setattr(check.pipeline, "tile_on", lambda *given: TILE)
    found = verified(("cuda", 0), report=True)
    assert found.backend == "cuda"
    assert found.tflops == pytest.approx(4 * 2 * 40 * 40 * 16 / 0.125 * 1e-12)


# ---- several cases


def result(name: str, wrong: bool) -> check.Result:
    where: Any = "somewhere" if wrong else None
    return check.Result(name, "x", PROBLEM, "cpu", not wrong, where=where)


@pytest.mark.parametrize("device", [HOST, ("cuda", 0)])
def test_only_the_first_wrong_result_of_a_kernel_is_explained(device: Device) -> None:
    given: list[tuple[str, bool]] = []
    wrong = iter([False, True, True, False, True])

    def verifier(kernel: Kernel, case: Case, to: Device, tile: Any, **how: Any) -> check.Result:
        assert (to, how["repeats"], how["report"], tile) == (device, 1 if device == HOST else 20, True, TILE)
        given.append((kernel.name, how["explain"]))
        return result(kernel.name, next(wrong))

    other = registry.get("fwd_mma")
    runs = [(kernel, CASE) for kernel in (KERNEL, KERNEL, other, KERNEL, other)]
    assert len([*check.run_cases(runs, device, TILE, verifier)]) == 5
    explained = [(name, explain) for name, explain in given]
    assert explained == [
        ("fwd_minimal", True), ("fwd_minimal", True), ("fwd_mma", True), ("fwd_minimal", False), ("fwd_mma", False)
    ]  # fmt: skip


def test_a_sweep_explains_the_first_wrong_result_of_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, bool]] = []
    wrong = iter([False, True, False] * 2)
    suite = SimpleNamespace(sweep_cases=lambda kernel: [CASE] * 3)
    monkeypatch.setattr(check, "suite_of", lambda kernel: suite)

    def verifier(kernel: Kernel, case: Case, to: Device, tile: Any, *, explain: bool) -> check.Result:
        given.append((kernel.name, explain))
        return result(kernel.name, next(wrong))

    names = ("fwd_minimal", "fwd_mma")
    assert len([*check.sweep([registry.get(name) for name in names], HOST, None, verifier)]) == 6  # type: ignore[arg-type]
    assert given == [(name, explain) for name in names for explain in (True, True, False)]


def test_runs_case_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with the same case are adjacent."""
    cases = {
        "fwd_minimal": [Case("a", PROBLEM), Case("b", PROBLEM)],
        "fwd_mma": [Case("b", PROBLEM), Case("c", PROBLEM)],
    }
    monkeypatch.setattr(
        check, "suite_of", lambda kernel: SimpleNamespace(named_cases=lambda kernel, small: cases[kernel.name])
    )
    found = check.named_runs([registry.get(name) for name in cases], small=True)
    assert [(kernel.name, case.name) for kernel, case in found] == [
        ("fwd_minimal", "a"), ("fwd_minimal", "b"), ("fwd_mma", "b"), ("fwd_mma", "c")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "gpu", "device"),
    [(None, False, HOST), (None, True, ("cuda", 3)), ("cpu", True, HOST), ("cuda", False, ("cuda", 3))],
)
def test_the_device_of_a_backend(
    backend: str | None, gpu: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.driver, "available", lambda: gpu)
    monkeypatch.setattr(check.driver, "device", lambda: SimpleNamespace(ordinal=3))
    assert check.pick_device(backend) == device


# ---- another process


class Worker:
    """Ends at each job of fwd_minimal, and prints."""

    def __init__(self, function: Any):
        self.closed = 0

    def do(self, job: Any) -> tuple[check.Result, str]:
        if job.kernel == "fwd_minimal":
            death = isolated.WorkerDied("killed")
            death.printed, death.stage = "before", "running it"
            raise death
        return result(job.kernel, False), "out" if job.report else ""

    def close(self) -> None:
        self.closed += 1


def test_a_kernel_that_ends_the_process_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "Worker", Worker)
    printed: list[str] = []
    with isolated.IsolatedRunner(printed.append) as runner:
        found = [runner.verify(KERNEL, CASE, HOST) for _ in range(5)]
        assert runner.verify(registry.get("fwd_mma"), CASE, HOST, report=True).ok
        assert runner.verify(registry.get("fwd_mma"), CASE, HOST).ok
        worker: Any = runner._worker
    assert worker.closed == 1
    assert [(r.ok, r.sanitize) for r in found] == [(False, True)] * 3 + [(None, False)] * 2
    assert found[0].message == "its process ended: killed, while running it"
    assert found[3].message == "not tried: its process has ended 3 times already"
    assert printed == ["before"] * 3 + ["out"]


@pytest.mark.parametrize(
    ("error", "usable"), [(None, True), (DriverError("no", code=700, name="x"), False), (ToolchainMissing("no"), True)]
)
def test_a_device_after_a_failure(error: Exception | None, usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        if error:
            raise error

    monkeypatch.setattr(isolated.driver, "device", lambda n: SimpleNamespace(synchronize=synchronize))
    assert isolated.device_usable(("cuda", 0)) is usable
    assert isolated.device_usable(HOST)


def test_a_job_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(isolated, "verify", lambda *job, **how: given.append((*job, how)) or "result")
    job = isolated._Job("fwd_minimal", CASE, HOST, TILE, 3, True, False, 7.0)
    assert isolated._run_job(job, lambda *stage: given.append(stage)) == ("result", True)
    assert given == [
        ("computing the reference", None), ("running it", 7.0),
        (registry.get("fwd_minimal"), CASE, HOST, TILE, {"repeats": 3, "report": True, "explain": False}),
    ]  # fmt: skip
