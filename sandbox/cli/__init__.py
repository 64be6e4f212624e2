"""`python -m sandbox …`: parses and prints, nothing else. A command, or a few that belong together, is a module.

Exit status: 0 when all is well, 1 when a result is wrong or something fails, a kernel that crashes among them, 2 for a
usage error or an unsupported problem.
"""

import importlib
import pkgutil

from .group import cli, main

for _module in pkgutil.iter_modules(__path__):  # each joins its commands to the group
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["cli", "main"]
