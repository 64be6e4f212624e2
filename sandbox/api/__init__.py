"""The public functions: attention, its gradients, and its operators in PyTorch."""

__all__ = ["append_kv", "attention", "block_map", "call", "dispatch", "rotation", "torch_slot"]
