"""A `.cu` -> machine code: sources, a user's expressions, NVRTC, the cache, architectures, programs, disassembly."""

__all__ = ["arch", "cache", "disassembly", "nvrtc", "snippets", "sources", "tools"]
