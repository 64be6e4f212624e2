"""The public functions: attention, its gradients, and its operators in PyTorch."""

__all__ = ["attention", "call", "dispatch", "rotation", "torch_slot"]
