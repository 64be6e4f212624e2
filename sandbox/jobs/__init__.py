"""Subprocesses for work that may crash or hang: a worker, a worker pool, and a pool on a Dask cluster."""

__all__ = ["distributed", "pool", "worker"]
