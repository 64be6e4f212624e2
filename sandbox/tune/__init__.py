"""The verb tune: a search among a kernel's tiles, and the labs where it measures."""

__all__ = ["executors", "report", "search"]
