"""`doctor`: the software and hardware of this machine."""

from __future__ import annotations

import sys

from ..scaffold import doctor, report
from .group import cli
from .options import json_option
from .output import print_json, screen


@cli.command("doctor")
@json_option
def doctor_(as_json: bool) -> None:
    """Check driver, GPU, NVRTC, compilers and tools of this machine.

    Says how to install what is missing.
    """
    findings = doctor.examine()
    if as_json:
        print_json(findings)
    else:
        screen().print(report.doctor_table(findings))
        screen().print("\n".join(doctor.READERS), highlight=False)
    sys.exit(int(any(f.required and not f.ok for f in findings)))
