"""Planted faults: small replacements in copies of three kernels, with an explanation and the expected finding."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..core import registry
from ..core.errors import SpecError

FAULTS = Path(__file__).with_name("faults.toml")
_FOLDERS = {"hopper_plain": "course"}  # kernels that the registry does not list, and their folder in kernels_cu


@dataclass(frozen=True)
class Fault:
    """Number `number` of the course: in a copy of `kernel`, the text `old` is replaced by `new`.

    `topic`: what the exercise is about, without the solution. `why`: the explanation. `expected`: a pattern of the
    finding that names the cause. `later`: planted after the tools were finished."""

    number: int
    kernel: str
    topic: str
    old: str
    new: str
    why: str
    expected: str
    later: bool = False

    @property
    def name(self) -> str:
        """The name of the faulty kernel."""
        return f"course_{self.number:02d}"

    def source(self, suffix: str) -> Path:
        """The original `.cu` or `.py`."""
        return registry.FOLDER / _FOLDERS.get(self.kernel, "") / f"{self.kernel}{suffix}"

    def correct(self, suffix: str, name: str = "") -> str:
        """The text of the `.cu` or `.py` under another name, without the fault."""
        text = re.sub(r"^ *default=True,.*\n", "", self.source(suffix).read_text(), flags=re.MULTILINE)
        return re.sub(rf"\b{self.kernel}\b", name or self.name, text)

    def faulty(self, name: str = "") -> str:
        """The text of the `.cu` with the fault. Raises SpecError if the original has changed."""
        text = self.correct(".cu", name)
        if text.count(self.old) != 1:
            raise SpecError(
                f"fault {self.number} does not fit {self.kernel}.cu: {self.old!r} occurs {text.count(self.old)} times"
            )
        return text.replace(self.old, self.new)

    @property
    def lines(self) -> range:
        """The lines of the faulty text that the fault changes."""
        begin = self.correct(".cu").partition(self.old)[0].count("\n") + 1
        return range(begin, begin + max(1, self.new.count("\n") + 1))


@lru_cache(maxsize=1)
def every() -> dict[int, Fault]:
    """The faults by number."""
    found = tomllib.loads(FAULTS.read_text())["fault"]
    return {fault["number"]: Fault(**fault) for fault in found}


def get(number: int) -> Fault:
    """The fault of that number. Raises SpecError with the existing numbers."""
    if number not in every():
        raise SpecError(f"the course has no fault {number}: choose one of 1 to {max(every())}")
    return every()[number]


def start(number: int, folder: Path) -> list[Path]:
    """Writes the faulty kernel and its spec to a folder, which may exist; returns the files.

    Raises SpecError if a file exists already."""
    fault = get(number)
    files = {folder / f"{fault.name}.cu": fault.faulty(), folder / f"{fault.name}.py": fault.correct(".py")}
    if there := [str(file) for file in files if file.exists()]:
        raise SpecError(f"{' and '.join(there)} exist already: choose another folder, or delete them")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        file.write_text(text)
    return [*files]


def solution(number: int) -> str:
    """What is wrong, why, and the change that corrects it."""
    fault = get(number)
    before, after = (text.splitlines(keepends=True) for text in (fault.faulty(), fault.correct(".cu")))
    changed = "".join(difflib.unified_diff(before, after, f"{fault.name}.cu", f"{fault.name}.cu (corrected)", n=1))
    return f"{fault.why}\n\n{changed}"
