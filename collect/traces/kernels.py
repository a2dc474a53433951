"""What a GPU kernel's name tells: whether it communicates, and which collective it runs.

It does not say algorithm and protocol. NCCL builds one kernel for each collective, type and family
(`best_kernel` in src/device/generate.py, NVIDIA/nccl v2.30.7), always called RING_LL or TREE_LL,
which runs all the others too.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from dynamiccl.nccl import Collective


@dataclass(frozen=True, slots=True)
class CommKernel:
    """A communication kernel."""

    #: None where the name does not tell.
    collective: Collective | None
    #: Whether NCCL asks a tuner before it starts it; None where the name does not tell.
    asks_tuner: bool | None
    is_nccl: bool


#: From NCCL 2.19 `ncclDevKernel_AllReduce_Sum_f32_RING_LL`, before `ncclKernel_AllReduce_..`.
_NCCL: Final = re.compile(r"\bnccl(?:Dev)?Kernel(?:Debug)?_([A-Za-z]+)")
#: Kernels on symmetric memory: 2.27 `ncclSymDevKernel_`, 2.28 on `ncclSymkDevKernel_`
#: (src/device/symmetric/generate.py). NCCL takes them before it asks a tuner.
_SYMMETRIC: Final = re.compile(
    r"\bncclSymk?DevKernel_([A-Za-z]+)|\bncclDevKernel_([A-Za-z]+).*Symm"
)
#: Kernels of other libraries, with the source of the name and the collective where it is one.
_OTHERS: Final = tuple(
    (re.compile(pattern), collective)
    for pattern, collective in (
        # vLLM and SGLang csrc/custom_all_reduce.cuh.
        (r"\bcross_device_reduce_[12]stage", Collective.AllReduce),
        # vLLM csrc/quickreduce.
        (r"\ballreduce_prototype_(?:one|two)shot", Collective.AllReduce),
        # TensorRT-LLM cpp/tensorrt_llm/kernels/customAllReduceKernels.cu; PyTorch
        # torch/csrc/distributed/c10d/intra_node_comm.cu.
        (r"\b(?:lowPrecision)?(?:[oO]ne|[tT]wo)[sS]hotAll[rR]educe", Collective.AllReduce),
        # TensorRT-LLM and FlashInfer allReduceFusionKernels (trtllm_allreduce_fusion).
        (r"\ballreduce_fusion_kernel_(?:one|two)shot", Collective.AllReduce),
        # PyTorch torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu.
        (r"\b(?:one|two)_shot_all_reduce", Collective.AllReduce),
        (r"\bmultimem_(?:one_shot_)?all_reduce", Collective.AllReduce),
        (r"\bmultimem_all_gather", Collective.AllGather),
        # MSCCL++ src/ext/collectives: `mscclpp::collective::allreducePacket`.
        (r"\bmscclpp\w*::(?:\w+::)*all[rR]educe", Collective.AllReduce),
        (r"\bmscclpp\w*::(?:\w+::)*all[gG]ather", Collective.AllGather),
        (r"\bmscclpp", None),
        # DeepEP csrc/kernels: dispatch and combine of experts' tokens.
        (r"\bdeep_ep::", None),
        # NVSHMEM's own kernels, and PyTorch's over it (symm_mem/nvshmem_extension.cu).
        (r"\bnvshmemx?i?_", None),
    )
)


@cache
def comm_kernel(name: str) -> CommKernel | None:
    """The kernel's collective and library by its name; None for compute kernels.

    >>> comm_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    CommKernel(collective=<Collective.AllReduce: 4>, asks_tuner=True, is_nccl=True)
    """
    symmetric = _SYMMETRIC.search(name)
    if symmetric:
        return CommKernel(_collective(symmetric[1] or symmetric[2]), asks_tuner=False, is_nccl=True)
    found = _NCCL.search(name)
    if found:
        collective = _collective(found[1])
        asks = None if collective is None else collective.tunable
        return CommKernel(collective, asks, is_nccl=True)
    for pattern, collective in _OTHERS:
        if pattern.search(name):
            return CommKernel(collective, asks_tuner=False, is_nccl=False)
    return None


def _collective(function: str) -> Collective | None:
    """The collective of that name; None for `Generic`, which runs any, and for new ones."""
    return next((each for each in Collective if each.wire == function), None)
