"""Machine code and PTX: instructions with their source lines, counted by class. Needs no GPU.

NVRTC is called with -lineinfo (except for a fast compilation), so the cubin contains a line table. nvdisasm reads
cubins of its own and older versions; it reports live registers only for cubins of CUDA 13 and later.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ..core.errors import ToolchainMissing
from ..core.source_line import SourceLine
from . import tools

_SECTION = re.compile(r"^//-+ \.text\.(\S+)")
_LINE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')
_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)[^;]*);(?:\s*//\s*\|\s*(\d*))?")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_LOC = re.compile(r"^\s*\.loc\s+(\d+ \d+ \d+)(?:.*inlined_at\s+(\d+ \d+ \d+))?")
_ENTRY = re.compile(r"\.(?:entry|func)\b(?:\s*\([^)]*\))?\s+(\w+)")
_PTX = re.compile(r"^\s*((?:@!?%p\d+\s+)?([a-z][a-z0-9_.:]*)\b[^;]*);")

# By the first part of an opcode. Opcodes that are not listed are integer operations and moves.
_KINDS = {
    "tensor cores": "HMMA HGMMA IMMA IGMMA QMMA QGMMA BMMA DMMA OMMA UTCHMMA WARPGROUP mma wgmma tcgen05",
    "shared memory": "LDS STS LDSM STSM ATOMS ld.shared st.shared ldmatrix stmatrix atom.shared",
    "global memory": "LDG STG LDGSTS LD ST RED REDG ATOMG ATOM UTMALDG UTMASTG UTMAREDG UBLKCP UBLKRED "
    "ld.global st.global ld st cp red atom atom.global",
    "local memory": "LDL STL ld.local st.local",
    "special functions": "MUFU ex2 lg2 rcp rsqrt sqrt sin cos tanh",
    "floating point": "FFMA FADD FMUL FMNMX FSETP FSEL FSET FCHK FFMA2 FADD2 FMUL2 FMNMX3 HFMA2 HADD2 HMUL2 HMNMX2 "
    "HSETP2 F2F F2FP F2I I2F I2FP fma add.f mul.f sub.f div max.f min.f neg cvt setp.f abs",
    "synchronisation": "BAR BARRIER SYNCS DEPBAR LDGDEPBAR MEMBAR WARPSYNC FENCE bar barrier mbarrier fence membar",
    "between lanes": "SHFL VOTE VOTEU REDUX MATCH shfl vote redux match activemask",
    "control flow": "BRA EXIT CALL RET BSSY BSYNC BREAK BRX JMP BPT NANOSLEEP YIELD bra ret call exit trap",
    "nothing": "NOP",
}
_KIND = {name: kind for kind, names in _KINDS.items() for name in names.split()}
KINDS = (*_KINDS, "integers and moves")
_WIDE = ("LDG", "STG", "LDGSTS")  # counted by width in bits per lane
_SPACES = ("ld", "st", "atom", "red")


@dataclass(frozen=True)
class Instruction:
    """One instruction of `function`. `where`: its own source line, then those of inlined calls, innermost first.

    `address`: offset in bytes from the start of the function; for PTX, the line number of the text. `live`: live
    general-purpose registers; None if nvdisasm does not report them.
    """

    function: str
    address: int
    opcode: str  # with its modifiers, as LDGSTS.E.BYPASS.128
    text: str
    where: tuple[SourceLine, ...] = ()
    live: int | None = None

    @property
    def line(self) -> SourceLine | None:
        """The innermost line of a `.cu` file: code of a header counts for the line that calls it."""
        return next((at for at in self.where if at.file.endswith(".cu")), self.where[0] if self.where else None)


def available() -> bool:
    """Whether a disassembler is installed."""
    return tools.find("nvdisasm") is not None


def sass(cubin: bytes) -> tuple[Instruction, ...]:
    """The machine code of a cubin, with source lines and, if nvdisasm reports them, live registers.

    Raises ToolchainMissing without nvdisasm, or when it is older than the cubin.
    """
    instructions = tuple(parse_sass(_nvdisasm(cubin, "-gi")))
    try:
        counted = parse_sass(_nvdisasm(cubin, "-lrm", "count"))
    except ToolchainMissing:  # nvdisasm does not compute live ranges for the cubin format of CUDA 12
        return instructions
    live = {(i.function, i.address): i.live for i in counted}
    return tuple(replace(i, live=live.get((i.function, i.address))) for i in instructions)


def ptx(text: str) -> tuple[Instruction, ...]:
    """The instructions of NVRTC's PTX."""
    files = dict(_FILE.findall(text))
    found: list[Instruction] = []
    where: tuple[SourceLine, ...] = ()
    inlined: dict[str, tuple[SourceLine, ...]] = {}  # by position: a directive names one level of inlined calls alone
    function = ""
    for number, line in enumerate(text.splitlines(), 1):
        if entry := _ENTRY.search(line):
            function = entry[1]
            inlined.clear()
        elif loc := _LOC.match(line):
            callers = inlined.get(loc[2]) or _position(loc[2], files) if loc[2] else ()
            where = inlined[loc[1]] = (*_position(loc[1], files), *callers)
        elif instruction := _PTX.match(line):
            found.append(Instruction(function, number, instruction[2], " ".join(instruction[1].split()), where))
    return tuple(found)


