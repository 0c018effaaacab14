"""Refuses what a captured round, or one that is not to stall, must not do."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "tolist")


class NoHostReads(TorchDispatchMode):
    """Refuses what reads a tensor's values back to the host, or has a shape that depends on them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        boolean_index = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        assert name not in READS and not boolean_index, f"{func} would wait for the device"
        return func(*args, **(kwargs or {}))
