"""The exceptions of this package.

Every message names the call, the offending value and an alternative. Library code raises; only `cli` prints and exits.
"""

from __future__ import annotations


class SandboxError(Exception):
    """Base of every exception that this package raises on purpose."""


class UnsupportedProblem(SandboxError, ValueError):
    """The arguments do not make an attention call that the kernel (or any kernel) can take."""


class SpecError(SandboxError, ValueError):
    """A kernel's spec, a tile or a problem contradicts itself."""


class UnknownKernel(SandboxError, LookupError):
    """No kernel of that name in the kernels folder."""


class CacheError(SandboxError, OSError):
    """The cache directory cannot be used."""


class HistoryError(SandboxError, LookupError):
    """A version that the history does not have, or a history that cannot be written."""


class ToolchainMissing(SandboxError, RuntimeError):
    """NVRTC, the CUDA headers or a host compiler is missing or does not fit; the message says how to get it."""


class GpuUnavailable(SandboxError, RuntimeError):
    """No usable GPU: no driver, no device, or a driver too old; the message says which."""


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
    """A kernel cannot be compiled by the fast compilation, which is for first verdicts; the message says why."""


class DriverError(SandboxError, RuntimeError):
    """A CUDA driver call failed. `code` is the CUresult's number, `name` its name."""

    def __init__(self, message: str, *, code: int, name: str):
        super().__init__(message)
        self.code, self.name = code, name


class LaunchError(SandboxError, RuntimeError):
    """A kernel misbehaved on the CPU backend: a barrier not reached, mismatched warp collectives, a trap."""
