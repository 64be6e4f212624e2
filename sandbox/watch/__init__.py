"""The verb watch: examines every save of a kernel, shows it beside earlier ones, and keeps its history."""

__all__ = ["history", "job", "screen", "session"]
