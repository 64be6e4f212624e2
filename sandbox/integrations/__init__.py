"""Other people's programs on our kernels: a module a program, imported by whoever asks for it."""

__all__ = ["transformers"]
