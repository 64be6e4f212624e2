"""The command bench: timing, peers, rows, table, plot and ladder."""

__all__ = ["benchmark", "environment", "inputs", "peers", "plot", "report", "rows", "timing"]
