"""Creates kernels and experiments from existing kernels and templates. The new files work unchanged."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from ..core import registry
from ..core.errors import SpecError, UnknownKernel
from ..core.score import CPP_KEYWORDS

TEMPLATES = Path(__file__).resolve().parent / "templates"
TEMPLATE_NAMES = ("row_softmax", "rms_norm", "matmul")  # of kernels of other operations than attention
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_NUMBERED = re.compile(r"(\d{3})_\w+")


def experiment(name: str, root: Path | None = None) -> list[Path]:
    """Create `root`/NNN_name with README.md and run.py, where NNN is the next free number; returns the files. `root`
    defaults to the folder `experiments` of the repository that contains the kernels.

    Raises SpecError for an invalid name, or one that another experiment has.
    """
    _check(name)
    root = root or registry.FOLDER.parent / "experiments"
    taken = {match[1]: path for path in root.glob("*") if (match := _NUMBERED.fullmatch(path.name))}
    same = [path for path in taken.values() if path.name.partition("_")[2] == name]
    if same:
        raise SpecError(f"{same[0]} already exists: choose another name")
    number = f"{max(map(int, taken), default=0) + 1:03d}"
    folder = root / f"{number}_{name}"
    written = {}
    for template in sorted((TEMPLATES / "experiment").iterdir()):
        text = Template(template.read_text()).substitute(number=number, folder=folder.name)
        written[folder / template.name.removesuffix(".txt")] = text
    return _write(written)


def kernel(name: str, source: str = "fwd_minimal") -> list[Path]:
    """Copy the template or the kernel `source` to NAME.cu and its spec NAME.py, in the first folder that
    SANDBOX_KERNELS names, else in `kernels_cu`; returns the files.

    `default=True` is removed from the copied spec, so that `attention` does not choose the new kernel by itself.
    Raises SpecError for an invalid name or one that is in use, UnknownKernel.
    """
    _check(name)
    folder = (registry.folders()[1:] or [registry.FOLDER])[0]
    files = [folder / f"{name}{suffix}" for suffix in (".cu", ".py")]
    taken = [str(file) for file in files if file.exists()]
    if taken or name in registry.kernels():
        exist = "exist" if len(taken) > 1 else "exists"
        raise SpecError(f"{' and '.join(taken) or name} already {exist}: choose another name")
    texts = _template(source, name) if source in TEMPLATE_NAMES else _copied(source, name)
    return _write(dict(zip(files, texts, strict=True)))


def _template(source: str, name: str) -> list[str]:
    texts = [(TEMPLATES / "kernel" / f"{source}{suffix}.txt").read_text() for suffix in (".cu", ".py")]
    return [Template(text).substitute(name=name) for text in texts]


def _copied(source: str, name: str) -> list[str]:
    """The texts of a kernel's `.cu` and spec, with another name."""
    try:
        old = registry.get(source)
    except UnknownKernel as error:
        raise UnknownKernel(f"{error}; the templates are {', '.join(TEMPLATE_NAMES)}") from None
    stem = old.source.stem
    shared = [k.name for k in registry.kernels().values() if k.source == old.source and stem not in k.name]
    if shared:
        raise SpecError(
            f"{old.source.name} also defines {', '.join(shared)}, which a copy would duplicate: copy it by hand"
        )
    texts = [old.source.with_suffix(suffix).read_text() for suffix in (".cu", ".py")]
    texts = [re.sub(r"^ *default=True,.*\n", "", text, flags=re.MULTILINE) for text in texts]
    return [re.sub(rf"\b{stem}(?!\w*\.cuh\b)", name, text) for text in texts]  # headers are shared


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise SpecError(f"name {name!r} must be lower-case letters, digits and _, and begin with a letter")
    if name in CPP_KEYWORDS or keyword.iskeyword(name):
        raise SpecError(f"name {name!r} is a keyword of C++ or Python: choose another name")


def _write(texts: dict[Path, str]) -> list[Path]:
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:  # never overwrite
            file.write(text)
    return list(texts)
