"""The public functions: attention, its gradients, and its operators in PyTorch.

Imports; those marked with * are made when a call needs them:

    attention ──▶ dispatch ──▶ options
        │             └─*─▶ plan ──▶ validate
        └─*─▶ torch_autograd ──▶ torch_ops ──▶ torch_arguments, torch_exit
                                     └─*─▶ torch_graphs
    call ──▶ plan, dispatch, validate
    call ─*─▶ torch_autograd
    torch_slot ──▶ dispatch, plan, torch_exit
    rotation

Not shown: imports of `options` and `dispatch` by most modules, of torch_arguments by torch_graphs, and of torch_ops by
`attention` when a call needs it.
"""

__all__ = ["attention", "call", "dispatch", "rotation", "torch_slot"]
