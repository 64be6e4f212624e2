"""Ctrl-C while the command line is still being imported: the process ends without a traceback.

`sandbox` imports this module before anything else, and `cli.main` calls `restore`.
"""

from __future__ import annotations

import os
import sys


def _is_command() -> bool:
    """Whether this process is `python -m sandbox` or the script `sandbox`, not a program that imports the package."""
    if sys.argv[:1] == ["-m"]:  # while runpy looks for the module
        options = sys.orig_argv
        return options[options.index("-m") + 1 :][:1] == ["sandbox"] if "-m" in options else False
    return sys.argv[:1] == [os.path.join(os.path.dirname(sys.executable), "sandbox")]


_default = False
if _is_command():
    import signal  # slow to import for a program that does not need it

    _default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def restore() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again, as Python has it."""
    if _default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
