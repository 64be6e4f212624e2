"""The command line: its output and its exit status."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from project import INTERRUPTIBLE, STORED_OPTIONS, check_stored, digest, in_project, new_kernel, printed
from rich.console import Console

import sandbox
from sandbox.cli import cli, output
from sandbox.core import registry
from sandbox.core.errors import CompileError
from sandbox.core.kernel import INVARIANCES
from sandbox.core.options import SHOWN
from sandbox.cpu import build
from sandbox.disassembly import costs
from sandbox.engine import pipeline, spills
from sandbox.engine.choose import choose_tile
from sandbox.launch.dlpack import HOST
from sandbox.spec import Problem, Tile
from sandbox.toolchain.arch import Occupancy
from sandbox.toolchain.nvrtc import Resources
from sandbox.verify import cases, check, references, report, suite
from sandbox.verify.cases import Case
from sandbox.verify.isolated import IsolatedRunner
from sandbox.verify.references import Reference, ReferenceOutput, reference_of
from sandbox.watch.job import quick_cases


def call(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, arguments, env={"COLUMNS": None, **environment}, prog_name="sandbox")


def parsed(*arguments: str):
    """The JSON output of a command, parsed strictly: NaN is an error."""
    result = call(*arguments, "--json")
    assert result.stderr == ""

    def reject(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(result.stdout, parse_constant=reject)


@pytest.fixture
def short_sweep(monkeypatch: pytest.MonkeyPatch) -> int:
    """A sweep reduced to four cases."""
    whole = cases.sweep_cases
    monkeypatch.setattr(suite, "sweep_cases", lambda kernel: itertools.islice(whole(kernel), 4))
    return 4


# ---- each command, as a table and as JSON


def commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def test_options_that_commands_share() -> None:
    assert cli.list_commands(click.Context(cli))  # imports all
    given = {name: {option for p in command.params for option in p.opts} for name, command in commands(cli)}
    having = lambda option: {name for name, options in given.items() if option in options}  # noqa: E731
    assert having("--json") == {*given}
    launching = {"run", "sanitize", "timeline", "watch"}
    shaped = {*launching, "bench", "compile", "list", "profile", "ptx", "sass", "tune"}
    for option in ("--shape", "--dtype", "--causal", "--window", "--mask", "--lengths", "--page-size", "--dropout"):
        assert having(option) == shaped
    assert having("--tile") == shaped - {"list", "tune"} | {"bits", "check"}
    assert having("--backend") == {*launching, "bits", "check", "tune"}
    assert having("--html") == {"bench", "check", "profile", "ptx", "sass", "timeline", "tune", "watch"}
    assert having("--plot") == {"bench", "profile", "timeline", "tune"}


def test_stored_options() -> None:
    """Every option of every command: names, default, type, choices, whether it is repeated or a flag. A new score
    option is left out."""
    new = {option.name for option in SHOWN} - {*STORED_OPTIONS}
    assert cli.list_commands(click.Context(cli))  # imports all
    lines = []
    for name, command in sorted(commands(cli)):
        found, params = [], [p for p in command.params if p.name not in new]
        for p in params:
            kind = {name: value for name, value in p.type.to_info_dict().items() if value not in (None, False)}
            default = "none" if p.default is None or "UNSET" in repr(p.default) else repr(p.default)
            flag = getattr(p, "flag_value", None) if getattr(p, "is_flag", False) else ""
            found.append(
                f"{' '.join([*p.opts, *p.secondary_opts])}: {kind} default {default} {flag} "
                f"{p.required} {getattr(p, 'multiple', '')} {p.nargs}"
            )
        lines += [f"{name} {' '.join(p.opts[0] for p in params)}", *found[:1], digest(found)]
    check_stored("cli/options.txt", lines)


def test_list() -> None:
    rows = parsed("list")
    assert {"name", "computes", "rung", "dtypes", "max_D", "min_arch", "tiles", "source"} <= set(rows[0])
    assert Path(rows[0]["source"]).is_file()
    shown = call("list")
    assert shown.exit_code == 0
    for row in rows:
        (line,) = [line for line in shown.stdout.splitlines() if line.split()[:1] == [row["name"]]]
        assert row["summary"] in line


def test_list_of_guarantees() -> None:
    lines = call("list", "--guarantees").stdout.splitlines()
    assert lines[0].split()[:3] == ["kernel", "runs", "entries"]
    (of_decode,) = [line.split() for line in lines if line.startswith("fwd_decode ")]
    assert of_decode == ["fwd_decode", "yes", "yes"]  # runs and strides
    shown = " ".join(call("list", "--guarantees").stdout.split())
    assert "yes: guaranteed by the spec; blank: no guarantee; -: does not apply." in shown
    explained = " ".join(call("bits", "--help").stdout.split())
    for name, what in INVARIANCES.items():
        assert f"{name} {what}" in shown
        assert f"{name}: {what}" in explained
    narrow = call("list", "--guarantees", COLUMNS="80").stdout.splitlines()
    assert [line.split()[1] for line in narrow if line.startswith("kernel ")] == ["runs", "page_size"]
    (row,) = [row for row in parsed("list") if row["name"] == "fwd_decode"]
    assert row["invariant_to"] == ["runs", "strides"]


def test_list_for_a_problem() -> None:
    """The chosen kernel, and the reasons against the others."""
    rows = parsed("list", "--shape", "1,2,77,60", "--arch", "sm_90a")
    by_name = {row["kernel"]: row for row in rows}
    assert by_name["fwd_mma"]["tile"] is None
    assert "multiple of 8" in by_name["fwd_mma"]["reason"]
    assert by_name["fwd_block2d"]["tile"]["BLOCK_M"]
    shown = call("list", "--shape", "1,2,77,60", "--arch", "sm_90a").stdout.splitlines()
    assert [line.split()[0] for line in shown if "chosen" in line] == ["fwd_block2d", "bwd_block2d"]
    assert [line.split()[0] for line in shown if line.split()[2] == "supported"] == ["fwd_minimal", "bwd_minimal"]
    (line,) = [line for line in shown if line.startswith("fwd_mma ")]
    assert "unsupported" in line
    assert "multiple of 8" in line


def test_list_has_the_reason_against_a_kernel_with_a_tile() -> None:
    """It spills. The next kernel is chosen."""
    options = ("--shape", "8,8/1,16,192", "--lengths", "16,16", "--softcap", "3", "--arch", "sm_90")
    shown = call("list", *options, COLUMNS="400").stdout.splitlines()
    states = {line.split()[0]: line.split(maxsplit=2)[2] for line in shown[1:]}
    split = states["bwd_wgmma_split_group"]
    assert re.match(r"spills +BLOCK_M=.*\(the tile with the fewest spilled bytes spills \d+ per thread\)", split)
    assert states["bwd_wgmma"].startswith("chosen ")
    assert [row["kernel"] for row in parsed("list", *options) if row["chosen"]] == ["fwd_wgmma", "bwd_wgmma"]


def test_list_marks_a_kernel_that_spills_if_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = registry.get("fwd_minimal")
    monkeypatch.setattr(registry, "kernels", lambda: {"fwd_minimal": kernel})
    monkeypatch.setattr(spills, "spilled", lambda *_: 1000)
    shown = call("list", "--shape", "1,1,64,64", "--arch", "sm_80", COLUMNS="400")
    assert shown.exit_code == 0
    (line,) = shown.stdout.splitlines()[1:]
    assert re.match(r"fwd_minimal +forward +chosen +BLOCK_M=.*spills 1000 per thread\)", line)


def test_list_of_an_invariant_problem_has_the_choice_of_attention() -> None:
    """`attention` tries no other kernel if the one that the invariance determines does not support the problem."""
    options = ("list", "--shape", "1,4,64,32", "--page-size", "4", "--invariant", "--arch", "cpu")
    shown = call(*options)
    assert shown.exit_code == 2
    assert "chosen" not in shown.stdout
    assert "supported" in shown.stdout
    assert shown.stderr.startswith("no forward kernel is chosen: fwd_wgmma_invariant: page_size=4 is not supported")
    (name,) = (row["kernel"] for row in parsed(*options[:3], *options[5:]) if row["chosen"] and "fwd" in row["kernel"])
    assert name == "fwd_wgmma_invariant"


def test_list_rejects_more_rows_than_32_bits_count() -> None:
    for shape in ("1,1,2147483648,64", "1,1,64,4294967296,64"):
        refused = call("list", "--shape", shape)
        assert refused.exit_code == 2
        assert "is not supported: kernels add row indices" in refused.stderr


def test_list_reports_grids_that_are_too_large() -> None:
    """At most 65535 blocks along y and z; kernels with a smaller grid support the problem."""
    by_name = {row["kernel"]: row for row in parsed("list", "--shape", "65536,1,64,64", "--arch", "sm_90a")}
    assert "its grid has 65536 blocks along z, and the limit is 65535 (split the batch)" in by_name["fwd_mma"]["reason"]
    assert by_name["fwd_wgmma"]["tile"]
    assert by_name["bwd_wgmma"]["tile"] is None  # its postprocess kernel has one block in z per batch entry


def test_list_for_the_cpu_and_for_an_unsupported_problem() -> None:
    assert {"chosen", "supported"} <= {*re.findall(r"\w+", call("list", "--shape", "1,2,7,64").stdout)}
    on_old = call("list", "--shape", "1,2,7,64", "--arch", "sm_75").stdout
    assert "compute capability 7.5 is not supported: the kernel needs 8.0 or later" in on_old
    too_large = call("list", "--shape", "1,2,7,300", "--arch", "cpu")
    assert too_large.exit_code == 2
    assert "D=300 is not supported" in too_large.stdout


def test_options_that_need_shape() -> None:
    for arguments, message in (
        (("list", "--arch", "sm_90a"), "--arch needs --shape"),
        (("run", "--causal"), "--causal needs --shape"),
    ):
        result = call(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr


def test_doctor() -> None:
    findings = {finding["what"]: finding for finding in parsed("doctor")}
    assert findings["NVRTC"]["ok"]
    assert findings["CUDA headers"]["ok"]
    shown = call("doctor")
    assert shown.exit_code == 0
    for what, finding in findings.items():
        assert what in shown.stdout
        assert finding["ok"] or finding["remedy"]
    assert shown.stdout.splitlines()[-3].startswith("files of --html open in any browser")


def test_doctor_reports_missing_software(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = call("doctor", SANDBOX_CACHE_DIR=str(tmp_path / "file"), CXX="no-such-compiler", COLUMNS="400")
    assert shown.exit_code == 1
    lines = {line.split()[1]: line for line in shown.stdout.splitlines()[1:]}
    assert lines["cache"].startswith("required")
    assert "set SANDBOX_CACHE_DIR" in lines["cache"]
    assert lines["host"].startswith("missing")
    assert "CXX=no-such-compiler" in lines["host"]


def test_compile() -> None:
    options = ("fwd_minimal", "--arch", "sm_90a,sm_80", "--shape", "1,1,1,64", "--tile", "BLOCK_M=64,BLOCK_N=32")
    rows = parsed("compile", *options)
    assert [(row["arch"], row["ok"], row["smem_dynamic"]) for row in rows] == [
        ("sm_90a", True, 49152),
        ("sm_80", True, 49152),
    ]
    repeated = parsed("compile", *options[:2], "sm_80", "--arch", "sm_90a, sm_80", *options[3:])
    assert [row["arch"] for row in repeated] == ["sm_80", "sm_90a"]
    assert rows[0]["problem"] == Problem(1, 1, 1, 1, 64, dtype="float16").as_json()
    assert rows[0]["tile"] == {"BLOCK_M": 64, "BLOCK_N": 32}
    assert rows[0]["occupancy"] == {"blocks_per_sm": 4, "fraction": 4 * 2 / 64, "limiter": "shared memory"}
    assert rows[0]["resources"]["registers"] > 16
    shown = call("compile", *options)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "cached" in shown.stdout
    assert sum("48 KiB" in line for line in shown.stdout.splitlines()) == 2


def test_an_architecture_without_the_suffix_that_a_kernel_needs() -> None:
    """`sm_90` is compiled as sm_90a, the only target with wgmma; other kernels and named suffixes stay."""
    options = ("--shape", "1,1,64,64", "--arch", "sm_90", "--tile")
    (hopper,) = parsed("compile", "bwd_wgmma_head", *options, "BLOCK_M=128,BLOCK_N=128,STAGES=2")
    (plain,) = parsed("compile", "fwd_minimal", *options, "BLOCK_M=64,BLOCK_N=32")
    assert [(row["arch"], row["ok"]) for row in (hopper, plain)] == [("sm_90a", True), ("sm_90", True)]
    assert parsed("ptx", "bwd_wgmma_head", *options[:-1])["arch"] == "sm_90a"
    assert sandbox.compile("bwd_wgmma_head", D=64, arch="sm_90").arch == "sm_90a"
    assert pipeline.target_of(registry.get("fwd_mma"), "sm_90a") == "sm_90a"


@pytest.mark.parametrize("command", ["compile", "ptx"])
def test_score_options_are_compiled_in(command: str, tmp_path: Path) -> None:
    """The code shown is that of the given problem, with its score."""
    arguments = (command, "fwd_minimal", "--shape", "1,1,64,16", "--tile", "BLOCK_M=64,BLOCK_N=32", "--score")
    for expression, status in (("x - 0.5", 0), ("x - undeclared", 1)):
        file = tmp_path / f"{status}.py"
        file.write_text(f"import sandbox\nscore = sandbox.Score({expression!r})\n")
        shown = call(*arguments, str(file))
        assert (shown.exit_code, "undeclared" in shown.stderr) == (status, bool(status)), shown.output


@pytest.mark.complete
def test_compile_sweep() -> None:
    """No row: the kernel has one tile, which does not spill, and no file is written."""
    rows = parsed("compile", "--sweep", "bwd_wgmma_head", "--arch", "sm_90a", "--jobs", "2")
    assert rows == [{"kernel": "bwd_wgmma_head", "compiled": 6, "rows": 0}]


def test_compile_reports_unsupported_problems() -> None:
    options = (
        "compile",
        "fwd_minimal",
        "--shape",
        "1,1,1,64",
        "--shape",
        "2,4,8,512",
        "--tile",
        "BLOCK_M=64,BLOCK_N=32",
    )
    shown = call(*options)
    assert shown.exit_code == 0
    assert shown.stderr.startswith("not compiled: fwd_minimal: D=512 is not supported: head dimensions are at most 256")
    assert [row["ok"] for row in parsed(*options)] == [True, None]
    assert "D=512 is not supported" in parsed(*options)[1]["message"]


def test_compile_names_the_kernel_for_another_architecture() -> None:
    shown = call("compile", "fwd_wgmma", "--arch", "sm_80", "--shape", "1,1,64,64")
    assert "8.0 is not supported: the kernel runs on 9.0 only (use fwd_mma)" in shown.stderr


@pytest.mark.parametrize(
    ("kernel", "D", "tile", "message"),
    [
        (
            "bwd_mma",
            "128",
            "BLOCK_M=64,BLOCK_N=128,WARPS=4,MIN_BLOCKS=2",
            "BLOCK_N=128 with WARPS=4 is not supported at D=128, Dv=128: a warp has at most 64 columns",
        ),
        (
            "fwd_block2d",
            "64",
            "BLOCK_M=64,BLOCK_N=72,BLOCK_D=64,THREADS_X=8,THREADS_Y=16",
            "BLOCK_N=72 must be a multiple of 4 and of THREADS_Y=16",
        ),
        (
            "fwd_block2d",
            "64/256",
            "BLOCK_M=64,BLOCK_N=64,BLOCK_D=64,THREADS_X=8,THREADS_Y=32",
            "BLOCK_N=64 with BLOCK_D=64 is not supported at Dv=256: V is loaded in steps",
        ),
    ],
)
def test_compile_has_the_rule_that_a_tile_breaks(kernel: str, D: str, tile: str, message: str) -> None:
    shown = call("compile", kernel, "--shape", f"1,1,64,{D}", "--tile", tile)
    assert shown.stderr.startswith(f"not compiled: {kernel}: {message}")


def test_older_spellings_of_shape() -> None:
    """Every command takes --shape; older spellings still work and are hidden."""
    for command, old, value, shapes in (
        (("list", "--arch", "sm_90a"), "--problem", "1,2,77,60", ["1,2,77,60"]),
        (("compile", "bwd_preprocess"), "-D", "32,64", ["1,1,1,32", "1,1,1,64"]),
        (("ptx", "fwd_minimal"), "--head-dim", "32", ["1,1,1,32"]),
    ):
        now = [word for shape in shapes for word in ("--shape", shape)]
        assert untimed(parsed(*command, *now)) == untimed(parsed(*command, old, value))
        shown = call(command[0], "--help").stdout
        assert "--shape" in shown
        assert old not in shown


def untimed(rows: list[dict] | dict) -> list[dict]:
    """The rows without the fields that differ between compilations."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "cached", "resources")}
            for row in (rows if isinstance(rows, list) else [rows])]  # fmt: skip


