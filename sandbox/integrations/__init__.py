"""Integrations with other libraries, one module each, imported on demand."""

__all__ = ["transformers"]
