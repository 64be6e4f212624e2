"""Finds and runs a host C++ compiler."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..core import process
from ..core.errors import CompileError, ToolchainMissing

_FOLDER_OPTIONS = ("-I", "-isystem", "-iquote", "-idirafter")


@dataclass(frozen=True)
class HostCompiler:
    """`command` runs the compiler; `identity` is unique per compiler and processor."""

    command: tuple[str, ...]
    identity: str

    @property
    def is_gcc(self) -> bool:
        """Some options are supported by GCC only."""
        return "Free Software Foundation" in self.identity


def find() -> HostCompiler:
    """`$CXX`, else g++, clang++, or the `ziglang` package. Raises ToolchainMissing with installation advice."""
    return _find(os.environ.get("CXX", "").strip(), os.environ.get("PATH", ""))


@lru_cache(maxsize=8)
def _find(chosen: str, path: str) -> HostCompiler:
    candidates = [tuple(shlex.split(chosen))] if chosen else [("g++",), ("clang++",)]
    for command in candidates:
        if shutil.which(command[0], path=path):
            return HostCompiler(command, _identity(command))
    if chosen:
        raise ToolchainMissing(f"CXX={chosen} is not a program on the PATH: change it, or unset it to use g++")
    if importlib.util.find_spec("ziglang"):
        command = (sys.executable, "-m", "ziglang", "c++")
        return HostCompiler(command, _identity(command))
    raise ToolchainMissing(
        "no host C++ compiler found, which the CPU backend needs: set CXX, or install one: "
        "apt-get install g++, or pip install ziglang"
    )


def extra_folders() -> tuple[Path, ...]:
    """Include directories from the environment: `-I` and similar options in `$CXX`, `$CPATH` and `$CPLUS_INCLUDE_PATH`.
    An empty name is the working directory."""
    words = iter(shlex.split(os.environ.get("CXX", "")))
    found = []
    for word in words:
        if option := next((o for o in _FOLDER_OPTIONS if word.startswith(o)), None):
            found.append(word.removeprefix(option) or next(words, ""))
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH"):
        if folders := os.environ.get(variable):
            found += [folder or "." for folder in folders.split(os.pathsep)]
    return tuple(Path(folder) for folder in dict.fromkeys(found))


def _identity(command: tuple[str, ...]) -> str:
    done = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise ToolchainMissing(f"{shlex.join(command)} --version fails: {done.stderr.strip()[:500]}")
    return f"{shlex.join(command)}: {done.stdout.strip()} on {_processor()}"


@lru_cache(maxsize=1)
def _processor() -> str:
    """The properties of the processor that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return " ".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def run(compiler: HostCompiler, options: tuple[str, ...], text: str, source: Path) -> None:
    """Compile `text`, C++ from standard input. Raises CompileError with the compiler's messages."""
    command = [*compiler.command, *options]
    try:
        done = process.run(command, text=text)
        failed, output = bool(done.returncode), done.stderr
    except process.TooMuchOutput as error:
        failed, output = True, f"{error.head}\n{error}"
    if failed:
        raise CompileError(
            f"{compiler.command[0]} refused {source}\n\n{output.strip()}\n\noptions: {shlex.join(options)}",
            source=str(source), options=options, log=output,
        )  # fmt: skip
