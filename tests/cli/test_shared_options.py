"""Options that commands share, and their output: the functions, without a command of the project."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.table import Table

from sandbox.cli import group, options, output
from sandbox.core import registry
from sandbox.core.errors import GpuUnavailable, SpecError
from sandbox.launch.dlpack import HOST
from sandbox.spec import Problem, Tile

FORWARD, BACKWARD, CUSTOM = (registry.get(name) for name in ("fwd_minimal", "bwd_minimal", "append_kv"))
NONE = dict.fromkeys(options.SCORE_NAMES)


def run(body: Callable[..., Any], arguments: list[str], *params: Callable[..., Any]) -> Result:
    """The result of a command that calls `body`."""
    command: Any = body
    for param in reversed(params):
        command = param(command)
    return CliRunner().invoke(click.command(name="mine", cls=group._Command)(command), arguments)


def printed(body: Callable[..., Any], arguments: list[str], *params: Callable[..., Any]) -> str:
    """The output of a command that prints the result of `body`, or its usage error."""
    result = run(lambda **given: click.echo(repr(body(**given))), arguments, *params)
    return (result.stdout or result.stderr).strip().removeprefix("Usage: mine").rpartition("Error: ")[2].strip()


# ---- problems


def test_a_problem_of_the_options() -> None:
    def problem(shape: str = "2,4,7,9,64", dtype: str = "float16", causal: str | None = None, **scored: Any) -> Problem:
        return options.problem_of(shape, dtype, causal, {**NONE, **{n.replace("_", "-"): x for n, x in scored.items()}})

    assert problem() == Problem(2, 4, 7, 9, 64, dtype="float16")
    assert problem(causal="top-left", softcap=2.0) == Problem(
        2, 4, 7, 9, 64, dtype="float16", causal="top-left", softcap=2.0
    )
    for text, window in (("3,0", (3, 0)), ("none,0", (None, 0)), (" 3 , none ", (3, None)), (",2", (None, 2))):
        assert problem(window=text).window == window
    for text in ("3", "3,0,1", "-1,0", "3,x", "1.5,0"):
        with pytest.raises(click.BadParameter, match=rf"^'{text}' must be L,R: numbers of keys, or none") as caught:
            problem(window=text)
        assert caught.value.param_hint == "--window"
    assert problem(kv_dtype="float8_e4m3fn").kv_dtype == problem(kv_dtype="float8_e4m3").kv_dtype == "float8_e4m3"
    with pytest.raises(click.BadParameter, match=r"^bfloat16 is not supported: choose float8_e4m3 or float8_e5m2, or"):
        problem(kv_dtype="bfloat16")


def test_a_problem_of_several_kernels() -> None:
    latent = [kernel for kernel in registry.kernels().values() if kernel.latent]
    shape = "1,2,1,64,576"
    assert latent
    assert options.problem_for(latent, shape, "bfloat16", None, NONE).latent
    assert not options.problem_for([*latent, FORWARD], shape, "bfloat16", None, NONE).latent
    assert not options.problem_for([], shape, "bfloat16", None, NONE).latent
    with pytest.raises(click.UsageError, match=r"^--shape has different meanings for append_kv and attention: name "):
        options.problem_for([FORWARD, CUSTOM], shape, "bfloat16", None, NONE)
    assert options.of_attention([CUSTOM, FORWARD, BACKWARD]) == [FORWARD, BACKWARD]
    assert [kernel.name for kernel in options.chosen_kernels(("bwd_minimal", "fwd_minimal"))] == [
        "bwd_minimal",
        "fwd_minimal",
    ]
    assert options.chosen_kernels(()) == [*registry.kernels().values()]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], "default"),
        (["--dtype", "bfloat16"], "default in bfloat16"),
        (["--shape", "2,4,8,8,64"], "of the shape"),
        (["--shape", "2,4,8,8,64", "--dtype", "bfloat16"], "of the shape in bfloat16"),
    ],
)
def test_the_default_problem_of_an_operation(arguments: list[str], found: str) -> None:
    """The first of `watch`. Its dtype is that of the option only if it is on the command line."""
    operation = CUSTOM.operation
    if "--shape" in arguments:
        arguments = ["--shape", operation.example, *arguments[2:]]
    seen: list[Any] = []

    def body(shape: str, dtype: str) -> None:
        seen.append(options.problem_or_default(CUSTOM, shape, dtype, None, NONE, HOST))
        seen.append(options.problem_or_default(FORWARD, "1,2,3,4,8", dtype, "top-left", NONE, HOST))

    result = run(body, arguments, options.shape_option(default="1,1,8,8"), options.dtype_option)
    assert result.exit_code == 0, result.output
    first = options.suite_of(CUSTOM).quick_cases(CUSTOM, HOST)[0].problem
    assert seen[0].dtype == ("bfloat16" if "bfloat16" in found else first.dtype)
    sizes = first.sizes if found.startswith("default") else operation.problem(operation.example, "float16").sizes
    assert seen[0].sizes == sizes
    assert seen[1] == Problem(1, 2, 3, 4, 8, dtype=seen[1].dtype, causal="top-left")


@pytest.mark.parametrize(("causal", "scored", "name"), [("top-left", {}, "causal"), (None, {"sink": True}, "sink")])
def test_an_operation_has_no_options_of_attention(causal: str | None, scored: dict[str, Any], name: str) -> None:
    said = f"^--{name} is an option of attention, and append_kv computes a custom operation: omit it$"
    for decide in (
        lambda: options.problem_for([CUSTOM], "1", "float16", causal, {**NONE, **scored}),
        lambda: options.problem_or_default(CUSTOM, "1", "float16", causal, {**NONE, **scored}, HOST),
    ):
        with click.Context(click.Command("mine")), pytest.raises(click.UsageError, match=said):
            decide()


# ---- values


def test_the_path_of_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a .cu with its spec. Its folder is added to those with kernels."""
    spec, source = (FORWARD.source.with_suffix(suffix).read_text() for suffix in (".py", ".cu"))
    (tmp_path / "mine.cu").write_text(source)
    (tmp_path / "alone.py").write_text("")
    monkeypatch.setenv(registry.VARIABLE, "")
    found = lambda *names: printed(lambda kernels: kernels, [*names], options.kernels_argument)  # noqa: E731
    says = "does not exist: a kernel is a .cu with its spec, a .py, beside it"
    assert f"{tmp_path}/mine.py {says}" in " ".join(found(f"{tmp_path}/mine.cu").split())
    assert f"{tmp_path}/alone.cu {says}" in " ".join(found(f"{tmp_path}/alone.cu").split())
    (tmp_path / "mine.py").write_text(spec.replace('"fwd_minimal"', '"fwd_mine"'))
    try:
        assert found(f"{tmp_path}/mine.cu", "fwd_minimal") == "('fwd_mine', 'fwd_minimal')"
        (tmp_path / "mine.py").write_text(spec.replace('"fwd_minimal"', '"mine"'))
        registry.forget()
        assert found(f"{tmp_path}/mine.cu") == "('mine',)"
        assert found() == "()"
        assert printed(lambda kernel: kernel, [], options.optional_kernel_argument) == "None"
    finally:
        monkeypatch.delenv(registry.VARIABLE)
        registry.forget()


