"""HTML pages of the commands' results (`--html FILE`). Each page is one file and needs no network."""

__all__ = ["disassembly", "history", "render", "reports", "tables", "timeline"]