def command_line(command: click.Command, *words: str) -> dict[str, Any]:
    """The parameters of a command, parsed from `words`."""
    group = click.Context(cli, **cli.context_settings)
    return command.make_context(command.name, [*words], group).params


ON_KERNELS = [c for c in cli.commands.values() if {p.name for p in c.params} & {"kernel", "kernels"}]


@pytest.mark.parametrize("command", ON_KERNELS, ids=lambda command: command.name)
def test_an_option_without_a_value_does_not_consume_the_kernel(command: click.Command) -> None:
    """Every option that may have no value, before and after the kernel's name."""
    alone = set()
    for option in (opt for p in command.params if isinstance(p, click.Option) and not p.is_eager for opt in p.opts):
        try:
            command_line(command, "fwd_mma", option)
        except click.UsageError:  # it needs a value
            continue
        alone.add(option)
        for words in ([option, "fwd_mma"], ["fwd_mma", option], [option, "--", "fwd_mma"]):
            given = command_line(command, *words)
            assert given.get("kernel", given.get("kernels")) in ("fwd_mma", ("fwd_mma",)), words
    assert "--json" in alone
    assert ("--causal" in alone) == any(p.name == "causal" for p in command.params)


def test_causal_takes_only_its_own_values() -> None:
    for words, causal in (
        (["--causal", "fwd_mma"], "bottom-right"),
        (["--causal", "top-left", "fwd_mma"], "top-left"),
        (["--causal=top-left", "fwd_mma"], "top-left"),
        (["fwd_mma", "--causal"], "bottom-right"),
        (["fwd_mma"], None),
        (["--causal", "--shape", "1,1,5,64", "fwd_mma"], "bottom-right"),
    ):
        given = command_line(cli.commands["run"], *words)
        assert (given["causal"], given["kernels"]) == (causal, ("fwd_mma",))


