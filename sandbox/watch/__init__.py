"""The command watch: examines every save of a kernel, compares it with earlier versions, and stores its history."""

__all__ = ["history", "job", "screen", "session"]
