"""The command tune: a search for the fastest tile of a kernel, and the executors that measure tiles."""

__all__ = ["executors", "report", "search"]
