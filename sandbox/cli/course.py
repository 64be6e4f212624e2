"""`course`: kernels with a planted fault, to be found with the tools."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ..core import registry
from ..core.errors import SpecError
from ..core.kernel import Kernel
from ..course import faults
from ..launch.dlpack import HOST
from ..verify import check as checking
from ..verify import report, sanitize
from ..verify.isolated import IsolatedRunner
from ..watch.job import quick_cases
from .group import cli
from .options import json_option
from .output import print_json, say


@cli.group("course")
def course_() -> None:
    """Exercises: find the faults planted in copies of three kernels, with watch, run, check and sanitize."""


@course_.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the faults: number, kernel, topic."""
    if as_json:
        print_json([{"number": f.number, "kernel": f.kernel, "topic": f.topic} for f in faults.every().values()])
        return
    for fault in faults.every().values():
        click.echo(f"{fault.number:2}  {fault.kernel:12}  {fault.topic}")


@course_.command("start")
@click.argument("number", type=int)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@json_option
def start(number: int, folder: Path, as_json: bool) -> None:
    """Copy the faulty kernel NUMBER and its spec to FOLDER."""
    files = faults.start(number, folder)
    if as_json:
        print_json({"files": files})
        return
    for file in files:
        click.echo(file)
    name = faults.get(number).name
    say(f"find the fault: SANDBOX_KERNELS={folder} python -m sandbox watch {name}", stderr=True)
    say(f"then: python -m sandbox course check {number} {files[0]}", stderr=True)


@course_.command("check")
@click.argument("number", type=int)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
def check_(number: int, file: Path, as_json: bool) -> None:
    """Test FILE, the corrected .cu of fault NUMBER.

    Runs the small problems that `watch` uses by default, then the sanitizers, on the CPU backend.
    """
    name = faults.get(number).name
    if file.name != f"{name}.cu":
        raise SpecError(
            f"{file} is not the file of fault {number}: pass {name}.cu, which `course start {number} FOLDER` writes"
        )
    registry.add(file.parent)
    wrong = list(_wrong(registry.get(name)))
    if as_json:
        print_json({"correct": not wrong, "wrong": wrong})
    else:
        for text in wrong or ["correct"]:
            say(text)
    sys.exit(1 if wrong else 0)


def _wrong(kernel: Kernel) -> Iterator[str]:
    """What is still wrong: the failures of the first tool that has some."""
    with IsolatedRunner(lambda printed: click.echo(printed, err=True, nl=False)) as runner:
        runs = [(kernel, case) for case in quick_cases(kernel, HOST)]
        results = list(checking.run_cases(runs, HOST, None, runner.verify))
    if any(not r.ok for r in results):
        yield from (text.plain for text in report.failures(results))
        return
    for inspection in sanitize.inspect(kernel, HOST):
        for finding in inspection.findings:
            yield f"{inspection.tool}: {finding.what}"
        if inspection.findings:
            return


@course_.command("solution")
@click.argument("number", type=int)
@json_option
def solution(number: int, as_json: bool) -> None:
    """Print what is wrong in fault NUMBER, and the change that corrects it."""
    said = faults.solution(number)
    if as_json:
        print_json({"solution": said})
    else:
        click.echo(said, nl=False)
