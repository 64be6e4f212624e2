"""Kernel, tile and problem -> compiled, arguments packed, launched, on either backend."""

__all__ = ["choose", "pipeline", "spills", "staging", "tuned"]
