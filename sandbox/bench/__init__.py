"""The command bench: timing, peers, rows, table, plot and ladder."""

__all__ = [
    "benchmark",
    "environment",
    "inputs",
    "operations",
    "peers",
    "plot",
    "report",
    "rows",
    "sampled_shapes",
    "timing",
]
