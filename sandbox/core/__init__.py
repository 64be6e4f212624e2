"""Problem, tile, kernel and registry, score options, errors, logging, JSON lines."""

__all__ = [
    "block_map",
    "dtypes",
    "errors",
    "files",
    "interrupts",
    "jsonl",
    "kernel",
    "log",
    "normalise",
    "options",
    "picture",
    "problem",
    "process",
    "registry",
    "score",
    "score_errors",
    "snippet",
    "source_line",
    "tile",
    "unsupported",
]
