"""Kernel, tile and problem -> compiled, packed and launched, on either backend."""

__all__ = ["choose", "pipeline", "spills", "staging", "tuned"]