def test_kernel_names_are_completed() -> None:
    context, param = click.Context(click.Command("mine")), click.Argument(["kernel"])
    assert options.kernel_names(context, param, "bwd_mini") == ["bwd_minimal"]
    assert options.entry_names(context, param, "bwd_minimal_") == [e.name for e in BACKWARD.entries[1:]]
    assert options.kernel_names(context, param, "bwd_minimal_") == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("0.5", 0.5), ("1e6", 1e6), ("0", None), ("-1", None), ("1000001", None), ("nan", None)]
)
def test_a_time_limit(text: str, seconds: float | None) -> None:
    found = printed(lambda timeout: timeout, ["--timeout", text], options.timeout_option(3.0, "Limit."))
    assert found == repr(seconds) if seconds else found.startswith("Invalid value for '--timeout': ")
    assert printed(lambda timeout: timeout, [], options.timeout_option(3.0, "Limit.")) == "3.0"


def test_numbers_and_tiles() -> None:
    assert options.numbers("1, 20,3", "--repeat", "1,2") == [1, 20, 3]
    for text in ("", "1,,2", "1,-2", "x"):
        with pytest.raises(
            click.BadParameter, match=f"^'{text}' must be numbers with commas between, such as 1,2"
        ) as e:
            options.numbers(text, "--repeat", "1,2")
        assert e.value.param_hint == "--repeat"
    assert options.parsed_tile("BLOCK_M=64") == Tile(BLOCK_M=64)
    assert options.parsed_tile(None) is options.parsed_tile("") is None
    dtypes = [printed(lambda dtype: dtype, ["--dtype", n], options.dtype_option) for n in ("float8_e4m3fn", "float32")]
    assert dtypes == ["'float8_e4m3'", "'float32'"]


