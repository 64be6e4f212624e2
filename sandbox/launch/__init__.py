"""Arrays and arguments -> a launch: DLPack, packed arguments, tensor maps, the driver."""

__all__ = ["arguments", "array_view", "dlpack", "driver", "host", "parameters", "tensor_maps"]