def test_sass_shows_what_watch_compiles() -> None:
    """The same problem, tile and architecture by default."""
    kernel, device = registry.get("fwd_mma"), check.pick_device(None)
    problem = quick_cases(kernel, device)[0].problem
    shown = parsed("ptx", "fwd_mma")
    assert (shown["problem"], shown["arch"]) == (problem.as_json(), pipeline.target_of(kernel))
    assert shown["tile"] == dict(choose_tile(kernel, problem, pipeline.arch_of(device)))
    assert parsed("ptx", "fwd_mma", "--causal")["problem"] == {**problem.as_json(), "causal": "bottom-right"}


def test_run() -> None:
    options = ("run", "fwd_minimal", "--shape", "1,4/2,70,50,64", "--dtype", "bfloat16", "--causal", "--backend", "cpu")
    (row,) = parsed(*options)
    assert (row["ok"], row["backend"]) == (True, "cpu")
    expected = {"B": 1, "H": 4, "Hk": 2, "Sq": 70, "Sk": 50, "D": 64, "dtype": "bfloat16", "causal": "bottom-right"}
    assert row["problem"].items() >= expected.items()
    assert row["tile"] == dict(registry.get("fwd_minimal").tiles[0])
    assert 0 < row["error"] <= row["bound"]
    assert row["seconds"] > 0
    assert row["resources"]["registers"] > 16
    shown = call(*options)
    assert shown.exit_code == 0
    assert "emulated" in shown.stdout
    assert " ok" in shown.stdout


