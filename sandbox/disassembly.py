"""Machine code, counted: how many instructions of each kind a cubin has."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_WIDE = re.compile(r"^(LDG|STG|LDS|STS|LDL|STL)\b.*?\.(64|128)\b")


def opcode_counts(cubin: bytes) -> dict[str, int]:
    """{opcode: instructions}, loads and stores wider than 32 bits with their width, as LDG.128; {} without nvdisasm."""
    program = _nvdisasm()
    if program is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=False)
    return dict(Counter(_kind(opcode) for opcode in _INSTRUCTION.findall(done.stdout)))


def _kind(opcode: str) -> str:
    wide = _WIDE.match(opcode)
    return f"{wide[1]}.{wide[2]}" if wide else opcode.partition(".")[0]


def _nvdisasm() -> str | None:
    if path := shutil.which("nvdisasm"):
        return path
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        return find_nvidia_binary_utility("nvdisasm")
    except Exception:  # not installed, or a version that does not know the name
        return None
