"""The verbs compile, sass and ptx: what tiles cost, and machine code by source line, counted and compared."""

__all__ = ["costs", "listing", "report"]
