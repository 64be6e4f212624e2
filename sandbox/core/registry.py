"""Finds the kernels: every `kernels_cu/NAME.py` with a `NAME.cu` beside it. Nothing else lists them."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import kernels_cu

from .errors import SpecError, UnknownKernel
from .kernel import COMPUTATIONS, Kernel

FOLDER = Path(kernels_cu.__path__[0]).resolve()


@lru_cache(maxsize=1)
def _kernels() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for module_info in pkgutil.iter_modules(kernels_cu.__path__):
        module = _load(module_info.name)
        source = FOLDER / f"{module_info.name}.cu"
        specs = getattr(module, "kernels", None) or (getattr(module, "kernel", None),)
        for kernel in specs:
            if not isinstance(kernel, Kernel):
                raise SpecError(
                    f"kernels_cu/{module_info.name}.py must define `kernel`, a Kernel, or `kernels`, several: "
                    f"it defines {kernel!r}"
                )
            if not source.is_file():
                raise SpecError(f"kernels_cu/{module_info.name}.py has no {source.name} beside it")
            if kernel.name in found:
                raise SpecError(f"kernel {kernel.name} is defined twice, in {found[kernel.name].source} and {source}")
            found[kernel.name] = dataclasses.replace(kernel, source=source)
    kinds = list(COMPUTATIONS)
    return dict(sorted(found.items(), key=lambda item: (kinds.index(item[1].computes), item[1].rung, item[0])))


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"kernels_cu.{name}")
    except SpecError as error:
        raise SpecError(f"kernels_cu/{name}.py: {error}") from error
    except Exception as error:  # whatever a spec's own mistakes raise
        path = str(FOLDER / f"{name}.py")
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        raise SpecError(f"kernels_cu/{name}.py, line {line}: {type(error).__name__}: {error}") from error


def kernels() -> dict[str, Kernel]:
    """{name: Kernel}, forward before backward, lowest rung first. Raises SpecError naming a spec that is wrong."""
    return dict(_kernels())


def get(name: str) -> Kernel:
    """The kernel of that name. Raises UnknownKernel with the names there are."""
    kernel = entry_owner(name)
    if kernel.name != name:
        raise UnknownKernel(f"{name} is a part of {kernel.name}, launched after it: name {kernel.name}")
    return kernel


def entry_owner(name: str) -> Kernel:
    """The kernel that has an entry point of that name. Raises UnknownKernel with the names of kernels."""
    known = _kernels()
    owners = {entry.name: kernel for kernel in known.values() for entry in kernel.entries}
    if name not in owners:
        near = difflib.get_close_matches(str(name), known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UnknownKernel(f"kernel {name!r} is not known: {hint}there are {', '.join(known)}")
    return owners[name]


def forget() -> None:
    """Read the specs anew at the next call."""
    for name in [name for name in sys.modules if name.startswith("kernels_cu.")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    _kernels.cache_clear()