def test_a_path_below_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    page = lambda path: printed(lambda html: html, ["--html", str(path)], options.html_option)  # noqa: E731
    assert page(tmp_path / "new" / "folder" / "page") == repr(tmp_path / "new" / "folder" / "page")
    assert page(file / "page").endswith(f"{file}/page cannot be written: {file} is a file, not a folder")
    assert "is a directory" in page(tmp_path)


PARAMS = (
    click.argument("kernel", required=False),
    click.option("--plot", "-p", "plot"),
    click.option("--dry-run", is_flag=True),
    click.option("--repeat", multiple=True),
)


@pytest.mark.parametrize(
    ("check", "arguments", "said"),
    [
        (lambda: options.given_without("--plot", "dry-run"), ["--dry-run"], "--dry-run needs --plot"),
        (lambda: options.given_without("--plot", "dry-run", "repeat"), ["--repeat", "1"], "--repeat needs --plot"),
        (lambda: options.given_without("--plot", "dry-run"), ["--repeat", "1"], "None"),
        (lambda: options.excluding("--all", "plot", "kernel"), ["-p", "x"], "--plot is not supported with --all"),
        (lambda: options.excluding("--all", "plot", "kernel"), ["k"], "KERNEL is not supported with --all"),
        (lambda: options.excluding("--all", "plot"), ["k", "--dry-run"], "None"),
        (lambda: options.alone("--plot", "plot", "dry_run"), ["-p", "x", "--dry-run"], "None"),
        (lambda: options.alone("--plot", "plot"), ["-p", "x", "--dry-run"], "--dry-run is not supported with --plot"),
        (lambda: options.alone("--plot", "plot"), ["-p", "x", "k"], "KERNEL is not supported with --plot"),
    ],
)
def test_options_that_need_or_exclude_others(check: Callable[[], None], arguments: list[str], said: str) -> None:
    assert printed(lambda **given: check(), arguments, *PARAMS) == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--causal"], "('bottom-right', ())"),
        (["--causal", "top-left", "fwd_minimal"], "('top-left', ('fwd_minimal',))"),
        (["--causal", "fwd_minimal"], "('bottom-right', ('fwd_minimal',))"),
        (["--causal", "--", "top-left"], "('bottom-right', ('top-left',))"),
        (["--", "--causal"], "(None, ('--causal',))"),
        (["fwd_minimal"], "(None, ('fwd_minimal',))"),
    ],
)
def test_an_option_whose_value_may_be_omitted(arguments: list[str], said: str) -> None:
    found = printed(
        lambda causal, kernels: (causal, kernels), arguments, options.causal_option, options.kernels_argument
    )
    assert found == said


def test_a_value_that_is_blank_or_given_twice() -> None:
    given = lambda *arguments: printed(lambda **found: found, [*arguments], *PARAMS)  # noqa: E731
    assert given("-p", "x", "--plot", "y") == "--plot was given more than once: mine takes one"
    assert given("--plot", " ").endswith("' ' is blank: pass a value, or omit the option")
    assert given("--repeat", "").endswith("'' is blank: pass a value, or omit the option")
    assert given("").endswith("'' is blank: pass a value, or omit the option")
    assert given("--repeat", "1", "--repeat", "2", "--dry-run", "--dry-run") == (
        "{'repeat': ('1', '2'), 'dry_run': True, 'kernel': None, 'plot': None}"
    )


# ---- output


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [([], 2), ([None], 2), ([True, None], 0), ([True, True], 0), ([True, False, None], 1), ([False], 1)],
)
def test_the_exit_status_of_verdicts(verdicts: list[bool | None], status: int) -> None:
    assert output.exit_status(iter(verdicts)) == status


