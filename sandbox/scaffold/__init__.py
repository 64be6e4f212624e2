"""The commands doctor and new: a check of this machine, and templates for kernels and experiments."""

__all__ = ["doctor", "new", "report"]
