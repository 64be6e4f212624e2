"""`python -m sandbox …`: parses and prints, nothing else. A command, or a few that belong together, is a module.

Exit status: 0 when all is well, 1 when a result is wrong or something fails, 2 for a usage error or an unsupported
problem.
"""

from . import bench, cache, compile, doctor, listing, sanitize, verify, watch  # each joins its commands to the group
from .group import cli, main

__all__ = ["bench", "cache", "cli", "compile", "doctor", "listing", "main", "sanitize", "verify", "watch"]