def _position(loc: str, files: Mapping[str, str]) -> tuple[SourceLine, ...]:
    """The source line of "file line column" in a .loc directive; () for line 0, which stands for no source line."""
    file, line, _ = loc.split()
    return (SourceLine(files[file], int(line)),) if file in files and line != "0" else ()


def opcode_counts(cubin: bytes) -> dict[str, int]:
    """{opcode class: number of instructions}, most frequent first; {} when no disassembler is installed.

    Classes are opcodes without modifiers, such as "HMMA", "BAR", "FFMA"; global memory accesses include their width in
    bits, such as "LDG.128". Static counts: a loop body counts once. Raises ToolchainMissing when nvdisasm is too old.
    """
    return counts(parse_sass(_nvdisasm(cubin))) if available() else {}


def counts(instructions: Iterable[Instruction]) -> dict[str, int]:
    """{opcode class: count}, most frequent first."""
    return dict(Counter(opcode_class(i) for i in instructions).most_common())


def opcode_class(instruction: Instruction) -> str:
    """The class of an instruction, see `opcode_counts`. Instructions predicated with @!PT count as NOP."""
    base, *modifiers = instruction.opcode.split(".")
    if instruction.text.startswith(("@!PT ", "@!UPT ")):
        return "NOP"
    if base in _WIDE:
        return f"{base}.{next((m.lstrip('US') for m in modifiers if m.lstrip('US').isdecimal()), '32')}"
    if base.isupper():
        return base
    if base in _SPACES:
        space = [m for m in modifiers if m in ("global", "shared", "local", "param", "const")]
        return ".".join((base, *space, *(m for m in modifiers if m in ("v2", "v4", "v8"))))
    if base == "cp":  # cp.async.cg, cp.async.commit_group, cp.async.bulk
        return ".".join((base, *modifiers[:2]))
    return base + (".f" if modifiers and modifiers[-1] in ("f16", "f16x2", "bf16", "f32", "f64") else "")


def kind(name: str) -> str:
    """The member of KINDS to which an opcode class belongs."""
    parts = name.split(".")
    if parts[:2] in (["ld", "param"], ["ld", "const"]):
        return KINDS[-1]
    return _KIND.get(".".join(parts[:2])) or _KIND.get(parts[0], KINDS[-1])


def by_kind(counted: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """{kind: {opcode class: count}} in the order of KINDS, without empty kinds."""
    found: dict[str, dict[str, int]] = {name: {} for name in KINDS}
    for name, number in counted.items():
        found[kind(name)][name] = number
    return {name: classes for name, classes in found.items() if classes}


def parse_sass(text: str) -> Iterator[Instruction]:
    """Instructions of an nvdisasm listing."""
    where: tuple[SourceLine, ...] = ()
    function, open_ = "", False
    for line in text.splitlines():
        if section := _SECTION.match(line):
            function, where = section[1], ()
        elif at := _LINE.match(line):  # an inlined call has one such line per level
            where = (*(where if open_ else ()), SourceLine(at[1], int(at[2])))
            open_ = True
        elif code := _SASS.match(line):
            open_ = False
            live = int(code[4]) if code[4] else None
            yield Instruction(function, int(code[1], 16), code[3], " ".join(code[2].split()), where, live)


def _nvdisasm(cubin: bytes, *options: str) -> str:
    return _listing(tools.need("nvdisasm"), cubin, options)


@lru_cache(maxsize=16)  # reports read the same machine code several times
def _listing(program: str, cubin: bytes, options: tuple[str, ...]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([program, "-c", *options, str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip()[-300:]
        raise ToolchainMissing(
            f"{program} cannot read the cubin: {message} (install a newer one: {tools.REMEDIES['nvdisasm']})"
        )
    return done.stdout
