"""The public functions: attention, its gradients, and its operators in PyTorch.

Imports; those marked with * are made when a call needs them:

    attention ──▶ dispatch ──▶ options
        │             └─*─▶ plan ──▶ validate
        └─*─▶ torch_autograd ──▶ torch_ops ──▶ torch_arguments, torch_exit
                                     └─*─▶ torch_graphs
    call ──▶ plan, dispatch
    call ─*─▶ torch_autograd
    torch_slot ──▶ dispatch, plan, torch_exit
    rotation
"""

__all__ = ["attention", "call", "dispatch", "rotation", "torch_slot"]
