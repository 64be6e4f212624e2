"""Processes for work that may crash or hang: a worker, and a fleet of them."""

__all__ = ["fleet", "worker"]
