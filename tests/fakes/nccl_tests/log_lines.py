"""NCCL's log lines about environment, communicators, cost model and choices.

Wordings are those of `src/init.cc`, `src/graph/tuning.cc`, `src/enqueue.cc` and `src/misc/param.cc`
at the releases named; between these they did not change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dynamiccl.nccl import NUM_TUNED_COLLECTIVES, Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator.tables import lines
from tests.fakes.nccl_tests.debug import DebugLog
from tests.fakes.nccl_tests.model import Choice, Model
from tests.fakes.nccl_tests.numbers import strtol
from tests.fakes.nccl_tests.releases import CUDA, NAMED_CHOICES
from tests.fakes.nccl_tests.settings import NUMBERS, TEXTS, Settings

#: `ncclAlgoToString` and `ncclDatatypeToString`.
ALGORITHMS: Final = {
    Algorithm.Tree: "TREE",
    Algorithm.Ring: "RING",
    Algorithm.CollNetDirect: "COLLNET_DIRECT",
    Algorithm.CollNetChain: "COLLNET_CHAIN",
    Algorithm.NVLS: "NVLS",
    Algorithm.NVLSTree: "NVLS_TREE",
    Algorithm.PAT: "PAT",
}
DATATYPES: Final = {
    "int8": "ncclInt8",
    "uint8": "ncclUint8",
    "int32": "ncclInt32",
    "uint32": "ncclUint32",
    "int64": "ncclInt64",
    "uint64": "ncclUint64",
    "half": "ncclFloat16",
    "float": "ncclFloat32",
    "double": "ncclFloat64",
    "bfloat16": "ncclBfloat16",
    "f8e4m3": "ncclFloat8e4m3",
    "f8e5m2": "ncclFloat8e5m2",
}
_MAX_THREADS: Final = {Protocol.LL: 512, Protocol.LL128: 640, Protocol.Simple: 512}


@dataclass(frozen=True, slots=True)
class Communicator:
    """What the lines about a communicator need; `first_rank` is this process's."""

    nccl: NcclVersion
    comm_id: int
    num_ranks: int
    num_nodes: int
    first_rank: int
    local_ranks: int


def bus_id(device: int) -> int:
    """PCI bus of a device: one of the eight in the dumps of topology.py."""
    return 0x10 * (device + 1)


def environment(log: DebugLog, values: Mapping[str, str], nccl: NcclVersion, rank: int) -> None:
    """The version, and every variable that NCCL found set."""
    if rank == 0:
        log.version(f"NCCL version {nccl}+{CUDA}")
    for name in TEXTS:
        if values.get(name):
            log.say(f"{name} set by environment to {values[name]}", "ENV")
    for name in ("NCCL_PROTO", "NCCL_ALGO"):
        if name in values:
            log.say(f"{name} set by environment to {values[name]}", "ENV")
    for name in NUMBERS:
        if values.get(name):
            log.say(f"{name} set by environment to {strtol(values[name])}.", "ENV")


def started(log: DebugLog, comm: Communicator) -> None:
    """`Init START` and the shape, for every rank of this process."""
    local = comm.num_ranks // comm.num_nodes
    for device in range(comm.local_ranks):
        rank = comm.first_rank + device
        begin = f"[Rank {rank}] " if comm.nccl >= NcclVersion(2, 29) else ""
        log.say(f"{begin}{_comm(comm, device)} - Init START", "INIT", device=device)
        log.say(
            f"comm {_pointer(device)} rank {rank} nRanks {comm.num_ranks} nNodes {comm.num_nodes} "
            f"localRanks {local} localRank {rank % local} MNNVL 0",
            "INIT",
            device=device,
        )


def completed(log: DebugLog, comm: Communicator, channels: int, nvls_channels: int) -> None:
    """Thresholds, channels and `Init COMPLETE`, for every rank of this process."""
    for device in range(comm.local_ranks):
        ring = 8 * comm.num_ranks
        log.say(f"threadThresholds 8/8/64 | {ring}/8/64 | 512 | 512", "INIT", device=device)
        log.say(
            f"{channels} coll channels, {channels} collnet channels, {nvls_channels} nvls "
            f"channels, {channels} p2p channels, {max(channels // 8, 1)} p2p channels per peer",
            "INIT",
            device=device,
        )
        log.say(f"{_comm(comm, device)} - Init COMPLETE", "INIT", device=device)


