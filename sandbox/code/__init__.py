"""The verbs sass and ptx: machine code by source line, counted and compared."""

__all__ = ["costs", "listing", "report"]
