"""The command profile: one launch under Nsight Compute, compared with the IO model."""

__all__ = ["plot", "profiler", "report"]
