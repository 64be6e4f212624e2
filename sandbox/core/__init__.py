"""What everything else speaks of: problem, tile, kernel and their registry, errors, the log, JSON lines."""

__all__ = ["errors", "integers", "jsonl", "kernel", "log", "picture", "place", "problem", "registry", "score", "tile"]
