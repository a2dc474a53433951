"""Workloads: training loops as an endless cycle of collectives with compute between them.

They call on all ranks of a shape, the GPUs of one node (`node`), and one GPU of each (`across`).
Pipeline and expert-parallel exchanges ask no tuner: they are part of the compute, whose times are
our round figures and set how far the network moves on between calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Collective
from dynamiccl.simulator.system import Group

SystemOption = Annotated[str, typer.Option(help="Simulated system: a name or a file.")]
ScenarioOption = Annotated[str, typer.Option(help="Surroundings: a name or a file.")]
WorkloadOption = Annotated[
    list[str] | None, typer.Option(help="What jobs call; may be repeated. Default: ddp.")
]
NodesOption = Annotated[int, typer.Option(help="NCCL's nNodes.", min=1)]
RanksPerNodeOption = Annotated[int, typer.Option(help="GPUs of a node.", min=1)]
CallsOption = Annotated[int, typer.Option(help="Calls of each job.", min=1)]
DEFAULT_SYSTEM: Final = "h100-ib"
DEFAULT_SCENARIO: Final = "congested"
DEFAULT_WORKLOADS: Final = ("ddp",)

_AG, _RS, _AR = Collective.AllGather, Collective.ReduceScatter, Collective.AllReduce
_MIB: Final = 1 << 20
_BF16: Final = 2
#: PyTorch DDP's `bucket_cap_mb`, 25, with a first bucket of 1 (torch.nn.parallel, 2.x).
_BUCKET_BYTES: Final = 25 * _MIB
_FIRST_BUCKET_BYTES: Final = _MIB


@dataclass(frozen=True, slots=True)
class WorkCall:
    """One collective of an iteration."""

    group: Group
    collective: Collective
    size_bytes: int
    #: Compute that the call waits for.
    before_us: float
    #: Compute beside it on the GPU; 0 = the GPU waits.
    beside_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One iteration, repeated."""

    name: str
    calls: tuple[WorkCall, ...]


