"""The verb profile: one launch under Nsight Compute, beside what the work had to cost."""

__all__ = ["plot", "profiler", "report"]
