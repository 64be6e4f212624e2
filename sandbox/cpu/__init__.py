"""The CPU backend: the same `.cu` file, compiled by the host C++ compiler, every CUDA thread a fiber.

`compiler` finds a host compiler, `build` makes libraries, `launch` runs them, `sanitize` runs them under a sanitizer.
"""
