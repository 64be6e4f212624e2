"""The verb bench: timing, peers, rows, their table, plot and ladder."""

__all__ = ["benchmark", "environment", "inputs", "peers", "plot", "report", "rows", "timing"]
