"""Gradient exchange that adapts to the network, as a communication hook of PyTorch's DDP.

from dynamiccl.serve.ddp import NetSense, netsense_hook

state = NetSense(model)  # model: a DistributedDataParallel, on gloo or NCCL
model.register_comm_hook(state, netsense_hook)
"""

from dynamiccl.serve.ddp.hook import NetSense, netsense_hook
from dynamiccl.serve.ddp.laws import Settings

__all__ = ["NetSense", "Settings", "netsense_hook"]
