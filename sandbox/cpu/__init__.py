"""The CPU backend: the same `.cu` file, compiled by the host C++ compiler, every CUDA thread a fiber.

`compiler` finds a host compiler, `build` makes libraries, `launch` runs them, `instrumented` does under a sanitizer;
`expressions` evaluates a user's score.
"""

__all__ = ["build", "compiler", "expressions", "instrumented", "launch"]
