"""Processes for work that may crash or hang: a worker, a fleet of them, a cluster of machines."""

__all__ = ["distributed", "pool", "worker"]
