"""One launch of several entries: which are launched, in which order, on which addresses, and what the log says."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sandbox.core import log, registry
from sandbox.core.errors import SpecError, UnsupportedProblem
from sandbox.engine import launches, pipeline, staging
from sandbox.engine.launches import EntryLaunch, make_launch
from sandbox.launch import dlpack
from sandbox.launch.dlpack import HOST
from sandbox.spec import Problem, Tile

GPU = ("cuda", 2)


class Function:
    """A loaded entry: records its launches."""

    def __init__(self, name: str, made: list[Any]):
        self.name, self.made = name, made

    def launcher(self, *config: Any) -> Callable[..., None]:
        return lambda pointers, stream: self.made.append((self.name, *config[:3], *config[4:], pointers, stream))

    def call(self, *config: Any) -> tuple[Any, ...]:
        return (self.name, *config[:3], *config[4:])


def entry(
    name: str, made: list[Any], tensors: tuple[str, ...], blocks: int = 1, programmatic: bool = True
) -> EntryLaunch:
    slots = [SimpleNamespace(name=f"{tensor} of {name}") for tensor in tensors]
    values = [ctypes.c_int32(n) for n in range(len(tensors))]
    arguments: Any = SimpleNamespace(tensor_names=tensors, slots=slots, values=values)
    spec: Any = SimpleNamespace(name=name, args=tensors)
    return EntryLaunch(spec, Function(name, made), (2, blocks, 1), (32, 1, 1), 7, arguments, programmatic, 3)


def entries(made: list[Any]) -> list[EntryLaunch]:
    return [entry("none", made, ("q",), 0), entry("first", made, ("q", "x")), entry("second", made, ("o", "q"))]


def test_a_launch_on_the_host() -> None:
    """Entries without blocks are left out; memory is zeroed first; only the first entry waits for earlier work."""
    memory, made = np.full(12, 255, np.uint8), []
    launch = make_launch(entries(made), {"x": 8, "q": 0}, ("o", "x", "q"), HOST)
    launch((5, memory.ctypes.data, 6), 9)
    assert memory.tolist() == [0] * 8 + [255] * 4
    assert made == [
        ("first", (2, 1, 1), (32, 1, 1), 7, False, 3, (6, memory.ctypes.data), 9),
        ("second", (2, 1, 1), (32, 1, 1), 7, True, 3, (5, 6), 9),
    ]


def test_a_launch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as calls of the driver; each address goes to all its slots."""
    found: list[Any] = []
    monkeypatch.setattr(launches.driver, "zeroing", lambda pointer, nbytes: ("zero", pointer, nbytes))
    monkeypatch.setattr(launches.driver, "device", lambda ordinal: f"GPU {ordinal}")
    monkeypatch.setattr(launches.driver, "launch_calls", lambda *arguments: found.append(arguments))
    given = entries([])
    make_launch(given, {"x": 8, "q": 0}, ("o", "x", "q"), GPU)
    ((calls, slots, device),) = found
    zero, *others = calls
    assert (zero[0], zero[2], device) == ("zero", 8, "GPU 2")
    assert others == [
        ("first", (2, 1, 1), (32, 1, 1), 7, False, 3),
        ("second", (2, 1, 1), (32, 1, 1), 7, True, 3),
    ]
    (q, x), (o, q_too) = (each.arguments.slots for each in given[1:])
    assert slots == [[o], [zero[1], x], [q, q_too]]
    make_launch(given[:1], {}, (), GPU)
    assert found[1][:2] == ([], [])


def test_the_log_has_each_launch_and_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Any] = []
    caplog.set_level(log.ARGUMENTS, logger="sandbox")
    launch = make_launch(entries(made), {}, ("o", "x", "q"), HOST)
    caplog.clear()
    launch((5, 6, 7), 8)
    assert [each[-2:] for each in made] == [((7, 6), 8), ((5, 7), 8)]
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (log.LAUNCHES, "first: grid (2, 1, 1), block (32, 1, 1), 7 bytes of shared memory"),
        (log.LAUNCHES, "second: grid (2, 1, 1), block (32, 1, 1), 7 bytes of shared memory"),
        (log.ARGUMENTS, "  q of first = 0"), (log.ARGUMENTS, "  x of first = 1"),
        (log.ARGUMENTS, "  o of second = 0"), (log.ARGUMENTS, "  q of second = 1"),
    ]  # fmt: skip
    caplog.set_level(logging.WARNING, logger="sandbox")
    launch = make_launch(entries(made), {}, ("o", "x", "q"), HOST)
    caplog.clear()
    launch((5, 6, 7))
    assert not caplog.records
    assert made[-1][-1] == 0