def test_a_backward_is_one_kernel_with_several_entry_points() -> None:
    """`list` and `run` print one line; `compile` prints one per entry point. A failure names the worst gradient."""
    assert [row["name"] for row in parsed("list") if row["name"].startswith("bwd_minimal")] == ["bwd_minimal"]
    options = ("run", "bwd_minimal", "--shape", "1,4/2,40,50,16", "--causal", "--backend", "cpu")
    (row,) = parsed(*options)
    assert (row["ok"], row["lse_error"], row["lse_excess"]) == (True, None, None)
    assert row["tensor"] in ("dQ", "dK", "dV")
    wrong = check.Result(**{**row, "ok": False, "resources": None})
    (text,) = report.failures([wrong])
    assert f"[cpu]: {row['tensor']} error " in text.plain
    assert "LSE" not in text.plain
    entries = parsed("compile", "bwd_minimal", "--shape", "1,1,1,16", "--tile", "BLOCK_M=16,BLOCK_N=32")
    assert [cost["kernel"] for cost in entries] == ["bwd_minimal", "bwd_minimal_dq"]
    assert [cost["smem_dynamic"] for cost in entries] == [4 * 16 * (4 * 32 + 2 * 16), 4 * 16 * (3 * 16 + 2 * 32)]
    assert row["resources"]["registers"] >= max(cost["resources"]["registers"] for cost in entries)
    assert "bwd_minimal_dq is an entry point of bwd_minimal" in call("run", "bwd_minimal_dq").stderr


def test_check(short_sweep: int) -> None:
    rows = parsed("check", "fwd_minimal", "--backend", "cpu")
    assert [row["ok"] for row in rows] == [True] * short_sweep
    shown = call("check", "fwd_minimal", "--backend", "cpu")
    assert (shown.exit_code, shown.stdout) == (
        0,
        f"fwd_minimal: {short_sweep} ok, 0 wrong or failed, 0 not supported, on cpu\n",
    )
    shown = call("check", "fwd_minimal", "--backend", "cpu", "--tile", "BLOCK_M=3")
    note, counts = shown.stdout.splitlines()
    assert shown.exit_code == 2
    assert "tile BLOCK_M=3 lacks BLOCK_N: set all numbers, such as BLOCK_M=" in note
    assert counts == f"fwd_minimal: 0 ok, 0 wrong or failed, {short_sweep} not supported, on cpu"


def test_cache(own_cache: Path) -> None:
    assert parsed("cache", "ls") == {"directory": str(own_cache), "entries": []}
    call("compile", "fwd_minimal", "--shape", "1,1,1,16", "--tile", "BLOCK_M=32,BLOCK_N=16")
    listed = parsed("cache", "ls")
    assert [entry["name"] for entry in listed["entries"]] == ["fwd_minimal sm_90a"]
    shown = call("cache", "ls").stdout.splitlines()
    assert shown[0].startswith(listed["entries"][0]["key"][:12])
    assert shown[-1].startswith("1 entries, 0.")
    assert parsed("cache", "clear") == {"directory": str(own_cache), "removed": 1}
    assert call("cache", "clear").stdout == f"removed 0 entries from {own_cache}\n"


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("run",),
        ("compile",),
        ("check",),
        ("list",),
        ("doctor",),
        ("cache",),
        ("cache", "ls"),
        ("sanitize",),
        ("watch",),
    ],
)
def test_help(command: tuple[str, ...]) -> None:
    result = call(*command, "-h")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: sandbox")


