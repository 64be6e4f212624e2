"""The command timeline: the steps of each warp of a launch over time, from marks that are compiled in on request."""

__all__ = ["plot", "record", "recording", "report", "trace"]
