"""Finds the kernels: every `kernels_cu/NAME.py` with a `NAME.cu` beside it. Nothing else lists them."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
import sys
import threading
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import kernels_cu

from . import log
from .errors import SpecError, UnknownKernel
from .files import mistakes_of
from .kernel import COMPUTATIONS, Kernel
from .project import FOLDER as FOLDER  # re-exported

_reading = threading.RLock()  # `forget` must not discard a module that another thread imports


class _Found(NamedTuple):
    kernels: dict[str, Kernel]
    broken: dict[str, str]  # {spec file without suffix: message}; a stored exception would keep its frames alive


@lru_cache(maxsize=1)
def _read() -> _Found:
    """Reads every spec. Logs one line for each spec with an error, and leaves it out."""
    specs: dict[str, tuple[Kernel, ...]] = {}
    found: dict[str, Kernel] = {}
    broken: dict[str, str] = {}
    for module_info in pkgutil.iter_modules(kernels_cu.__path__):
        try:
            specs[module_info.name] = _kernels_of(module_info.name)
        except SpecError as error:
            broken[module_info.name] = str(error)
    # If two files define one name, the file of that name wins: the other is a copy in which the name was not changed.
    for name, own in sorted(specs.items(), key=lambda item: item[0] not in {kernel.name for kernel in item[1]}):
        sourced = {kernel.name: dataclasses.replace(kernel, source=FOLDER / f"{name}.cu") for kernel in own}
        if twice := [kernel for kernel in sourced.values() if kernel.name in found]:
            (again, *_), first = twice, found[twice[0].name]
            broken[name] = f"kernel {again.name} is defined twice, in {first.source} and {again.source}: rename one"
        else:
            found.update(sourced)
    for wrong in broken.values():
        log.logger.warning("sandbox: a kernel is left out: %s", " ".join(wrong.split()))
    kinds = list(COMPUTATIONS)
    order = sorted(found.items(), key=lambda item: (kinds.index(item[1].computes), item[1].rung, item[0]))
    return _Found(dict(order), broken)


def _all() -> _Found:
    with _reading:
        return _read()


def _kernels_of(name: str) -> tuple[Kernel, ...]:
    module = _load(name)
    several = getattr(module, "kernels", None)
    kernels = several if isinstance(several, tuple | list) else (several or getattr(module, "kernel", None),)
    for kernel in kernels:
        if not isinstance(kernel, Kernel):
            raise SpecError(
                f"kernels_cu/{name}.py must define `kernel`, a Kernel, or `kernels`, a tuple of Kernels, not {kernel!r}"
            )
    if not (FOLDER / f"{name}.cu").is_file():
        raise SpecError(f"kernels_cu/{name}.py has no {name}.cu beside it")
    return tuple(kernels)


def _load(name: str) -> ModuleType:
    with mistakes_of(FOLDER / f"{name}.py", f"kernels_cu/{name}.py"):
        return importlib.import_module(f"kernels_cu.{name}")


def kernels() -> dict[str, Kernel]:
    """{name: Kernel}, forward before backward, lowest rung first, without specs that have errors (see `get`)."""
    return dict(_all().kernels)


def get(name: str) -> Kernel:
    """The kernel of that name. Raises UnknownKernel with the known names, SpecError if its spec has an error."""
    kernel = entry_owner(name)
    if kernel.name != name:
        raise UnknownKernel(f"{name} is an entry point of {kernel.name} and cannot run alone: use {kernel.name}")
    return kernel


def entry_owner(name: str) -> Kernel:
    """The kernel that has an entry point of that name. Raises UnknownKernel with the known kernels, SpecError."""
    known, broken = _all()
    owners = {entry.name: kernel for kernel in known.values() for entry in kernel.entries}
    if name not in owners:
        if name in broken:
            raise SpecError(broken[name])
        near = difflib.get_close_matches(str(name), known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        left_out = "".join(f"; left out: {error}" for error in broken.values())
        raise UnknownKernel(f"kernel {name!r} is not known: {hint}the kernels are {', '.join(known)}{left_out}")
    return owners[name]


def forget() -> None:
    """Makes the next call read the specs again."""
    with _reading:
        for name in [name for name in sys.modules if name.startswith("kernels_cu.")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        _read.cache_clear()
