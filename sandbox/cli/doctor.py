"""`doctor`: what this machine has."""

from __future__ import annotations

import sys

from ..scaffold import doctor, report
from .group import cli
from .options import json_option
from .output import print_json, screen


@cli.command("doctor")
@json_option
def doctor_(as_json: bool) -> None:
    """What this machine has, what is missing, and how to get it."""
    findings = doctor.examine()
    if as_json:
        print_json(findings)
    else:
        screen().print(report.doctor_table(findings))
    sys.exit(int(any(f.required and not f.ok for f in findings)))