def ddp(shape: Group) -> Workload:
    """Data parallel: gradients of 1.3 billion bf16 parameters in buckets, behind the backward."""
    buckets = [_FIRST_BUCKET_BYTES] + [_BUCKET_BYTES] * (1_300 * _BF16 * 10**6 // _BUCKET_BYTES)
    loss = WorkCall(shape, _AR, 1 << 10, 20_000.0)
    overlapped = (WorkCall(shape, _AR, size, 200.0, beside_us=800.0) for size in buckets)
    return Workload("ddp", (*overlapped, loss))


def fsdp(shape: Group) -> Workload:
    """Fully sharded: each of 32 layers is gathered twice and its gradient scattered."""
    layer = 200 * _BF16 * 10**6
    forward = [WorkCall(shape, _AG, layer, 100.0, beside_us=6_000.0)] * 32
    backward = [
        WorkCall(shape, _AG, layer, 100.0, beside_us=6_000.0),
        WorkCall(shape, _RS, layer, 100.0, beside_us=6_000.0),
    ] * 32
    return Workload("fsdp", (*forward, *backward, WorkCall(shape, _AR, 1 << 10, 2_000.0)))


def megatron(shape: Group) -> Workload:
    """Megatron-LM: two all-reduces a layer each way (four layers, eight micro-batches) in a node.

    Activations are 4,096 x 8,192 bf16; gradients follow across nodes.
    """
    node, across = _node(shape), _across(shape)
    activations = 4_096 * 8_192 * _BF16
    micro = [WorkCall(node, _AR, activations, 400.0)] * (4 * 4)
    tail = [WorkCall(across, _AR, 128 * _MIB, 100.0, beside_us=2_000.0)] * 4
    return Workload("megatron", (*(micro * 8), *tail, WorkCall(shape, _AR, 64, 500.0)))


def moe(shape: Group) -> Workload:
    """Mixture of experts: sequence-parallel gathers in a node, exchanges as waits, small gates."""
    node, across = _node(shape), _across(shape)
    layer = (
        WorkCall(node, _AG, 32 * _MIB, 300.0),
        WorkCall(shape, _AR, 64 << 10, 1_500.0),  # the gate's load balance, after the AlltoAll
        WorkCall(node, _RS, 32 * _MIB, 900.0),
    )
    tail = [WorkCall(across, _AR, 48 * _MIB, 100.0, beside_us=1_000.0)] * 8
    return Workload("moe", (*(layer * 24), *tail))


def lora(shape: Group) -> Workload:
    """Fine-tuning of adapters: small gradients, once a step of four micro-batches."""
    sizes = [1 * _MIB, 2 * _MIB, 4 * _MIB, 8 * _MIB]
    return Workload("lora", tuple(WorkCall(shape, _AR, s, 3_000.0, beside_us=500.0) for s in sizes))


def decode(shape: Group) -> Workload:
    """Tensor-parallel inference: 20 layers of hidden size 8,192 a batch size, then a prompt."""
    token = 8_192 * _BF16
    layers = [
        call
        for tokens in (8, 32, 128)
        for call in [WorkCall(shape, _AR, tokens * token, 60.0)] * (2 * 20)
    ]
    prompt = [WorkCall(shape, _AR, 1_024 * token, 700.0)] * 8
    return Workload("decode", (*layers, *prompt))


def phi_2(shape: Group) -> Workload:
    """AutoCCL's Phi-2-2B, TP 8 x DP 4 (gbxu/autoccl @63acb15, NSDI 2025): AllReduce 632 MB.

    Of AllGather 80 MB x 3,120 and ReduceScatter x 2,064 in groups of 8 a sixteenth is called.
    """
    return _autoccl("phi-2", shape, 80 * 10**6, 632 * 10**6)


def llama_3(shape: Group) -> Workload:
    """AutoCCL's Llama-3.1-8B, same source: AllGather 857 MB, AllReduce 1,710 MB in groups of 4.

    Of AllGather 128 MB x 6,240 and ReduceScatter x 4,128 in groups of 8, twice Phi-2's, a 32nd is.
    """
    made = _autoccl("llama-3", shape, 128 * 10**6, 1_710 * 10**6)
    gather = WorkCall(_across(shape), _AG, 857 * 10**6, 1_000.0, beside_us=5_000.0)
    return Workload(made.name, (*made.calls, gather))


def vgg_19(shape: Group) -> Workload:
    """Data parallel: 143.7 million fp32 parameters in DDP's buckets, the classifier's first."""
    buckets = ((16, 300.0), (67, 600.0), (411, 3_000.0), *[(27, 15_000.0)] * 3)
    sized = [(_AR, megabytes * 10**6, 200.0, beside_us) for megabytes, beside_us in buckets]
    return Workload("vgg-19", tuple(WorkCall(shape, *each) for each in sized))


def _autoccl(name: str, shape: Group, small_bytes: int, large_bytes: int) -> Workload:
    node, across = _node(shape), _across(shape)
    # 3,120 : 2,064 is 65 : 43, in runs of three and two.
    part = (
        *[WorkCall(node, _AG, small_bytes, 150.0, beside_us=600.0)] * 3,
        *[WorkCall(node, _RS, small_bytes, 150.0, beside_us=600.0)] * 2,
    )
    return Workload(name, (*(part * 65), WorkCall(across, _AR, large_bytes, 1_000.0)))


def _node(shape: Group) -> Group:
    return Group(1, shape.ranks_per_node) if shape.ranks_per_node > 1 else shape


def _across(shape: Group) -> Group:
    return Group(shape.num_nodes, 1) if shape.num_nodes > 1 else shape


WORKLOADS: Final[Mapping[str, Callable[[Group], Workload]]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "megatron": megatron,
    "moe": moe,
    "lora": lora,
    "decode": decode,
    "phi-2": phi_2,
    "llama-3": llama_3,
    "vgg-19": vgg_19,
}


def make_workload(names: Sequence[str], shape: Group) -> Workload:
    """The workloads called `names`, one iteration after the other. Raises UnknownName."""
    for name in names:
        if name not in WORKLOADS:
            raise UnknownName("workload", name, [*WORKLOADS], where="--workload")
    made = [WORKLOADS[name](shape) for name in names]
    return Workload("+".join(names), tuple(call for each in made for call in each.calls))