# ---- exit status 2: usage errors and unsupported problems


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("run", "fwd_minimall"),
            "sandbox: kernel 'fwd_minimall' is not known: did you mean fwd_minimal? the kernels are ",
        ),
        (("run", "--shape", "1,2,3"), "sandbox: shape '1,2,3' must be B,H,S,D or B,H,Sq,Sk,D, such as "),
        (("run", "--shape", "1,3/2,5,64"), "sandbox: H=3 query heads are not a multiple of Hk=2 key/value heads"),
        (("list", "--shape", "1,0,64,64"), "sandbox: shape '1,0,64,64': H=0: a problem has at least one query head"),
        (
            ("list", "--shape", "1,2,300,64", "--kv-dtype", "float16"),
            "Invalid value for --kv-dtype: float16 is not supported: choose float8_e4m3 or float8_e5m2, or omit it",
        ),
        (("run", "--shape", ""), "Invalid value for '--shape': '' is blank: pass a value, or omit the option"),
        (("bench", "--shape", "1,1,5,64", "--shape", " "), "Invalid value for '--shape': ' ' is blank"),
        (("tune", "fwd_minimal", "--shape", "1,1,5,64", "--dask", ""), "Invalid value for '--dask': '' is blank"),
        (("sanitize", "fwd_minimal", "--timeout", "nan"), "nan is not a number of seconds, 0 < seconds <= 1e+06"),
        (("sanitize", "fwd_minimal", "--timeout", "-5"), "-5.0 is not in the range 0<x<=1000000.0"),
        (("watch", "fwd_minimal", "--once", "--timeout", "inf"), "inf is not in the range 0<x<=1000000.0"),
        (("bench", "--seconds", "nan"), "nan is not a number of seconds, 0 < seconds <= 1e+06"),
        (("run", "--shape", "1,1,5,0"), "sandbox: D=0 must be an integer >= 1"),
        (
            ("run", "--tile", "64x32", "--shape", "1,1,5,64"),
            "sandbox: tile: '64x32' is not NAME=number, as in BLOCK_M=64",
        ),
        (
            ("compile", "--tile", "BLOCK_M=64"),
            "not compiled: fwd_minimal: tile BLOCK_M=64 lacks BLOCK_N: set all numbers, ",
        ),
        (
            ("compile", "fwd_minimal", "--shape", "1,1,1,512"),
            "not compiled: fwd_minimal: D=512 is not supported: head dimensions are at most 256",
        ),
        (
            ("compile", "--arch", "sm_80", "sm_89"),
            "sm_89 is an architecture, not a kernel: write --arch sm_80 --arch sm_89",
        ),
        (("compile", "sm_90a"), "sm_90a is an architecture, not a kernel: write --arch sm_90a"),
        (("compile", "--sweep", "--tile", "BLOCK_M=64"), "--tile is not supported with --sweep"),
        (("compile", "--jobs", "2"), "--jobs needs --sweep"),
        (("compile", "--arch", "sm_42"), 'sandbox: arch "sm_42" is not supported: choose one of sm_75'),
        (
            ("compile", "-D", "64,wide"),
            "Invalid value for --head-dim: '64,wide' must be numbers with commas between, such as 64,128",
        ),
        (
            ("run", "--dtype", "half"),
            "Invalid value for '--dtype': 'half' is not one of 'float32', 'float16', 'bfloat16'",
        ),
        (("run", "--causal=left"), "Invalid value for '--causal': 'left' is not one of 'bottom-right', 'top-left'"),
        (
            ("run", "--shape", "1,1,5,64", "--causal", "middle"),
            "--causal middle is not supported: choose bottom-right or top-left, or name a kernel: kernel 'middle'",
        ),
        (("list", "--causal", "middle"), "--causal middle is not supported: choose bottom-right or top-left\n"),
        (("run", "--shape", "1,1,8,16", "--shape", "1,1,9,16"), "--shape was given more than once: run takes one"),
        (("run", "--causal", "--causal", "top-left"), "--causal was given more than once: run takes one"),
        (("bits", "--invariant", "--default"), "--invariant/--default was given more than once: bits takes one"),
        (("list", "--guarantees", "--shape", "1,2,64,64"), "--shape is not supported with --guarantees"),
        (("bench", "fwd_minimal", "--show", __file__), "KERNEL is not supported with --show"),
        (("bench", "--show", __file__, "--grid", "paper"), "--grid is not supported with --show"),
        (("timeline", "--show", __file__, "--blocks", "99"), "--blocks is not supported with --show"),
        (("timeline", "fwd_mma", "--between", "0,9"), "--between needs --plot"),
        (("profile", "fwd_mma", "--show", "p", "--causal"), "--causal is not supported with --show"),
        (("profile", "fwd_mma", "--tile", "N=1", "--compare", "N=2", "N=3"), "--tile is not supported with --compare"),
        (("profile", "fwd_mma", "--dry-run", "--plot", "p"), "--plot is not supported with --dry-run"),
        (("sass", "fwd_mma", "--softcap", "3"), "--softcap needs --shape"),
        (("ptx", "fwd_mma", "--diff", "HEAD", "--summary"), "--summary is not supported with --diff"),
        (("tune", "fwd_mma", "--grid", "gpt2", "--causal"), "--causal needs --shape"),
        (("tune", "fwd_mma", "--grid", "gpt2", "--gpus", "0", "--backend", "cpu"), "--gpus is not supported with"),
        (("watch", "fwd_mma", "--dtype", "float32"), "--dtype needs --shape"),
        (("watch", "fwd_mma", "--history", "--once"), "--once is not supported with --history"),
        (("watch", "fwd_mma", "--diff", "1", "--json"), "--json is not supported with --diff"),
        (("bench", "append_kv", "--grid", "gpt2"), "--grid is not supported with append_kv, which computes no attent"),
        (("bench", "append_kv", "--backward"), "--backward is not supported with append_kv, which computes no attent"),
        (("bench", "append_kv", "--dtype", "float16"), "--dtype needs --shape"),
        (("ptx", "append_kv", "--causal"), "--causal is an option of attention, and append_kv computes a custom oper"),
        (("bench", "--causal"), "--causal needs --shape"),
        (("bench", "--grid", "gpt2", "--softcap", "3"), "--softcap needs --shape"),
        (("walk",), "No such command 'walk'"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("timeline", "fwd_mma"), "--trace"),
        (("timeline", "fwd_mma"), "--plot"),
        (("timeline", "fwd_mma"), "--html"),
        (("run", "fwd_minimal"), "--map"),
        (("bench",), "--out"),
        (("bench",), "--plot"),
        (("tune", "fwd_minimal", "--grid", "gpt2"), "--plot"),
        (("profile", "fwd_minimal", "--dry-run"), "--out"),
    ],
)
def test_an_output_path_below_a_file(command: tuple[str, ...], option: str, tmp_path: Path) -> None:
    """The error is reported before any work is done."""
    (tmp_path / "file").write_text("")
    result = call(*command, option, str(tmp_path / "file" / "below"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Invalid value for '{option}': {tmp_path}/file/below cannot be written: " in result.stderr


def test_a_plot_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "prefix.png").mkdir()
    options = ("--shape", "1,1,17,16", "--backend", "cpu", "--plot", str(tmp_path / "prefix"))
    result = call("timeline", "fwd_mma", *options)
    assert result.exit_code == 1
    assert result.stderr == f"sandbox: {tmp_path}/prefix.png: Is a directory\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--shape", "1,1,64,512"),
            "note fwd_minimal on B1 H1 S64 D512 float16 [cpu]: D=512 is not supported: head dimensions are at most 256",
        ),
        (
            ("--shape", "1,1,64,64", "--tile", "BLOCK_M=64"),
            "tile BLOCK_M=64 lacks BLOCK_N: set all numbers, such as BLOCK_M=",
        ),
        (
            ("--shape", "1,1,64,64", "--tile", "BLOCK_M=2048,BLOCK_N=16"),
            "BLOCK_M=2048 is too large: a block has at most 1024",
        ),
    ],
)
@pytest.mark.sampled(2)
def test_an_unsupported_problem(options: tuple[str, ...], message: str) -> None:
    result = call("run", "fwd_minimal", "--backend", "cpu", *options)
    assert result.exit_code == 2
    assert "skip" in result.stdout
    assert message in result.stdout
    (row,) = parsed("run", "fwd_minimal", "--backend", "cpu", *options)
    assert row["ok"] is None
    assert message.partition("]: ")[2] in row["message"]


# ---- exit status 1: wrong results and failures


