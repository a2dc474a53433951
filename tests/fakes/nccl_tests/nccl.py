"""NCCL 2.30.7 as a benchmark sees it: communicators, a decision for every call, and its log.

The order is NCCL's (`src/init.cc`, `src/enqueue.cc`, `src/graph/tuning.cc`): a tuner is asked by
every rank for every call, and ranks that decide differently wait for each other for ever. A tuner's
error, and what would kill NCCL, is a failed assertion. Costs and times are the simulator's; what it
does not know of (transports, AlltoAll, SendRecv) is made up.
"""

import os
import re
import resource
import signal
import sys
import threading
from array import array
from collections.abc import Mapping
from ctypes import c_void_p
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final, NoReturn, TextIO

from dynamiccl.nccl import COST_IGNORE, MAX_CHANNELS, Algorithm, Collective, Config, Protocol
from dynamiccl.simulator.h100 import BUFFER_BYTES, H100System, default_model, true_us
from dynamiccl.simulator.physics import asked_chunk_bytes, largest_chunk_bytes
from dynamiccl.simulator.system import Call, Group
from tests.fakes.nccl_tests.tuner import Tuner, load
from tests.fakes.nccl_tests.world import World

_CELLS: Final = tuple((a, p) for a in Algorithm for p in Protocol)
_PER_RANK: Final = frozenset({Collective.AllGather, Collective.ReduceScatter})


@dataclass(frozen=True, slots=True)
class Choice:
    """The config of one call."""

    algorithm: Algorithm
    protocol: Protocol
    #: Channels really used, and as asked for by a plugin (None: NCCL's own number).
    num_channels: int
    asked_channels: int | None
    #: Whether anybody but NCCL decided anything.
    requested: bool
    chunk_bytes: int | None = None

    @property
    def keys(self) -> set[str]:
        """The Config keys that this is an answer to."""
        numbers = (None, self.num_channels, self.asked_channels)
        keys = {Config(self.algorithm, self.protocol, number).key for number in numbers}
        return keys if self.requested else keys | {"ABSTAIN"}


class Log:
    """NCCL's log of one process: levels, subsystems, files and prefixes (`src/debug.cc`)."""

    def __init__(self, environment: Mapping[str, str], host: str) -> None:
        """Open the file that the environment asks for, else log to stdout."""
        level = environment.get("NCCL_DEBUG", "").upper()
        self._warns, self._informs = level in {"WARN", "INFO"}, level == "INFO"
        self._subsystems = environment.get("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,ENV").split(",")
        self._prefix = f"{host}:{os.getpid()}:{threading.get_native_id()} "
        self._file: TextIO = sys.stdout
        name = environment.get("NCCL_DEBUG_FILE", "")
        if self._warns and name:
            name = name.replace("%h", host).replace("%p", str(os.getpid()))
            self._file = Path(name).open("w", buffering=1, encoding="utf-8")  # noqa: SIM115

    def wants(self, *subsystems: str) -> bool:
        return self._informs and any(name in self._subsystems for name in (*subsystems, "ALL"))

    def say(self, text: str, *subsystems: str) -> None:
        """Log one line, when the level and one of the subsystems are on."""
        if self.wants(*subsystems):
            self._file.write(f"{self._prefix}[0] NCCL INFO {text}\n")

    def version(self) -> None:
        if self._warns:
            prefix = f"{self._prefix}[0] NCCL INFO " if self._informs else ""
            self._file.write(f"{prefix}NCCL version 2.30.7+cuda12.9\n")


