"""The environment in stored rows."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.bench import environment
from sandbox.core.errors import GpuUnavailable, ToolchainMissing


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in place of nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


def test_clocks(nvidia_smi: Callable[[str], None]) -> None:
    """Of the first GPU; None without nvidia-smi, or if it fails."""
    assert environment.clocks() is None
    nvidia_smi('echo "$1 $2, 2619 MHz, 98.5 W, 700.00 W, 580.65"; echo "1 MHz, 2 MHz, 3 W, 4 W, 5"')
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,power.limit,driver_version --format=csv,noheader"
    assert environment.clocks() == {
        "clocks.sm": query, "clocks.mem": "2619 MHz", "power.draw": "98.5 W", "power.limit": "700.00 W",
        "driver_version": "580.65",
    }  # fmt: skip
    nvidia_smi("echo No devices were found; exit 6")
    assert environment.clocks() is None


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and NVRTC."""
    monkeypatch.setattr(environment, "commit", lambda: "abc")
    monkeypatch.setattr(environment, "_processor", lambda: "a CPU")
    monkeypatch.setattr(environment, "_version", {"numpy": "2.9", "triton": "3.1"}.get)
    monkeypatch.setattr(environment, "clocks", lambda: {"clocks.sm": "1980 MHz"})
    monkeypatch.setattr(environment.nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(environment.driver, "device", lambda: SimpleNamespace(name="a GPU"))
    monkeypatch.setattr(environment.driver, "driver_version", lambda: "580")


KNOWN = {
    "commit": "abc", "python": platform.python_version(), "processor": "a CPU",
    "packages": {"numpy": "2.9", "triton": "3.1"}, "nvrtc": (13, 0), "device": "a GPU", "driver": "580",
    "clocks": {"clocks.sm": "1980 MHz"},
}  # fmt: skip


@pytest.mark.usefixtures("known")
def test_what_is_not_known_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> Any:
        raise error

    assert environment.describe() == KNOWN
    monkeypatch.setattr(environment.nvrtc, "version", lambda: fail(ToolchainMissing("no NVRTC")))
    assert environment.describe() == KNOWN | {"nvrtc": None}
    monkeypatch.setattr(environment.driver, "device", lambda: fail(GpuUnavailable("no GPU")))
    assert environment.describe() == KNOWN | dict.fromkeys(("nvrtc", "device", "driver", "clocks"))


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert environment._version("no-such-package") is None
    assert str(environment._version("numpy")).partition(".")[0].isdigit()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: A: one @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: B\n", "A: one @ 2 GHz"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", platform.machine()),  # ARM
        (None, platform.machine()),
    ],
)
def test_the_processor(text: str | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path) -> str:
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(environment.Path, "read_text", read_text)
    assert environment._processor() == name
