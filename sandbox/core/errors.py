"""The exceptions of this package.

A message states what is not supported, the value, the reason and the alternative. Library code raises; only `cli`
prints and exits.
"""

from __future__ import annotations


class SandboxError(Exception):
    """Base of every exception that this package raises on purpose."""


class UnsupportedProblem(SandboxError, ValueError):
    """Arguments that the named kernel, or any kernel, does not support."""


class SpecError(SandboxError, ValueError):
    """A spec or another file of the user has an error; or a tile, a problem or an option has an invalid value, or
    values that contradict each other."""


class UnknownKernel(SandboxError, LookupError):
    """No kernel of that name in the kernels folder."""


class CacheError(SandboxError, OSError):
    """The cache directory cannot be used."""


class HistoryError(SandboxError, LookupError):
    """A version of a kernel that `watch` has not recorded, or a history of versions that cannot be written."""


class ToolchainMissing(SandboxError, RuntimeError):
    """A compiler, CUDA headers, an NVIDIA tool or an optional Python package is missing, fails, or has an unsuitable
    version. The message says what to install, or has the output of the tool."""


class GpuUnavailable(SandboxError, RuntimeError):
    """No usable GPU: the message gives the reason, such as no driver, no device, or a driver that does not start."""


class CompileError(SandboxError, RuntimeError):
    """A compiler refused the source. The message ends with the compiler's options, as `without_options` expects.

    Attributes: `source` (path of the `.cu`), `options` (what the compiler was given), `log` (all it said).
    """

    def __init__(self, message: str, *, source: str, options: tuple[str, ...], log: str):
        super().__init__(message)
        self.source, self.options, self.log = source, options, log


def without_options(message: str) -> str:
    """The message without the compiler's options, in which otherwise equal messages may differ."""
    return message.partition("\n\noptions: ")[0]


class NoFastCompilation(SandboxError, RuntimeError):
    """`nvrtc.compile_fast` does not support a kernel, or its result cannot be launched; the message says why."""


class DriverError(SandboxError, RuntimeError):
    """A CUDA driver call failed. `code` is the CUresult's number, `name` its name."""

    def __init__(self, message: str, *, code: int, name: str):
        super().__init__(message)
        self.code, self.name = code, name


class LaunchError(SandboxError, RuntimeError):
    """A kernel failed on the CPU backend: a barrier or warp collective that some threads do not reach, or a trap. Also
    invalid offsets, lengths or page numbers in host arrays, which are found before the launch."""
