"""What everything else speaks of: problem, tile, kernel and their registry, errors, the log, JSON lines."""

__all__ = [
    "batches",
    "block_map",
    "dtypes",
    "errors",
    "files",
    "integers",
    "interrupts",
    "jsonl",
    "kernel",
    "log",
    "normalise",
    "options",
    "picture",
    "place",
    "problem",
    "refusals",
    "registry",
    "score",
    "snippet",
    "tile",
]