def test_cuda_without_a_gpu() -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "sandbox", "run", "--backend", "cuda"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("sandbox: ")
    assert done.stderr.count("\n") == 1
    assert "driver" in done.stderr
    assert time.monotonic() - start < 5  # it takes a fraction of a second; a machine may be busy


def test_an_unusable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call("cache", "ls", SANDBOX_CACHE_DIR=str(tmp_path / "file"))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"sandbox: cache directory {tmp_path}/file cannot be created")


def test_a_wrong_result_and_a_source_that_does_not_compile(project_copy: Path) -> None:
    """One kernel is correct, one wrong, one does not compile; each is reported."""
    new_kernel(project_copy, "fwd_wrong")
    new_kernel(project_copy, "fwd_broken")
    wrong, broken = (project_copy / f"kernels_cu/{name}.cu" for name in ("fwd_wrong", "fwd_broken"))
    text = wrong.read_text()
    assert "head.masked_score(S_rmem[j]," in text
    wrong.write_text(text.replace("head.masked_score(S_rmem[j],", "head.masked_score(1.1f * S_rmem[j],"))
    line = broken.read_text().count("\n") + 1
    broken.write_text(broken.read_text() + "int missing = undeclared;\n")

    names = ("fwd_minimal", "fwd_wrong", "fwd_broken")
    run = ("sandbox", "run", *names, "--shape", "1,1,70,32", "--backend", "cpu")
    done = in_project(project_copy, *run, "--json")
    rows = {row["kernel"]: row for row in json.loads(done.stdout)}
    assert [rows[name]["ok"] for name in names] == [True, False, False]
    assert (done.returncode, done.stderr) == (1, "")
    assert rows["fwd_wrong"]["error"] > rows["fwd_wrong"]["bound"]

    done = in_project(project_copy, *run)
    assert done.returncode == 1
    assert "WRONG fwd_wrong on B1 H1 S70 D32 float16 [cpu]: O error " in done.stdout
    assert "FAIL fwd_broken on B1 H1 S70 D32 float16 [cpu]: " in done.stdout
    hints = [line for line in done.stdout.splitlines() if line.startswith("hint")]
    assert [line.split()[2] for line in hints] == ["fwd_wrong"]  # no hint after a compile error
    assert f"{broken}:{line}:15: error: " in done.stdout
    assert "int missing = undeclared;" in done.stdout
    assert " ^~" in done.stdout

    done = in_project(project_copy, "sandbox", "compile", *names, "--shape", "1,1,1,32")
    assert done.returncode == 1
    assert {line.split()[0] for line in done.stdout.splitlines()} >= {"kernel", "fwd_minimal", "fwd_wrong"}
    assert done.stderr.count("not compiled: ") == 1  # reported once, not per tile
    assert f'{broken}({line}): error: identifier "undeclared" is undefined' in done.stderr
    assert "  int missing = undeclared;\n                ^" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


STORE = "O.row(b, h, query_row)[d] = "
FAR = "O.row(b, h, query_row + (1ll << 40))[d] = "
RETURN = "if (query_row >= head.Sq) return;"


def edit(project: Path, name: str, old: str, new: str) -> None:
    source = project / f"kernels_cu/{name}.cu"
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new))


def test_a_crashing_kernel_does_not_stop_the_others(project_copy: Path) -> None:
    """A store far out of bounds ends the worker process; the command continues with the other kernels."""
    new_kernel(project_copy, "fwd_far")
    edit(project_copy, "fwd_far", STORE, FAR)
    options = ("--shape", "1,1,70,32", "--backend", "cpu")
    done = in_project(project_copy, "sandbox", "run", "fwd_minimal", "fwd_far", "fwd_block2d", *options, "--json")
    assert done.returncode == 1
    assert [(row["kernel"], row["ok"]) for row in json.loads(done.stdout)] == [
        ("fwd_minimal", True),
        ("fwd_far", False),
        ("fwd_block2d", True),
    ]
    done = in_project(project_copy, "sandbox", "check", "fwd_far", "--backend", "cpu")
    assert done.returncode == 1
    assert "FAIL fwd_far on " in done.stdout
    assert "its process ended: it accessed memory that is not there (SIGSEGV), while running it" in done.stdout
    assert done.stdout.count("SIGSEGV") == 1  # reported once
    assert "not tried: its process has ended 3 times already" in done.stdout
    assert "hint sanitize fwd_far --backend cpu looks for races" in done.stdout
    assert re.search(r"^fwd_far: \d+ ok, \d+ wrong or failed \(", done.stdout, re.MULTILINE)


def test_a_dtype_that_the_kernel_of_an_operation_does_not_support() -> None:
    """It is not replaced by another one."""
    shape = registry.get("append_kv_e4m3").operation.example
    done = call("run", "append_kv_e4m3", "--shape", shape, "--dtype", "float8_e5m2", "--backend", "cpu", "--json")
    assert done.exit_code == 2
    (row,) = json.loads(done.stdout)
    assert "dtype float8_e5m2 is not supported" in row["message"]


def test_wide_keys_are_latent() -> None:
    """No other kernel supports D > 256."""
    rows = parsed("list", "--shape", "B1 H16/1 S1x256 D576/512", "--arch", "sm_90a")
    assert [row["kernel"] for row in rows if row["chosen"]] == ["fwd_latent_wgmma"]


def test_a_kernel_that_does_not_end(project_copy: Path) -> None:
    """The time limit ends its process, and the command continues."""
    new_kernel(project_copy, "fwd_endless")
    edit(project_copy, "fwd_endless", RETURN, f"{RETURN} for (volatile int i = 0; i < 1;) {{}}")
    options = ("--shape", "1,1,70,32", "--backend", "cpu", "--timeout", "8", "--json")
    done = in_project(project_copy, "sandbox", "run", "fwd_endless", "fwd_minimal", *options)
    assert done.returncode == 1
    endless, minimal = json.loads(done.stdout)
    assert endless["message"] == "its process ended: did not finish within 8 s, while running it"
    assert minimal["ok"]


