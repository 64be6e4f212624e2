"""The verb timeline: what each warp of a launch does when, by marks in the kernel that are compiled in on request."""

__all__ = ["plot", "record", "report", "trace"]
