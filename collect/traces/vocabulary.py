"""PyTorch's names of collectives and element types, and NCCL's message size of a call."""

import re
from collections.abc import Mapping
from typing import Final

from dynamiccl.nccl import Collective

#: PyTorch's element types (c10/core/ScalarType.h and the C++ names that older traces hold) ->
#: nccl-tests' spelling and bytes. NCCL has no bool and no complex numbers: PyTorch sends bytes and
#: pairs of floats (torch/csrc/distributed/c10d/NCCLUtils.hpp).
_TYPES: Final[Mapping[str, tuple[str, int]]] = {
    **dict.fromkeys(("char", "signed char", "int8"), ("int8", 1)),
    **dict.fromkeys(("byte", "unsigned char", "uint8", "bool"), ("uint8", 1)),
    **dict.fromkeys(("int", "int32"), ("int32", 4)),
    **dict.fromkeys(("uint32",), ("uint32", 4)),
    **dict.fromkeys(("long", "long int", "int64"), ("int64", 8)),
    **dict.fromkeys(("uint64",), ("uint64", 8)),
    **dict.fromkeys(("half", "c10::half", "float16"), ("half", 2)),
    **dict.fromkeys(("float", "float32"), ("float", 4)),
    **dict.fromkeys(("double", "float64"), ("double", 8)),
    **dict.fromkeys(("bfloat16", "c10::bfloat16"), ("bfloat16", 2)),
    **dict.fromkeys(("float8_e4m3fn", "c10::float8_e4m3fn"), ("f8e4m3", 1)),
    **dict.fromkeys(("float8_e5m2", "c10::float8_e5m2"), ("f8e5m2", 1)),
}
#: Bytes of an element by nccl-tests' spelling.
TYPE_BYTES: Final[Mapping[str, int]] = dict(_TYPES.values())
#: PyTorch's names without prefix, underscores and variants of the same call.
_COLLECTIVES: Final[Mapping[str, Collective]] = {
    "allreduce": Collective.AllReduce,
    "allgather": Collective.AllGather,
    "reducescatter": Collective.ReduceScatter,
    "broadcast": Collective.Broadcast,
    "reduce": Collective.Reduce,
    "alltoall": Collective.AlltoAll,
    "alltoallv": Collective.AlltoAll,
    "gather": Collective.Gather,
    "scatter": Collective.Scatter,
    "send": Collective.SendRecv,
    "recv": Collective.SendRecv,
}
#: `_allgather_base`, `all_gather_into_tensor_coalesced`, `broadcast_oop`, `all_reduce_barrier`, ...
_VARIANT: Final = re.compile(r"base|intotensor|tensor|coalesced|oop|sparse|uneven|barrier")
_DIRECTION: Final = re.compile(r"\s*\d+\s*(?:->|<-)\s*\d+.*")


def torch_collective(name: str) -> Collective | None:
    """The collective of a PyTorch name; None for other operations (`wait`, `barrier`).

    >>> torch_collective("nccl:_all_gather_base").wire, torch_collective("wait")
    ('AllGather', None)
    """
    plain = _DIRECTION.sub("", name.rpartition(":")[2]).lower().replace("_", "")
    return _COLLECTIVES.get(_VARIANT.sub("", plain))


def torch_type(name: str) -> str | None:
    """nccl-tests' name of an element type of PyTorch's; None for one that is not known.

    >>> torch_type("BFloat16"), torch_type("Tensor(long int)")
    ('bfloat16', 'int64')
    """
    inner = re.sub(r"^.*\(|\).*$", "", name).strip().lower()
    found = _TYPES.get(inner)
    return None if found is None else found[0]


def message_bytes(
    collective: Collective | None,
    datatype: str | None,
    in_elements: int | None,
    out_elements: int | None,
) -> int | None:
    """NCCL's nBytes of a call, from one rank's elements; None where they are not known, or 0.

    It is the larger of both buffers: the whole output of AllGather, the whole input of
    ReduceScatter (`ncclInfoSetDerived` in src/include/info.h, NVIDIA/nccl v2.19).
    """
    elements = out_elements if collective is Collective.AllGather else in_elements
    if collective is None or datatype is None or not elements or elements < 0:
        return None
    return elements * TYPE_BYTES[datatype]
