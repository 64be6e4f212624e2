"""Pages to look at: what verbs found, each as one HTML file that needs no network (`--html FILE`)."""

__all__ = ["disassembly", "history", "render", "reports", "tables", "timeline"]
