"""A `.cu` -> machine code: its sources, a user's expressions, NVRTC, the cache, architectures, NVIDIA's programs, disassembly."""

__all__ = ["arch", "cache", "disassembly", "nvrtc", "snippets", "sources", "tools"]