def tables(log: DebugLog, comm: Communicator, model: Model, settings: Settings) -> None:
    """The model's latencies and bandwidths, in blocks of three algorithms, by rank 0."""
    if comm.first_rank or not log.wants("TUNING"):
        return
    if comm.nccl >= NAMED_CHOICES and settings.forced:
        log.say(f"Enabled NCCL Func/Proto/Algo Matrix:\n{_matrix(settings)}", "ENV")
    algorithms = list(Algorithm)[: 7 if comm.nccl >= NAMED_CHOICES else 6]
    for start in range(0, len(algorithms), 3):
        block = algorithms[start : start + 3]
        names = "".join(f" {'':14}   {a.wire:>14}   {'':14} |" for a in block)
        log.say(f"  Algorithm   |{names}", "TUNING")
        protocols = "".join(f" {_upper(p):>14} |" for p in Protocol)
        log.say(f"  Protocol    |{protocols * 3}", "TUNING")
        threads = "".join(f" {_threads(a, p):14d} |" for a in block for p in Protocol)
        log.say(f" Max NThreads |{threads}", "TUNING")
        for value in range(NUM_TUNED_COLLECTIVES):
            collective = Collective(value)
            cells = "".join(_cell(model, collective, a, p) for a in block for p in Protocol)
            log.say(f"{collective.wire:>13} |{cells}", "TUNING")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a call as NCCL prints them."""

    #: Count times type size: one rank's share for AllGather and ReduceScatter.
    one_bytes: int
    #: nBytes of all calls of the group together.
    whole_bytes: int
    repeat: int


def chosen(
    log: DebugLog, nccl: NcclVersion, collective: Collective, sizes: Sizes, choice: Choice
) -> None:
    """The lines about one group of equal calls; rank 0 alone prints them."""
    if not log.wants("TUNING"):
        return
    if nccl >= NAMED_CHOICES:
        line = (
            f"{collective.wire}: {sizes.one_bytes} Bytes -> Algo {ALGORITHMS[choice.algorithm]} "
            f"proto {_upper(choice.protocol)} channel{{Lo..Hi}}={{0..{choice.num_channels - 1}}}"
        )
        for _ in range(sizes.repeat):
            log.say(line, "TUNING")
    elif choice.predicted_us is not None:
        named = f"{collective.wire}: " if nccl >= NcclVersion(2, 23) else ""
        log.say(
            f"{named}{sizes.whole_bytes} Bytes -> Algo {choice.algorithm} proto "
            f"{choice.protocol} time {choice.predicted_us:f}",
            "TUNING",
        )


def _comm(comm: Communicator, device: int) -> str:
    function = "ncclCommInitRank" + ("Config" if comm.nccl >= NcclVersion(2, 23) else "")
    return (
        f"{function} comm {_pointer(device)} rank {comm.first_rank + device} nranks "
        f"{comm.num_ranks} cudaDev {device} nvmlDev {device} busId {bus_id(device) << 12:x} "
        f"commId 0x{comm.comm_id:x}"
    )


def _pointer(device: int) -> str:
    return f"0x{0x55D0_0000_0000 + 0x10000 * device:x}"


def _upper(protocol: Protocol) -> str:
    return protocol.wire.upper() if protocol is Protocol.Simple else protocol.wire


def _threads(algorithm: Algorithm, protocol: Protocol) -> int:
    if algorithm in {Algorithm.Tree, Algorithm.Ring}:
        return _MAX_THREADS[protocol]
    return 640 if protocol is Protocol.Simple and algorithm is not Algorithm.PAT else 0


def _cell(model: Model, collective: Collective, algorithm: Algorithm, protocol: Protocol) -> str:
    line = lines()[model.group].get((collective, algorithm, protocol))
    if line is None or (algorithm, protocol) not in model.cells(collective, forced=True):
        return f"{line.latency_us if line else 0.0:8.1f}/{0.0:6.1f} |"
    return f"{line.latency_us:8.1f}/{line.algbw_gbytes_per_s:6.1f} |"


def _matrix(settings: Settings) -> str:
    names = "".join(f"{_upper(p):>8}  " for p in Protocol)
    names += " | " + "".join(f"{a.wire:>13}  " for a in Algorithm)
    rows = [f"     Function | {names}"]
    for collective, allowed in settings.allowed.items():
        protocols = {p for _, p in allowed}
        algorithms = {a for a, _ in allowed}
        cells = "".join(f"{int(p in protocols):8d}  " for p in Protocol)
        cells += " | " + "".join(f"{int(a in algorithms):13d}  " for a in Algorithm)
        rows.append(f"{collective.wire:>13} | {cells}")
    return "\n".join(rows) + "\n"
