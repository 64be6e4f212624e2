"""Reports of sanitizers as findings: sentences and lines. The reports are shortened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.core.errors import ToolchainMissing
from sandbox.core.score import Score
from sandbox.core.source_line import SourceLine
from sandbox.cpu.build import HERE
from sandbox.verify import compute_sanitizer, findings
from sandbox.verify.findings import Finding, parse_compute_sanitizer, parse_host_sanitizer

KERNEL, TILES = "/w/kernels_cu/k.cu", "/w/kernels_cu/include/tiles.cuh"


def at(*places: tuple[str, int]) -> tuple[SourceLine, ...]:
    return tuple(SourceLine(file, line) for file, line in places)


def test_places() -> None:
    """In order, each once, without headers of the CPU backend; also in a spec."""
    text = f"in f {KERNEL}:40:7 ({HERE}/include/cuda_fp16.h:3) {HERE}/fibers.cuh:9\n{TILES}:41 {KERNEL}:40 /w/k.py:2\n"
    assert findings.places(text) == at((KERNEL, 40), (TILES, 41), ("/w/k.py", 2))
    assert findings.places("k.cu:40, /w/k.cpp:3") == ()


def test_names_of_buffers() -> None:
    text = "0 bytes past the end of buffer 1 in block (0,0,0), near buffer 0"
    assert findings.name_buffers(text, ["Q", "K"]) == "0 bytes past the end of K in block (0,0,0), near buffer 0"


ADDRESS = f"""==7==ERROR: AddressSanitizer: use-after-poison on address 0x7f
READ of size 2 at 0x7f thread T0
    #0 0x1 in load {TILES}:41
    #1 0x2 in k {KERNEL}:40
    #2 0x3 in run {HERE}/main.cuh:12

0x7f is located 0 bytes after
    #0 0x4 in malloc {KERNEL}:99

