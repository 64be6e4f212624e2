"""The verb bench: timing, peers, rows, their table, plot and ladder."""

__all__ = ["contest", "environment", "given", "peers", "plot", "report", "rows", "timing"]
