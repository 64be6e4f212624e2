"""From a `.cu` to machine code: include resolution, score snippets, NVRTC, cache, architectures, tools, disassembly."""

__all__ = ["arch", "cache", "disassembly", "nvrtc", "snippets", "sources", "tools"]