SUMMARY
"""


@pytest.mark.parametrize(
    ("kind", "access", "what"),
    [
        ("use-after-poison", "READ of size 2", "beyond the dynamic shared memory, read of 2 bytes"),
        ("heap-buffer-overflow", "WRITE of size 16", "out of bounds, write of 16 bytes"),
        ("stack-buffer-overflow", "READ of size 2", "stack-buffer-overflow, read of 2 bytes"),
        ("SEGV", "", "SEGV"),
    ],
)
def test_address_sanitizer(kind: str, access: str, what: str) -> None:
    """The stack of the access; with the place that the CPU backend adds."""
    text = ADDRESS.replace("use-after-poison", kind).replace("READ of size 2", access)
    assert parse_host_sanitizer(text) == [Finding(what, at((TILES, 41), (KERNEL, 40)))]
    near = "sandbox: 0 bytes past the end of K in block (0,0,0)\n"
    assert parse_host_sanitizer(near + text)[0].what == f"{what}, 0 bytes past the end of K in block (0,0,0)"


def test_a_report_that_ends_with_its_stack() -> None:
    assert parse_host_sanitizer(ADDRESS.partition("\n\n")[0])[0].places == at((TILES, 41), (KERNEL, 40))


def test_undefined_behaviour() -> None:
    text = f"started\n{TILES}:41:9: runtime error: shift exponent 32 is too large\n    #0 0x1 in k {KERNEL}:40\n"
    assert parse_host_sanitizer(text) == [Finding("shift exponent 32 is too large", at((TILES, 41), (KERNEL, 40)))]


def test_a_cp_async_without_a_wait() -> None:
    """Also as AddressSanitizer reports it."""
    said = "shared memory used while a cp.async to it by thread 0 has not been waited for"
    assert parse_host_sanitizer(f"ran\n{said}\n{ADDRESS}") == [Finding(said, at((TILES, 41), (KERNEL, 40)))]


def test_a_message_of_the_runtime() -> None:
    text = f"barrier not reached, at {KERNEL}:40\n    at {KERNEL}:41 (thread 3)\n    at {TILES}:9\n"
    places = at((KERNEL, 40), (KERNEL, 41), (TILES, 9))
    assert parse_host_sanitizer(text) == [Finding("barrier not reached, at k.cu:40", places)]


def race(*accesses: tuple[str, int, str]) -> str:
    report = "WARNING: ThreadSanitizer: data race (pid=7)\n"
    for how, size, stack in accesses:
        report += f"  {how} of size {size} at 0x7f by thread T1:\n{stack}\n"
    return report


def stack(*places: tuple[str, int]) -> str:
    return "".join(f"    #{n} f {file}:{line}\n" for n, (file, line) in enumerate(places))


def test_a_race() -> None:
    """The lines of the `.cu`, rather than of headers; what follows the two accesses does not count."""
    text = race(("Write", 4, stack((TILES, 41), (KERNEL, 40))), ("Previous atomic read", 2, stack((KERNEL, 48))))
    text += f"  Location is heap block of size 64:\n{stack((KERNEL, 77))}"
    (found,) = parse_host_sanitizer(text)
    assert found.what == "data race: write of 4 bytes at k.cu:40 against previous atomic read of 2 bytes at k.cu:48"
    assert found.places == at((TILES, 41), (KERNEL, 40), (KERNEL, 48))


def test_a_race_in_headers_alone_or_without_lines() -> None:
    text = race(("Atomic write", 8, stack((TILES, 41), (TILES, 9))), ("Previous write", 8, ""))
    (found,) = parse_host_sanitizer(text)
    assert found == Finding(
        "data race: atomic write of 8 bytes at tiles.cuh:41 against previous write of 8 bytes",
        at((TILES, 41), (TILES, 9)),
    )
    (found,) = parse_host_sanitizer("WARNING: ThreadSanitizer: data race (pid=7)\n  Location is stack\n")
    assert found == Finding("data race: data race (pid=7)", ())


def test_races_between_the_same_lines_are_one_finding() -> None:
    """The first one, in order."""
    one = race(("Write", 4, stack((KERNEL, 40))), ("Previous read", 4, stack((KERNEL, 48))))
    two = race(("Write", 2, stack((KERNEL, 41))), ("Previous read", 2, stack((KERNEL, 48))))
    again = one.replace("size 4", "size 8")
    assert [f.what for f in parse_host_sanitizer(f"{one}{two}{again}")] == [
        "data race: write of 4 bytes at k.cu:40 against previous read of 4 bytes at k.cu:48",
        "data race: write of 2 bytes at k.cu:41 against previous read of 2 bytes at k.cu:48",
    ]


# ---- lines of a Score


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text("import sandbox\nscore = sandbox.Score(\n    '''x + 2\n    - 1.5''', mask='i == j')\n")
    return path


@pytest.mark.parametrize(
    ("place", "line", "phrase"),
    [
        ("score:1", 3, ", in the Score's score: x + 2"),
        ("score:2", 4, ", in the Score's score: - 1.5"),
        ("mask:1", 4, ", in the Score's mask: i == j"),
        ("/w/score:2", 4, ", in the Score's score: - 1.5"),
        ("score:3", 0, ""),
        ("score:0", 0, ""),
        ("mask:2", 0, ""),
        ("underscore:1", 0, ""),
    ],
)
def test_the_line_of_an_expression(place: str, line: int, phrase: str, file: Path) -> None:
    score = Score("x + 2\n    - 1.5", mask="i == j", file=str(file))
    text = f"    #0 0x1 in f {place}\n"
    expected = text.replace(place, f"{file}:{line}") if line else text
    assert findings.resolve_expressions(text, score) == (expected, phrase)
    assert findings.resolve_expressions(text, None) == (text, "")


def test_the_first_expression_is_named(file: Path) -> None:
    text, phrase = findings.resolve_expressions("mask:1 score:2", Score("x + 2\n- 1.5", mask="i == j", file=str(file)))
    assert (text, phrase) == (f"{file}:4 {file}:4", ", in the Score's mask: i == j")


def test_an_expression_that_is_in_no_file(file: Path) -> None:
    for score in (Score("x + 3"), Score("x + 3", file=str(file)), Score("x + 3", file=str(file.with_name("none.py")))):
        assert findings.resolve_expressions("at score:1", score) == ("at score:1", ", in the Score's score: x + 3")


# ---- compute-sanitizer

RACE = f"""========= COMPUTE-SANITIZER
printed by the program
========= Error: Race between Write access at k+0x8a0 in {KERNEL}:40
=========     and Read access at k+0xb10 in {TILES}:48 [4096 hazards]
=========     on the stack
=========
========= Warning: Race at k+0x1 in {KERNEL}:50
=========     by thread (3,0,0) in block (2,0,0)
=========     Address 0x7f is out of bounds
========= Target application returned an error
========= RACECHECK SUMMARY: 2 hazards displayed
"""


def test_paragraphs_of_compute_sanitizer() -> None:
    first = (
        f"Race between Write access at k+0x8a0 in {Path(KERNEL).name}:40, and Read access at k+0xb10 in tiles.cuh:48"
    )
    assert parse_compute_sanitizer(RACE) == [
        Finding(f"{first} [4096 hazards]", at((KERNEL, 40), (TILES, 48))),
        Finding(
            "Race at k+0x1 in k.cu:50, by thread (3,0,0) in block (2,0,0), Address 0x7f is out of bounds",
            at((KERNEL, 50)),
        ),
    ]


def test_details_without_a_fault_are_none() -> None:
    assert parse_compute_sanitizer("=========     by thread (3,0,0)\n========= ERROR SUMMARY: 1 error\n") == []


def test_files_in_the_first_folder_that_has_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "k.cu").touch()
    (tmp_path / "two" / "tiles.cuh").touch()
    folders = [tmp_path / name for name in ("none", "one", "two")]
    text = "========= Race at k+0x1 in k.cu:5\n=========     in tiles.cuh:6 and in other.cuh:7\n"
    (found,) = parse_compute_sanitizer(text, folders)
    assert found.places == at((str(tmp_path / "one" / "k.cu"), 5), (str(tmp_path / "two" / "tiles.cuh"), 6))
    (found,) = parse_compute_sanitizer(text)
    assert found == Finding("Race at k+0x1 in k.cu:5")


@pytest.fixture
def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake compute-sanitizer: runs the script `does`."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n. {tmp_path}/does\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "does"


def checked(tmp_path: Path, tool: str = "memcheck", timeout: float = 60) -> tuple[list[Finding], str]:
    return compute_sanitizer.run(tool, ["program", "--its-option"], timeout, tmp_path, ())


def test_how_a_program_is_checked(checker: Path, tmp_path: Path) -> None:
    """With everything that it prints; the exit status tells findings from faults of the program."""
    checker.write_text('pwd; echo "$@" >&2; exit 0\n')
    found, text = checked(tmp_path, "racecheck")
    assert found == []
    folder, command = text.splitlines()
    assert Path(folder).resolve() == tmp_path.resolve()
    options = "--report-api-errors no --show-backtrace device --error-exitcode 91 --print-limit 100"
    assert command == f"--tool racecheck {options} program --its-option"


@pytest.mark.parametrize(
    ("said", "status", "found"),
    [
        (RACE, 0, []),
        (RACE, 91, parse_compute_sanitizer(RACE)),
        (RACE, 1, parse_compute_sanitizer(RACE)),  # the program failed, too
        ("=== ERROR SUMMARY: 3 errors\n", 91, [Finding("errors that are not listed: ERROR SUMMARY: 3 errors")]),
        ("no more\n", 91, [Finding("errors that are not listed: no summary")]),
        ("========= A fault\n", 91, [Finding("A fault")]),
    ],
)
def test_findings_of_a_program(said: str, status: int, found: list[Finding], checker: Path, tmp_path: Path) -> None:
    checker.write_text(f"cat <<'END'\n{said}END\nexit {status}\n")
    assert checked(tmp_path) == (found, said)


def test_a_program_that_fails(checker: Path, tmp_path: Path) -> None:
    """The last eight lines, without frames of a traceback."""
    lines = "\n".join(f"line {n}\n  frame {n}\n" for n in range(10))
    checker.write_text(f"cat <<'END'\n========= A fault\n{lines}\nEND\nexit 2\n")
    last = "\n".join(f"line {n}" for n in range(2, 10))
    with pytest.raises(ToolchainMissing) as failed:
        checked(tmp_path)
    assert str(failed.value) == f"compute-sanitizer --tool memcheck ended with status 2:\n{last}"


def test_a_program_that_does_not_end(checker: Path, tmp_path: Path) -> None:
    checker.write_text("exec sleep 60\n")
    said = "did not finish within 0.1 s under memcheck: does the kernel end?"
    assert checked(tmp_path, timeout=0.1) == ([Finding(said)], "")


def test_expressions_of_a_score_are_located(checker: Path, file: Path, tmp_path: Path) -> None:
    checker.write_text("echo '========= Invalid read'; echo '=========     at f in score:2'; exit 91\n")
    score = Score("x + 2\n    - 1.5", mask="i == j", file=str(file))
    found, _ = compute_sanitizer.run("memcheck", ["program"], 60, tmp_path, (), score)
    assert found == [Finding("Invalid read", at((str(file), 4)))]
