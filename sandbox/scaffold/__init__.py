"""The verbs doctor and new: what this machine has, and files to begin with."""

__all__ = ["doctor", "new", "report"]