class Nccl:
    """NCCL in one process that holds `local_ranks` of the communicator's ranks."""

    def __init__(
        self, environment: Mapping[str, str], world: World, local_ranks: int, colour: int
    ) -> None:
        """Open the log; communicators come with `connect`.

        `world` has the processes of one communicator, which `colour` tells from others of the job.
        """
        self.num_ranks = world.size * local_ranks
        self.log = Log(environment, world.host)
        self._environment = environment
        self._world = world
        self._local_ranks = local_ranks
        self._comm_id = 0xDC00 + colour
        self._group = nearest_group(world.num_nodes, self.num_ranks // world.num_nodes)
        self._tuner: Tuner | None = None
        self._costs = cache(self._predicted)
        self._choice = cache(self._chosen)

    def connect(self) -> None:
        """Make the communicators of this process's ranks."""
        if self._world.rank == 0:
            self.log.version()
        self._tuner = load(self._environment.get("NCCL_TUNER_PLUGIN"), self.log.say)
        if self._tuner is not None and self.num_ranks > 1:
            for _ in range(self._local_ranks):
                self._tuner.add_context(self._comm_id, self.num_ranks, self._world.num_nodes)
        self._say_tables()

    def call(self, collective: Collective, printed: int) -> Choice | None:
        """One call of this process's ranks; None where NCCL has nothing to decide.

        `printed` bytes are one rank's for AllGather and ReduceScatter.
        """
        if not collective.tunable or self.num_ranks == 1:
            return None
        whole = printed * (self.num_ranks if collective in _PER_RANK else 1)
        choice = self._decide(collective, whole)
        if self._world.rank == 0 and self.log.wants("TUNING"):
            config = f"Algo {_upper(choice.algorithm)} proto {_upper(choice.protocol)}"
            channels = f"channel{{Lo..Hi}}={{0..{choice.num_channels - 1}}}"
            self.log.say(f"{collective.wire}: {printed} Bytes -> {config} {channels}", "TUNING")
        return choice

    def time_us(self, collective: Collective, size_bytes: int, choice: Choice | None) -> float:
        """Noise-free time of one call; `choice` is None where NCCL makes none."""
        if choice is None:
            # One hop of a ring.
            line = default_model().lines(self._group)[
                Collective.Broadcast, Algorithm.Ring, Protocol.Simple
            ]
            time_us = line.latency_us + size_bytes / (1000.0 * line.algbw_gbytes_per_s)
        else:
            time_us = true_us(
                Call(self._group, collective, size_bytes),
                (choice.algorithm, choice.protocol),
                choice.num_channels,
                choice.chunk_bytes,
                max_channels=choice.num_channels,
            )
        return time_us

    def finish(self) -> None:
        if self._tuner is not None:
            self._tuner.finalize()

    def _opened(self, algorithm: Algorithm) -> int:
        """Channels of the communicator for an algorithm."""
        most = int(self._environment.get("NCCL_MAX_CTAS", MAX_CHANNELS))
        return min(default_model().max_channels(self._group, algorithm), most)

    def _predicted(self, collective: Collective, size_bytes: int) -> tuple[float, ...]:
        """What NCCL hands to a tuner: predicted us of each cell, -1 where it is not available."""
        call = Call(self._group, collective, size_bytes)
        model = default_model()
        has = model.cells(self._group, collective)
        costs = (model.cost_us(call, *cell) if cell in has else COST_IGNORE for cell in _CELLS)
        return tuple(array("f", costs))

    def _decide(self, collective: Collective, size_bytes: int) -> Choice:
        call, tuner = (collective, size_bytes), self._tuner
        if tuner is None:
            return self._choice(*call, self._costs(*call), 0)
        answers = [
            self._choice(*call, *tuner.ask(context, *call, self._costs(*call)))
            for context in tuner.contexts
        ]
        # All ranks are asked for the choice before any is asked for a chunk.
        chosen = [
            self._with_chunk(*call, choice, context)
            for context, choice in zip(tuner.contexts, answers, strict=True)
        ]
        if len(set(chosen)) > 1:
            hang()
        return chosen[0]

    def _chosen(
        self, collective: Collective, size_bytes: int, told: tuple[float, ...], channels: int
    ) -> Choice:
        """The first of the cheapest cells, with the channels asked for."""
        known = self._costs(collective, size_bytes)
        # The number lies in a signed byte; none, or less than none, is divided by.
        asked = (channels + 128) % 256 - 128
        assert asked > 0 or not channels
        # Nor does NCCL look whether it has a cell at all.
        assert not any(before < 0 <= after for before, after in zip(known, told, strict=True))
        costs = {cell: cost for cell, cost in zip(_CELLS, told, strict=True) if cost >= 0}
        algorithm, protocol = min(costs, key=lambda cell: costs[cell])
        call, opened = Call(self._group, collective, size_bytes), self._opened(algorithm)
        used = default_model(opened).num_channels(call, algorithm, protocol, asked or None)
        requested = asked > 0 or known != told
        return Choice(algorithm, protocol, used, asked or None, requested)

    def _with_chunk(
        self, collective: Collective, size_bytes: int, choice: Choice, context: c_void_p
    ) -> Choice:
        """The choice with the chunk that the plugin wants for a channel's part of the call."""
        assert self._tuner is not None
        own = largest_chunk_bytes(collective, choice.algorithm, Protocol.Simple, BUFFER_BYTES)
        part = (collective, -(-size_bytes // choice.num_channels))
        cell = (choice.algorithm, choice.protocol)
        wanted = self._tuner.chunk_bytes(context, part, cell, own)
        if wanted == own or choice.protocol is not Protocol.Simple:
            return choice
        return replace(choice, chunk_bytes=asked_chunk_bytes(own, wanted), requested=True)

    def _say_tables(self) -> None:
        """The model's latencies and bandwidths, in blocks of three algorithms, by rank 0."""
        if self._world.rank or not self.log.wants("TUNING"):
            return
        names = list(Algorithm)
        for block in (names[:3], names[3:6], names[6:]):
            cells = [(algorithm, protocol) for algorithm in block for protocol in Protocol]
            heads = "".join(f" {'':14}   {a.wire:>14}   {'':14} |" for a in block)
            self.log.say(f"  Algorithm   |{heads}", "TUNING")
            # Three algorithms' protocols stand above the last block, too.
            protocols = "".join(f" {p.wire:>14} |" for p in Protocol)
            self.log.say(f"  Protocol    |{protocols * 3}", "TUNING")
            threads = "".join(f" {_threads(*cell):14d} |" for cell in cells)
            self.log.say(f" Max NThreads |{threads}", "TUNING")
            for collective in filter(lambda one: one.tunable, Collective):
                costs = "".join(self._cell(collective, *cell) for cell in cells)
                self.log.say(f"{collective.wire:>13} |{costs}", "TUNING")

    def _cell(self, collective: Collective, algorithm: Algorithm, protocol: Protocol) -> str:
        line = default_model().lines(self._group).get((collective, algorithm, protocol))
        has = default_model().cells(self._group, collective)
        taken = line is not None and (algorithm, protocol) in has
        latency_us = line.latency_us if line else 0.0
        return f"{latency_us:8.1f}/{line.algbw_gbytes_per_s if line and taken else 0.0:6.1f} |"


def nearest_group(num_nodes: int, ranks_per_node: int) -> Group:
    """The group of the simulator that is most like a shape, nodes before ranks."""
    return min(
        H100System().groups(),
        key=lambda group: (
            (group.num_nodes == 1) != (num_nodes == 1),
            abs(group.num_nodes - num_nodes),
            abs(group.ranks_per_node - ranks_per_node),
        ),
    )


def _upper(member: Algorithm | Protocol) -> str:
    """`ncclAlgoToString` and `ncclProtoToString`."""
    return re.sub(r"(?<=[a-zS])(?=[A-Z][a-z])", "_", member.wire).upper()


def _threads(algorithm: Algorithm, protocol: Protocol) -> int:
    if algorithm in {Algorithm.Tree, Algorithm.Ring}:
        return 640 if protocol is Protocol.LL128 else 512
    return 640 if protocol is Protocol.Simple and algorithm is not Algorithm.PAT else 0


def hang() -> NoReturn:
    while True:
        signal.pause()


def die(number: signal.Signals) -> NoReturn:
    """End by a signal to oneself, without a core file; buffered output is lost."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    hang()
