"""Finds the kernels: every `kernels_cu/NAME.py` with a `NAME.cu` beside it, and the same in the folders that
SANDBOX_KERNELS names. Nothing else lists them."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import pkgutil
import sys
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import kernels_cu

from . import log
from .errors import SpecError, UnknownKernel
from .files import mistakes_of, names_of
from .kernel import COMPUTATIONS, Kernel
from .project import FOLDER as FOLDER  # re-exported

VARIABLE = "SANDBOX_KERNELS"
_reading = threading.RLock()  # `forget` must not discard a module that another thread imports


class _Found(NamedTuple):
    kernels: dict[str, Kernel]
    broken: dict[str, str]  # {spec file without suffix: message}; a stored exception would keep its frames alive


@lru_cache(maxsize=1)
def _read() -> _Found:
    """Reads every spec. Logs one line for each spec with an error, and leaves it out."""
    specs: dict[Path, tuple[Kernel, ...]] = {}
    found: dict[str, Kernel] = {}
    broken: dict[str, str] = {}
    for spec in _spec_files():
        try:
            specs[spec] = _kernels_of(spec)
        except SpecError as error:
            broken[spec.stem] = str(error)
    # If two files define one name, the file of that name wins: the other is a copy in which the name was not changed.
    for spec, own in sorted(specs.items(), key=lambda item: item[0].stem not in {kernel.name for kernel in item[1]}):
        sourced = {kernel.name: dataclasses.replace(kernel, source=spec.with_suffix(".cu")) for kernel in own}
        if twice := [kernel for kernel in sourced.values() if kernel.name in found]:
            (again, *_), first = twice, found[twice[0].name]
            broken[spec.stem] = (
                f"kernel {again.name} is defined twice, in {first.source} and {again.source}: rename one"
            )
        else:
            found.update(sourced)
    for wrong in broken.values():
        log.warn(f"a spec is skipped: {' '.join(wrong.split())}")
    kinds = list(COMPUTATIONS)

    def order(kernel: Kernel) -> tuple[int, str, int, str]:
        own = (len(kinds), kernel.operation.name) if kernel.custom else (kinds.index(kernel.operation.name), "")
        return *own, kernel.rung, kernel.name

    return _Found({kernel.name: kernel for kernel in sorted(found.values(), key=order)}, broken)


def _spec_files() -> list[Path]:
    """The specs: all modules of `kernels_cu`, and in other folders the Python files with a `.cu` beside them."""
    own = [FOLDER / f"{module.name}.py" for module in pkgutil.iter_modules(kernels_cu.__path__)]
    more = (sorted(folder.glob("*.py")) for folder in folders()[1:])
    return own + [file for files in more for file in files if file.with_suffix(".cu").is_file()]


def folders() -> list[Path]:
    """The folders with kernels: `kernels_cu` first, then those that SANDBOX_KERNELS names, separated as in PATH.

    Raises SpecError if one is not a folder.
    """
    found = [FOLDER]
    for text in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        folder = Path(text).resolve()
        if not folder.is_dir():
            raise SpecError(f"{VARIABLE}={text} is not a folder: create it, or unset the variable")
        found += [folder] if folder not in found else []
    return found


def add(folder: Path) -> None:
    """Also finds the kernels in `folder`, in this process and in those that it starts."""
    if folder.resolve() not in folders():
        others = os.environ.get(VARIABLE, "")
        os.environ[VARIABLE] = os.pathsep.join(filter(None, (others, str(folder.resolve()))))
        forget()


def root(kernel: Kernel) -> Path:
    """The folder to which stored paths of a kernel's files are relative: the project's, or one of SANDBOX_KERNELS."""
    folder = kernel.source.parent
    return folder if folder in folders()[1:] else FOLDER.parent


def _all() -> _Found:
    with _reading:
        return _read()


def _kernels_of(spec: Path) -> tuple[Kernel, ...]:
    names, called = _load(spec), _called(spec)
    several = names.get("kernels")
    kernels = several if isinstance(several, tuple | list) else (several or names.get("kernel"),)
    for kernel in kernels:
        if not isinstance(kernel, Kernel):
            raise SpecError(
                f"{called} must define `kernel`, a Kernel, or `kernels`, a tuple of Kernels, not {kernel!r}"
            )
    if not spec.with_suffix(".cu").is_file():
        raise SpecError(f"{called} has no {spec.stem}.cu beside it")
    return tuple(kernels)


def _called(spec: Path) -> str:
    return f"kernels_cu/{spec.name}" if spec.parent == FOLDER else str(spec)


def _load(spec: Path) -> Mapping[str, Any]:
    """The globals of a spec."""
    if spec.parent != FOLDER:
        return names_of(spec)
    with mistakes_of(spec, _called(spec)):
        name = f"kernels_cu.{spec.stem}"
        if name not in sys.modules:
            _imported[spec] = _version(spec)
        return vars(importlib.import_module(name))


def kernels() -> dict[str, Kernel]:
    """{name: Kernel}, forward before backward, lowest rung first, without specs that have errors (see `get`)."""
    return dict(_all().kernels)


def get(name: str, computes: str = "") -> Kernel:
    """The kernel of that name. Raises UnknownKernel with the known names, of those that compute `computes` if it is
    given ("operation": a custom operation); SpecError if its spec has an error."""
    kernel = entry_owner(name, computes)
    if kernel.name != name:
        raise UnknownKernel(f"{name} is an entry point of {kernel.name} and cannot run alone: use {kernel.name}")
    return kernel


def entry_owner(name: str, computes: str = "") -> Kernel:
    """The kernel that has an entry point of that name. Raises UnknownKernel as `get`, SpecError."""
    known, broken = _all()
    owners = {entry.name: kernel for kernel in known.values() for entry in kernel.entries}
    if not isinstance(name, str) or name not in owners:
        if isinstance(name, str) and name in broken:
            raise SpecError(broken[name])
        if why := _not_found(str(name)):
            raise UnknownKernel(f"kernel {name!r} is not known: {why}")
        named = [k.name for k in known.values() if computes in ("", "operation" if k.custom else k.computes)]
        near = difflib.get_close_matches(str(name), named if computes else [*owners], 1)
        hint = f"did you mean {near[0]}? " if near else ""
        skipped = "".join(f"; skipped: {error}" for error in broken.values())
        kind = "kernels of custom operations" if computes == "operation" else f"{computes} kernels".lstrip()
        raise UnknownKernel(f"kernel {name!r} is not known: {hint}the {kind} are {', '.join(named)}{skipped}")
    return owners[name]


def _not_found(name: str) -> str:
    """Why a `.cu` or a spec of that name is not a kernel; "" if there is none."""
    stem = name.removesuffix(".py").removesuffix(".cu")
    for folder in folders():
        files = [str(folder / f"{stem}{suffix}") for suffix in (".cu", ".py")]
        there, missing = ([file for file in files if os.path.isfile(file) is found] for found in (True, False))
        if there and missing:
            return f"{there[0]} has no {Path(missing[0]).name} beside it"
    if os.path.isfile(f"{stem}.cu"):
        parent, own = os.path.split(stem)
        if parent:
            return f"{stem}.cu is a path: pass {stem}.cu to a command, or set {VARIABLE}={parent} and pass {own}"
        return f"{stem}.cu is in the working directory: pass {stem}.cu to a command, or set {VARIABLE}=."
    return ""


_generation = 0
_imported: dict[Path, tuple[int, bytes]] = {}  # the version of each spec that was imported


def _version(spec: Path) -> tuple[int, bytes]:
    """(time of the last change, content). The time, too, because Python may have imported an old .pyc: it does not see
    the second of two changes within a second that leave the size the same."""
    return spec.stat().st_mtime_ns, spec.read_bytes()


def _changed(spec: Path) -> bool:
    return not spec.is_file() or _imported.get(spec) != _version(spec)


def generation() -> int:
    """The number of calls of `forget`. Plans of an earlier generation are out of date."""
    return _generation


def forget() -> None:
    """Makes the next call read the specs again. Those of `kernels_cu` are imported again only if one has changed:
    importing them takes 50 ms, which `watch` would add to each verdict."""
    global _generation  # noqa: PLW0603
    with _reading:
        _generation += 1
        names = [name for name in sys.modules if name.startswith("kernels_cu.")]
        if any(_changed(FOLDER / f"{name.removeprefix('kernels_cu.')}.py") for name in names):
            for name in names:
                del sys.modules[name]
        importlib.invalidate_caches()
        _read.cache_clear()