@dataclasses.dataclass
class Row:
    name: str
    values: tuple[float, ...]
    hidden: int = dataclasses.field(default=0, repr=False)


def test_values_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """NaN and infinity are null; fields without repr are left out; what JSON has no type for is text."""
    row = Row("a", (1.5, math.nan, -math.inf))
    assert output.plain(row) == {"name": "a", "values": [1.5, None, None]}
    assert output.plain({1: [row.name, True, None], "path": Path("/p")}) == {"1": ["a", True, None], "path": "/p"}
    assert output.plain(np.float32) == "<class 'numpy.float32'>"
    problem = Problem(1, 2, 3, 4, 8)
    assert output.plain([problem]) == [problem.as_json()]
    assert list(output.print_json_rows([row, "b"])) == [row, "b"]
    text = capsys.readouterr().out
    assert json.loads(text) == [{"name": "a", "values": [1.5, None, None]}, "b"]
    assert text.startswith('[\n  {\n    "name": "a"')
    assert text.endswith(',\n  "b"\n]\n')
    assert list(output.print_json_rows([])) == []
    assert capsys.readouterr().out == "[]\n"
    output.print_json({"a": math.nan})
    assert capsys.readouterr().out == '{\n  "a": null\n}\n'


def test_rows_are_printed_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = output.print_json_rows(iter([1, 2]))
    assert (next(rows), capsys.readouterr().out) == (1, "[\n  1")
    assert (next(rows), capsys.readouterr().out) == (2, ",\n  2")


def test_results_are_followed() -> None:
    """Each is described once, and passed on; with or without a number of all."""
    described: list[int] = []
    for total in (None, 2):
        assert list(output.followed(iter([3, 4]), lambda n: described.append(n) or str(n), total)) == [3, 4]
    assert described == [3, 4, 3, 4]


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output.save_page(tmp_path / "page.html", "<p>")
    assert (tmp_path / "page.html").read_text() == "<p>"
    assert capsys.readouterr().err == f"wrote {tmp_path}/page.html\n"
    (tmp_path / "folder").mkdir()
    with pytest.raises(click.FileError) as caught:
        output.save_page(tmp_path / "folder", "<p>")
    assert caught.value.format_message() == f"Could not open file '{tmp_path}/folder': Is a directory"


@pytest.mark.parametrize(("on_terminal", "columns", "width"), [(False, "", 200), (False, "x", 200), (False, "90", 90)])
def test_the_width_of_tables(on_terminal: bool, columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert output.screen().width == width


@pytest.mark.parametrize("columns", [30, 200])
def test_a_wide_table_is_printed_in_parts(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty line after each, and the caption once, at the end."""
    monkeypatch.setenv("COLUMNS", str(columns))
    table = Table(*(f"column {n}" for n in range(4)), caption="about it")
    table.add_row(*(f"value {n}" for n in range(4)))
    output.show_table(table)
    text = capsys.readouterr().out
    assert text.count("about it") == 1
    assert text.rstrip().endswith("about it")
    assert all(f"column {n}" in text and f"value {n}" in text for n in range(4))
    assert ("\n\n" in text) == (columns == 30)


def test_closed_streams_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    error = sys.stderr
    output.open_standard_streams()
    streams = sys.stdin, sys.stdout
    assert [(stream.name, stream.mode) for stream in streams] == [(os.devnull, "r"), (os.devnull, "w")]
    assert all(os.get_inheritable(stream.fileno()) for stream in streams)
    assert sys.stderr is error
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (SpecError("wrong"), 2, "sandbox: wrong\n"),
        (GpuUnavailable("none"), 1, "sandbox: none\n"),
        (OSError(28, "No space left", "/p/x"), 1, "sandbox: /p/x: No space left\n"),
        (OSError(28, "No space left"), 1, "sandbox: No space left\n"),
        (OSError("odd"), 1, "sandbox: odd\n"),
    ],
)
def test_the_exit_status_of_errors(error: Exception, status: int, said: str) -> None:
    @click.group(cls=group._Commands)
    def mine() -> None:
        pass

    @mine.command()
    def fails() -> None:
        raise error

    result = CliRunner().invoke(mine, ["fails"])
    assert (result.exit_code, result.stderr, result.stdout) == (status, said, "")