# ---- what the engine passes on


@pytest.mark.parametrize(("value", "checked"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
@pytest.mark.parametrize(
    ("fields", "device", "can"),
    [
        ({"ragged": (9, 9)}, GPU, True),
        ({"page_size": 8}, GPU, True),
        ({}, GPU, False),
        ({"ragged": (9, 9)}, HOST, False),
    ],
    ids=["ragged", "pages", "dense", "on the CPU"],
)
def test_kernels_check_offsets_and_pages_on_a_gpu_if_asked_to(
    value: str | None, checked: bool, fields: dict[str, Any], device: Any, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SANDBOX_CHECKED=1. The CPU backend always checks them."""
    loaded = SimpleNamespace(max_threads=(0,))
    given: list[dict[str, int]] = []
    monkeypatch.setattr(pipeline, "_load", lambda kernel, defines, *rest: given.append(dict(defines)) or loaded)
    monkeypatch.delenv("SANDBOX_CHECKED", raising=False)
    if value is not None:
        monkeypatch.setenv("SANDBOX_CHECKED", value)
    kernel = registry.get("fwd_minimal")
    problem = Problem(1, 1, 8, 8, 16, dtype="float16", key_lengths="page_size" in fields, **fields)
    pipeline.load(kernel, kernel.tiles[0], problem, device)
    assert [defines.get("CHECKED_KERNELS") for defines in given] == [1 if checked and can else None]


def test_the_work_of_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[int, str]] = []
    gpu = lambda ordinal: SimpleNamespace(synchronize=lambda after: waited.append((ordinal, after)))  # noqa: E731
    monkeypatch.setattr(pipeline.driver, "device", gpu)
    kernel, problem = registry.get("fwd_minimal"), Problem(1, 1, 8, 8, 16, dtype="float16")
    made = pipeline.Prepared(
        kernel, Tile(N=3), problem, HOST, 0.0, False, (), lambda *args: None, ("Q", "K"), ("K", "Q")
    )
    made.wait()
    assert waited == []
    dataclasses.replace(made, device=GPU).wait()
    assert waited == [(2, f"fwd_minimal on {problem}, tile N=3")]
    tensors: Any = {name: SimpleNamespace(pointer=n) for n, name in enumerate(("Q", "K", "V"))}
    assert made.pointers(tensors) == (1, 0)


@pytest.mark.parametrize(
    ("kernel", "arch", "gpu", "target"),
    [
        ("fwd_mma", None, None, "sm_90a"), ("fwd_mma", None, (8, 6), "sm_86"), ("fwd_wgmma", None, (9, 0), "sm_90a"),
        ("fwd_mma", "sm_90", None, "sm_90"), ("fwd_wgmma", "sm_90", (8, 0), "sm_90a"),
        ("fwd_wgmma", "sm_90a", None, "sm_90a"), ("fwd_mma", "sm_100f", None, "sm_100f"),
    ],
)  # fmt: skip
def test_the_target_of_a_compilation(
    kernel: str, arch: str | None, gpu: tuple[int, int] | None, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.driver, "available", lambda: gpu is not None)
    monkeypatch.setattr(pipeline.driver, "device", lambda ordinal=0: SimpleNamespace(arch=gpu))
    assert pipeline.target_of(registry.get(kernel), arch) == target
    if gpu:
        assert pipeline.arch_of(("cuda", 0)) == gpu
    assert pipeline.arch_of(HOST) is None


def test_a_tile_of_the_user() -> None:
    tile = Tile(BLOCK_M=64)
    assert pipeline.as_tile(None) is None
    assert pipeline.as_tile(tile) is tile
    assert pipeline.as_tile("BLOCK_M=64") == pipeline.as_tile({"BLOCK_M": 64}) == tile
    with pytest.raises(SpecError, match=r"^tile=3 must be a Tile, a mapping, or text such as BLOCK_M=64,BLOCK_N=32$"):
        pipeline.as_tile(3)  # type: ignore[arg-type]


PAGED = Problem(4, 8, 16, 1024, 64, Hk=2, dtype="float16", ragged=(64, 0), page_size=64, pages=64, key_lengths=True)


def test_short_sequences_of_a_paged_batch_have_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it does not support the problem, or there is one sequence."""
    kernel = registry.get("fwd_mma")
    tile = pipeline.tile_on(HOST, kernel, PAGED)
    long, short = pipeline.parts(kernel, tile, PAGED, HOST)
    assert (long.kernel, long.tile, long.problem, long.overlaps) == (
        kernel, tile, dataclasses.replace(PAGED, part="long"), False
    )  # fmt: skip
    of_short = dataclasses.replace(PAGED, part="short")
    assert (short.kernel.name, short.problem, short.overlaps) == (kernel.short_sequences, of_short, True)
    assert short.tile == pipeline.tile_on(HOST, short.kernel, of_short)
    scratch = pipeline.scratch_of(kernel, PAGED, tile, HOST)
    assert scratch.keys() >= pipeline.arguments.scratch_of(short.kernel, of_short, short.tile).keys()
    ragged_keys = {"page_size": 0, "pages": 0, "ragged": (64, 64), "key_lengths": False}
    for other in ({"B": 1}, {"ragged": ()}, ragged_keys):
        (alone,) = pipeline.parts(kernel, tile, problem := dataclasses.replace(PAGED, **other), HOST)
        assert alone == pipeline.Part(kernel, tile, problem)

    def refuse(*arguments: Any) -> None:
        raise UnsupportedProblem("no")

    monkeypatch.setattr(pipeline, "tile_on", refuse)
    assert pipeline.parts(kernel, tile, PAGED, HOST) == (pipeline.Part(kernel, tile, PAGED),)


# ---- copies on the other device


@pytest.mark.parametrize("to", [HOST, GPU], ids=["to the host", "to a GPU"])
def test_a_copy_on_the_other_device(to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory that a view reaches, also with a negative stride; and back. The GPU's memory is host memory here."""
    said: list[str] = []

    class Memory:
        def __init__(self, nbytes: int, gpu: Any):
            self.memory = ctypes.create_string_buffer(nbytes)
            self.pointer, self.nbytes = ctypes.addressof(self.memory), nbytes

    def move(what: str, target: int, source: int, nbytes: int, gpu: Any) -> None:
        said.append(f"{what} {nbytes} {gpu.name}")
        ctypes.memmove(target, source, nbytes)

    def device(ordinal: int) -> Any:
        return SimpleNamespace(name=f"GPU {ordinal}", synchronize=lambda: said.append(f"wait for GPU {ordinal}"))

    fake = SimpleNamespace(
        DeviceMemory=Memory, device=device, read=lambda *a: move("read", *a), write=lambda *a: move("write", *a)
    )
    monkeypatch.setattr(staging, "driver", fake)
    numbers = np.arange(24, dtype=np.float16)
    array = numbers[2:20].reshape(3, 6)[::-1, ::2]
    view = dlpack.view(array)
    home = GPU if to == HOST else HOST
    view = dlpack.ArrayView(view.pointer, view.shape, view.strides, view.dtype, home, array)
    copy = staging.Staged(view, to)
    assert copy.strides == (-6, 2)
    copy.send()
    there = (ctypes.c_uint16 * 17).from_address(copy.pointer - 2 * 12)  # 2 rows below the first element
    assert [*there] == numbers[2:19].view(np.uint16).tolist()
    there[:] = [n + 1 for n in there]
    expected = [*numbers[:2].view(np.uint16), *there, *numbers[19:].view(np.uint16)]
    copy.fetch()
    assert numbers.view(np.uint16).tolist() == [int(n) for n in expected]
    assert said == (
        ["wait for GPU 2", "read 34 GPU 2", "write 34 GPU 2"] if to == HOST else ["write 34 GPU 2", "read 34 GPU 2"]
    )
