"""The public door: attention and its two passes on anybody's arrays."""

__all__ = ["attention", "blocks", "paged", "passes", "rotation", "torch_slot"]
