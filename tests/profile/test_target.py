"""The process under the profiler, with a driver that records its calls."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sandbox.profile import target
from sandbox.profile.profiler import Subject
from sandbox.spec import Problem, Tile

PROBLEM = Problem(1, 2, 32, 48, 16, Hk=1, Dv=8, dtype="float16")


class Recorded:
    """The calls of `launch`, in order."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.calls: list[str] = []
        self.staged: dict[str, tuple[tuple[int, ...], str]] = {}
        self.sent: list[str] = []

        def prepare(kernel: Any, tile: Any, problem: Any, staged: Any, device: Any) -> SimpleNamespace:
            assert device == ("cuda", 0)
            note = lambda what: self.calls.append(f"{what} {kernel.name}")  # noqa: E731
            return SimpleNamespace(
                pointers=lambda staged: "pointers", launch=lambda pointers: note("launch"), wait=lambda: note("wait")
            )

        @contextlib.contextmanager
        def profiled(name: str = "") -> Iterator[None]:
            self.calls.append(f"begin {name}".strip())
            yield
            self.calls.append("end")

        def stage(array: Any, device: Any) -> SimpleNamespace:
            return SimpleNamespace(array=array, send=lambda: self.sent.append(array))

        patch.setattr(target.pipeline, "prepare", prepare)
        patch.setattr(target.pipeline, "tile_on", lambda device, kernel, problem: kernel.tiles[0])
        patch.setattr(target.driver, "device", lambda ordinal=0: SimpleNamespace(profiled=profiled, arch=(9, 0)))
        patch.setattr(target, "Staged", stage)
        patch.setattr(target.dlpack, "view", lambda array: array)
        patch.setattr(target.trial, "outputs_and_scratch", lambda *_: {"O": ((1, 2, 32, 8), "float16"),
                                                                       "scratch": ((5,), "float32")})  # fmt: skip
        patch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=profiled))


@pytest.mark.parametrize("nvtx", [True, False])
def test_ten_launches_are_profiled_after_three(nvtx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    if not nvtx:
        monkeypatch.setitem(sys.modules, "nvtx", None)
    target.launch(Subject("fwd_minimal", PROBLEM, Tile(BLOCK_M=64), "sm_90"))
    launch, wait = "launch fwd_minimal", "wait fwd_minimal"
    ranges = ([f"begin fwd_minimal {PROBLEM}"], ["end"]) if nvtx else ([], [])
    assert recorded.calls == [*[launch] * 3, wait, "begin", *ranges[0], *[launch] * 10, wait, *ranges[1], "end"]


def test_a_backward_has_the_results_of_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    target.launch(Subject("bwd_minimal", Problem(1, 2, 32, 48, 16, dtype="float16"), Tile(BLOCK_M=64), "sm_90"))
    first, *others = [call for call in recorded.calls if call.startswith("launch")]
    assert first.startswith("launch fwd_")
    assert others == ["launch bwd_minimal"] * 13


def test_the_tensors_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are random and copied to the GPU; outputs and scratch are not."""
    recorded = Recorded(monkeypatch)
    made = target._tensors(Subject("fwd_minimal", PROBLEM, Tile(BLOCK_M=64), "sm_90"))
    shapes = {name: (staged.array.shape, str(staged.array.dtype)) for name, staged in made.items()}
    assert shapes == {
        "Q": ((1, 2, 32, 16), "float16"), "K": ((1, 1, 48, 16), "float16"), "V": ((1, 1, 48, 8), "float16"),
        "dO": ((1, 2, 32, 8), "float16"), "O": ((1, 2, 32, 8), "float16"), "LSE": ((1, 2, 32), "float32"),
        "scratch": ((5,), "float32"),
    }  # fmt: skip
    sent = [name for name, staged in made.items() if any(staged.array is array for array in recorded.sent)]
    assert sent == ["Q", "K", "V", "dO"]
    assert all(0.8 < np.std(made[name].array.astype(np.float32)) < 1.2 for name in sent)


@pytest.mark.parametrize(("problem", "names"), [
    (Problem(2, 2, 1, 128, 16, Hk=1, dtype="float16", page_size=64), {"block_table", "key_lengths"}),
    (Problem(2, 2, 30, 40, 16, dtype="float16", lengths=((10, 20), (30, 40))), {"cu_seqlens_q", "cu_seqlens_k"}),
])  # fmt: skip
def test_the_tensors_of_pages_and_of_sequences(
    problem: Problem, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)
    made = target._tensors(Subject("fwd_mma", problem, Tile(BLOCK_M=64), "sm_90"))
    assert names <= {*made}
    assert made["dO"].array.shape == (problem.batches, 2, problem.rows[0], 16)
    assert recorded.sent
