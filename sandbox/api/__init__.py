"""The public door: attention and its two passes on anybody's arrays."""

__all__ = ["attention", "block_map", "dispatch", "paged", "rotation", "torch_slot"]