def test_compile_errors_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one run and for one variant, until the source changes."""
    kernel = dataclasses.replace(registry.get("fwd_minimal"), source=tmp_path / "fwd_minimal.cu")
    text = registry.get("fwd_minimal").source.read_text()
    kernel.source.write_text(text + "int missing = undeclared;\n")
    compiled = []
    run = build.host.run
    monkeypatch.setattr(build.host, "run", lambda *arguments: compiled.append(arguments) or run(*arguments))
    what = kernel, kernel.tiles[0], Problem(1, 1, 8, 8, 16, dtype="float16"), HOST
    for _ in range(3):
        with pytest.raises(CompileError, match="undeclared"):
            pipeline.load(*what)
    assert len([a for a in compiled if a[3] == kernel.source]) == 1
    kernel.source.write_text(text)
    assert pipeline.load(*what).functions


def test_rows_are_printed_immediately(project_copy: Path) -> None:
    """Also into a pipe, and while another kernel hangs; Ctrl-C ends the command."""
    new_kernel(project_copy, "fwd_endless")
    edit(project_copy, "fwd_endless", RETURN, f"while (*static_cast<volatile int*>(&group)) {{}}\n    {RETURN}")
    command = [*INTERRUPTIBLE, sys.executable, "-m", "sandbox", "run", "fwd_minimal", "fwd_endless"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen([*command, "--shape", "1,1,7,32", "--backend", "cpu"], cwd=project_copy,
                               stdout=subprocess.PIPE, text=True, env=environment)  # fmt: skip
    assert process.stdout.readline().startswith("kernel")
    assert process.stdout.readline().startswith("fwd_minimal")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 1


def test_output_of_kernels_goes_to_stderr(project_copy: Path) -> None:
    new_kernel(project_copy, "fwd_prints")
    edit(project_copy, "fwd_prints", RETURN, RETURN + ' printf("row %d\\n", query_row);')
    run = ("sandbox", "run", "fwd_prints", "--shape", "1,1,2,32", "--backend", "cpu", "--json")
    done = in_project(project_copy, *run)
    assert [row["ok"] for row in json.loads(done.stdout)] == [True]
    assert done.stderr == "row 0\nrow 1\n"


def test_a_wrong_check(monkeypatch: pytest.MonkeyPatch, short_sweep: int) -> None:
    def strict(computes: str, case: Case) -> Reference:
        expected = reference_of(computes, case)
        return Reference(
            expected.inputs, {**expected.outputs, "O": ReferenceOutput(expected.outputs["O"].values, 1e-30)}
        )

    monkeypatch.setattr(references, "reference_of", strict)
    monkeypatch.setattr(IsolatedRunner, "verify", staticmethod(check.verify))  # in this process
    shown = call("check", "fwd_minimal", "--backend", "cpu")
    assert shown.exit_code == 1
    assert "WRONG fwd_minimal on " in shown.stdout
    assert "against a bound of 1.0e-30" in shown.stdout
    monkeypatch.setattr(check, "max_error", lambda *args: float("nan"))
    assert {row["error"] for row in parsed("check", "fwd_minimal", "--backend", "cpu")} == {None}


def test_a_spec_that_is_wrong(project_copy: Path) -> None:
    (project_copy / "kernels_cu/fwd_x.py").write_text("kernel = undefined\n")
    done = in_project(project_copy, "sandbox", "list")
    assert done.returncode == 0
    assert "fwd_minimal" in done.stdout  # the other kernels still work
    assert done.stderr.count("\n") == 1
    assert "kernels_cu/fwd_x.py, line 1: NameError: name 'undefined' is not defined" in done.stderr
    done = in_project(project_copy, "sandbox", "run", "fwd_x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "NameError: name 'undefined' is not defined" in done.stderr


# ---- interrupts


SLEEPS = """
import sys, time
from sandbox import cli
from sandbox.verify import check
from sandbox.watch import session
def slow(*args, **options):
    print("ready", file=sys.stderr, flush=True)
    for _ in range(600):  # a signal just before a sleep does not interrupt it
        time.sleep(0.1)
    yield
check.sweep = session.watch = slow
cli.main()
"""


def interrupted(*command: str, **environment: str) -> tuple[int, str]:
    """Exit status and stderr of a process that receives SIGINT after it prints "ready"."""
    process = subprocess.Popen(
        [*INTERRUPTIBLE, sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    return process.returncode, stderr.strip()


def test_control_c() -> None:
    assert interrupted("-c", SLEEPS, "check", "--backend", "cpu") == (1, "Aborted!")


def test_exit_status_of_an_interrupted_watch() -> None:
    assert interrupted("-c", SLEEPS, "watch", "fwd_minimal", "--once", "--backend", "cpu") == (1, "Aborted!")
    assert interrupted("-c", SLEEPS, "watch", "fwd_minimal", "--backend", "cpu") == (0, "")


@pytest.mark.parametrize("library", ["numpy", "click"])  # imported by the package, and by the command line
def test_control_c_during_an_import(library: str, tmp_path: Path) -> None:
    slow = 'import sys, time\nprint("ready", file=sys.stderr, flush=True)\nfor _ in range(600): time.sleep(0.1)\n'
    (tmp_path / f"{library}.py").write_text(slow)
    assert interrupted("-m", "sandbox", "list", PYTHONPATH=str(tmp_path)) == (-signal.SIGINT, "")


def test_importing_the_package_keeps_the_sigint_handler() -> None:
    program = "import signal, sandbox; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    command = [*INTERRUPTIBLE, sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.sampled(4)
def test_closed_standard_streams(closed: str) -> None:
    run = "run fwd_minimal --shape 1,1,17,16 --backend cpu"
    for command, status in ((run, 0), ("run nothing", 2)):
        shell = ["sh", "-c", f'exec "$0" -m sandbox {command} {closed}', sys.executable]
        done = subprocess.run(shell, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, "Traceback" in done.stderr) == (status, False)
        assert (" ok" in done.stdout) == (command == run and closed == "2>&-")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk() -> None:
    for arguments in (("list",), ("list", "--json")):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "sandbox", *arguments]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (1, "sandbox: No space left on device\n")


@pytest.mark.parametrize("arguments", [("list",), ("list", "--json"), ("doctor",), ("cache", "ls"), ("--help",)])
@pytest.mark.sampled(4)
def test_a_closed_pipe(arguments: tuple[str, ...]) -> None:
    """As with `| head -1`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "sandbox", *arguments],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stderr == ""


# ---- tables


def test_score_expressions_are_not_parsed_as_markup(tmp_path: Path) -> None:
    """A table interprets neither markup nor emoji codes in an expression."""
    text = 'h ? x : i ? j ? x:x:x + "a[/*] [bold]"[h & 1] * 0.0f'
    (tmp_path / "score.py").write_text(f"import sandbox\nscore = sandbox.Score({text!r})\n")
    options = ("--shape", "1,2,17,16", "--score", str(tmp_path / "score.py"))
    result = call("run", "fwd_minimal", *options, "--backend", "cpu", COLUMNS="300")
    assert result.exit_code == 0, result.output
    assert f"score=({text})" in result.stdout


