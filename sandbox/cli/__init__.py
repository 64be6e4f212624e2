"""`python -m sandbox …`: argument parsing and printing only. One module per command or group of related commands.

Exit status: 0 on success, 1 when a result is wrong or something fails (a kernel that crashes, for example), 2 for a
usage error or an unsupported problem.
"""

import importlib
import pkgutil

from .group import cli, main

for _module in pkgutil.iter_modules(__path__):  # each module adds its commands to the group
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["cli", "main"]
