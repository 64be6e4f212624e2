"""Arrays and arguments -> a launch: DLPack, packed arguments, tensor maps, the driver."""

__all__ = ["arguments", "dlpack", "driver", "host", "parameters", "tensor_maps"]
