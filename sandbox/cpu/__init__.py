"""The CPU backend: the same `.cu` file, compiled by the host C++ compiler, one fiber per CUDA thread.

`compiler` finds a host compiler, `build` compiles libraries, `launch` runs them, `instrumented` runs them under a
sanitizer, `expressions` evaluates the expressions of a `Score`.
"""

__all__ = ["build", "compiler", "expressions", "instrumented", "launch"]
