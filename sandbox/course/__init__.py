"""The command course: kernels with a planted fault, to be found with the tools."""

__all__ = ["faults"]
