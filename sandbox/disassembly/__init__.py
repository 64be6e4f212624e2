"""The commands compile, sass and ptx: resource usage of tiles; machine code and PTX by source line."""

__all__ = ["costs", "listing", "report", "sweep"]