def test_progress_text_is_not_parsed_as_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    assert list(output.followed([1], lambda _: "x[h & 1] [/*] :x:")) == [1]
    assert "x[h & 1] [/*] :x:" in capsys.readouterr().err


PROBLEM = Problem(1, 1, 1, 1, 16)
SPILLED = Resources(168, 0, 40, 44, 48)
NAMES = ("fwd_minimal", "fwd_block2d", "bwd_block2d")
RESULTS = [
    check.Result(name, case.name, case.problem, "cuda", True, Tile(BLOCK_M=64), "sm_90a", 0.212, False,
                 Resources(255, 0, 0, 0, 0), 232448, 5.4e-3, 4.8e-2, 6e-7, -1e-3, 12.5e-3, 612.25)
    for name in NAMES for case in cases.named_cases(small=False)
]  # fmt: skip


def lines(table, width: int) -> list[str]:
    console = Console(width=width, force_terminal=False, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def test_stored_results() -> None:
    """The whole output of `run` for results of every kind, on wide and narrow terminals."""
    emulated = dataclasses.replace(RESULTS[0], backend="cpu", tflops=None, cached=True, resources=None, arch="sm_80")
    one = dataclasses.replace(RESULTS[1], seconds=None, tflops=None, smem=None, compile_seconds=None)
    wrong = dataclasses.replace(RESULTS[2], ok=False, error=1.25, lse_excess=0.5, tensor="O", sanitize=True)
    infinite = dataclasses.replace(wrong, error=float("inf"), lse_excess=None, kernel="fwd_block2d")
    fails = [
        dataclasses.replace(RESULTS[n], ok=False, error=None, bound=None, message=f"{name}: stops", sanitize=n == 1)
        for n, name in enumerate(["fwd_minimal"] * 6)
    ]
    slow = [dataclasses.replace(one, resources=each) for each in (SPILLED, Resources(40, 0, 8, 0, 0))]
    skipped = dataclasses.replace(one, ok=None, error=None, message="no such thing")
    noted = dataclasses.replace(one, message="a remark", error=4.2e-12, bound=3e12)
    found = [emulated, one, wrong, infinite, *fails, *slow, skipped, noted]
    shown: list[str] = []
    for width in (60, 80, 117, 118, 140):
        shown += printed(width, report.results_table(found, width), report.results_table(found[:2], width, head=False))
        shown += printed(width, report.results_table(found[:1], width, expected=found))
    shown += printed(
        300, *report.notes(found), *report.notes(found[1:4]), *report.failures(found), *report.hints(found)
    )
    shown += [report.counts(found), report.counts(found[:3]), report.kib(None), report.kib(1000)]
    check_stored("cli/results.txt", shown)


def test_results_take_one_line_per_case_at_120_columns() -> None:
    shown = lines(report.results_table(RESULTS, 120), 120)
    assert len(shown) == 1 + len(RESULTS)
    assert shown[0].split() == [
        "kernel",
        "case",
        "problem",
        "regs",
        "smem",
        "compile",
        "error",
        "<=",
        "bound",
        "time",
        "TFLOP/s",
    ]
    for result, line in zip(RESULTS, shown[1:], strict=True):
        assert str(result.problem) in line
        for text in (result.kernel, " 255 ", "227 KiB", "212 ms", "5.4e-3 <= 4.8e-2", "12.5 ms", "612.25", "ok"):
            assert text in line


def test_a_long_name_leaves_room_for_the_results() -> None:
    """Of a case that is expected later, such as the sizes of append_kv."""
    long = dataclasses.replace(RESULTS[0], case="N=1 " * 22)
    for line in lines(report.results_table(RESULTS[:1], 200, expected=[*RESULTS, long]), 200)[1:]:
        assert line.split()[-1] == "ok"


def test_results_fold_at_80_columns() -> None:
    shown = lines(report.results_table(RESULTS, 80), 80)
    assert max(map(len, shown)) <= 80
    assert len(shown) == 2 + 2 * len(RESULTS)
    assert shown[2].split() == ["fwd_minimal", "gpt2", "255", "212", "ms", "5.4e-3", "12.5", "ms", "ok"]
    assert shown[3].split()[-4:] == ["KiB", "<=", "4.8e-2", "612.25"]


@pytest.mark.parametrize("width", [80, 120])
def test_costs(width: int) -> None:
    problem = Problem(1, 1, 1, 1, 128, dtype="bfloat16", causal="bottom-right")
    cost = costs.Cost("bwd_block2d", problem, Tile(BLOCK_M=128, BLOCK_N=128), "sm_100a", True, SPILLED, 98304,
                      Occupancy(2, 0.125, "shared memory"), 0.5, False)  # fmt: skip
    shown = "\n".join(lines(costs.compiled_table([cost], width), width))
    assert max(map(len, shown.splitlines())) <= width
    words = "bwd_block2d D128 bfloat16 causal sm_100a 96 KiB 12% 500 ms BLOCK_M=128"
    assert set(words.split()) <= set(shown.replace(",", " ").split())
    assert " 168 +92 " in shown  # 44 B of stores, 48 B of loads
    assert "bytes of spill stores and loads" in shown


@pytest.mark.parametrize(
    "command", [("list",), ("doctor",), ("run", "fwd_minimal", "--shape", "1,1,70,64", "--backend", "cpu")]
)
def test_columns_and_no_color_are_respected(command: tuple[str, ...]) -> None:
    shown = call(*command, COLUMNS="80", NO_COLOR="1").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown


def test_a_shared_reason_is_reported_once() -> None:
    same = [
        check.Result("k", f"case {i}", PROBLEM, "cpu", False, message=f"refused\n\nx.cu:1: error\n\noptions: -D{i}")
        for i in range(6)
    ]
    (text,) = report.failures(same)
    assert text.plain == (
        "FAIL k on case 0, case 1, case 2, case 3 and 2 more [cpu]: refused\n\nx.cu:1: error\n\noptions: -D0"
    )


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0.0, "0 µs"), (2.5e-7, "0.25 µs"), (0.0000127, "12.7 µs"), (0.00999, "9.99 ms"), (0.2012, "201 ms"),
     (0.99961, "1 s"), (75.0, "75 s"), (999.7, "1000 s"), (1234.0, "1234 s"), (9.996e-4, "1 ms")],
)  # fmt: skip
def test_times(seconds: float | None, shown: str) -> None:
    assert report.si_time(seconds) == shown
