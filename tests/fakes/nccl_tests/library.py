"""NCCL as a benchmark sees it: communicators, and a decision for every call.

Order and errors are NCCL's (2.30.7 and its forebears, `src/init.cc`, `src/enqueue.cc`): a tuner is
asked by every rank for every call, its error fails the call, and ranks that decide differently wait
for each other for ever. What kills NCCL kills this process, by the same signal.
"""

import hashlib
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import NUM_PROTOCOLS, Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator.channels import actual_channels, communicator_channels
from dynamiccl.simulator.chunks import actual_chunk_bytes, default_chunk_bytes
from tests.fakes.nccl_tests import log_lines, mischief
from tests.fakes.nccl_tests.debug import DebugLog
from tests.fakes.nccl_tests.model import Choice, Model
from tests.fakes.nccl_tests.releases import NAMED_CHOICES, num_algorithms
from tests.fakes.nccl_tests.settings import InvalidSetting, read_settings
from tests.fakes.nccl_tests.topology import write_dumps
from tests.fakes.nccl_tests.tuner import Advice, Shape, Tuner, TunerFailed, load
from tests.fakes.nccl_tests.world import World

#: `ncclResult_t`.
INTERNAL_ERROR: Final = 3
INVALID_USAGE: Final = 5
#: Algorithm, protocol, and the cost by which they were picked.
_Picked = tuple[Algorithm, Protocol, float | None]
_PER_RANK: Final = frozenset({Collective.AllGather, Collective.ReduceScatter})
#: LL and LL128 chunks of NCCL's own (`src/init.cc`): an eighth of their buffers, LL's half used.
_LL_CHUNKS: Final = {Protocol.LL: 32 << 10, Protocol.LL128: 576_000}


class NcclFailed(Exception):
    """A call into NCCL failed; `result` is its ncclResult_t."""

    def __init__(self, result: int) -> None:
        super().__init__(f"ncclResult_t {result}")
        self.result = result


class Library:
    """NCCL in one process that holds `local_ranks` of the communicator's ranks."""

    def __init__(
        self,
        environment: Mapping[str, str],
        nccl: NcclVersion,
        world: World,
        local_ranks: int,
        colour: int = 0,
    ) -> None:
        """Open the log; communicators come with `connect`.

        `world` has the processes of one communicator, which `colour` tells from others of the job.
        """
        self.version = nccl
        self.num_ranks = world.size * local_ranks
        self.log = DebugLog(environment, world.host)
        self._environment = environment
        self._world = world
        self._local_ranks = local_ranks
        self._colour = colour
        own_node = environment.get("NCCL_HOSTID") is not None
        self.num_nodes = world.size if own_node else world.num_nodes
        self._tuner: Tuner | None = None
        self._own: dict[tuple[Collective, int], Choice] = {}

    def connect(self) -> None:
        """Make the communicators of this process's ranks. Raises NcclFailed."""
        mischief.slow_start(self._environment)
        log_lines.environment(self.log, self._environment, self.version, self._world.rank)
        self._refuse_shared_gpus()
        try:
            self._settings = read_settings(self._environment, self.version)
        except InvalidSetting as error:
            self.log.fail(str(error), "graph/tuning.cc:356")
            raise NcclFailed(INVALID_USAGE) from error
        if "FAKE_INIT_FAILS" in self._environment:
            self.log.fail("FAKE_INIT_FAILS is set", "init.cc:1")
            raise NcclFailed(INTERNAL_ERROR)
        self.model = Model(self.num_nodes, self.num_ranks, self._settings)
        comm_id = _comm_id(self._environment) ^ self._colour
        first = self._world.rank * self._local_ranks
        seen = log_lines.Communicator(
            self.version, comm_id, self.num_ranks, self.num_nodes, first, self._local_ranks
        )
        log_lines.started(self.log, seen)
        if self.version >= NcclVersion(2, 28):
            self._load_tuner(comm_id)
        log_lines.tables(self.log, seen, self.model, self._settings)
        if self.version < NcclVersion(2, 28):
            self._load_tuner(comm_id)
        opened = {a: self._opened(a) for a in (Algorithm.Ring, Algorithm.NVLS)}
        log_lines.completed(self.log, seen, opened[Algorithm.Ring], opened[Algorithm.NVLS])
        if self._world.rank == 0:
            write_dumps(self._environment, self.log, opened[Algorithm.Ring])

    def collective(
        self, collective: Collective, count: int, type_bytes: int, type_name: str, repeat: int = 1
    ) -> Choice | None:
        """One call, or `repeat` of them in one group, of this process's ranks.

        `count` is NCCL's: one rank's elements for AllGather and ReduceScatter. None where NCCL has
        nothing to decide. Raises NcclFailed.
        """
        if not collective.tunable or self.num_ranks == 1:
            return None
        one_bytes = count * type_bytes * (self.num_ranks if collective in _PER_RANK else 1)
        try:
            choice = self._decide(collective, one_bytes * repeat, type_name)
        except TunerFailed as error:
            raise NcclFailed(error.result) from error
        if self._world.rank == 0:
            sizes = log_lines.Sizes(count * type_bytes, one_bytes * repeat, repeat)
            log_lines.chosen(self.log, self.version, collective, sizes, choice)
        return choice

    def finish(self) -> None:
        """Destroy the communicators."""
        if self._tuner is not None:
            self._tuner.finalize()

    def _refuse_shared_gpus(self) -> None:
        shared = "NCCL_TESTS_DEVICE" in self._environment and self._world.size > 1
        apart = "NCCL_HOSTID" in self._environment
        allowed = self.version >= NcclVersion(2, 30) and (
            self._environment.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        )
        if shared and not apart and not allowed:
            text = "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"
            self.log.fail(text, "init.cc:973")
            raise NcclFailed(INVALID_USAGE)

    def _load_tuner(self, comm_id: int) -> None:
        self._tuner = load(self.version, self._environment.get("NCCL_TUNER_PLUGIN"), self.log)
        if self._tuner is None or self.num_ranks == 1:
            return
        shape = Shape(comm_id, self.num_ranks, self.num_nodes)
        for _ in range(self._local_ranks):
            try:
                self._tuner.add_context(shape)
            except TunerFailed as error:
                raise NcclFailed(error.result) from error

    def _opened(self, algorithm: Algorithm) -> int:
        return self._settings.channels(communicator_channels(self.model.group, algorithm))

    def _decide(self, collective: Collective, size_bytes: int, type_name: str) -> Choice:
        if self._tuner is None:
            key = (collective, size_bytes)
            if key not in self._own:
                table = self.model.cost_table(collective, size_bytes, num_algorithms(self.version))
                picked = self._argmin(collective, size_bytes, table, type_name)
                self._own[key] = self._choice(collective, size_bytes, picked, Advice(-1, -1, 0))
            return self._own[key]
        answers = [
            self._asked(context, collective, size_bytes, type_name)
            for context in range(self._tuner.num_contexts)
        ]
        chunks = [
            self._chunk(context, collective, size_bytes, choice)
            for context, choice in enumerate(answers)
        ]
        if len(set(answers)) > 1 or len(set(chunks)) > 1:
            mischief.hang()
        return chunks[0]

    def _asked(
        self, context: int, collective: Collective, size_bytes: int, type_name: str
    ) -> Choice:
        assert self._tuner is not None
        table = self.model.cost_table(collective, size_bytes, num_algorithms(self.version))
        before = table.copy()
        nvls = Algorithm.NVLS in {cell[0] for cell in self.model.cells(collective, forced=False)}
        # NCCL 2.21.5 was seen to ask twice for every call.
        for _ in range(2 if self._tuner.version == 2 and self.version < NcclVersion(2, 22) else 1):
            advice = self._tuner.ask(context, collective, size_bytes, table, nvls=nvls)
        if self._tuner.version == 2 and min(advice.algorithm, advice.protocol) >= 0:
            cell = (Algorithm(advice.algorithm), Protocol(advice.protocol))
            if self.version < NcclVersion(2, 22):
                return self._choice(collective, size_bytes, (*cell, None), advice, acted=True)
            if table[cell] >= 0:
                table[cell] = 0.0
        if ((before < 0) & (table >= 0)).any():
            mischief.die(signal.SIGFPE)  # NCCL does not look whether it has that cell at all
        acted = bool((before != table).any())
        picked = self._argmin(collective, size_bytes, table, type_name)
        return self._choice(collective, size_bytes, picked, advice, acted=acted)

    def _argmin(
        self,
        collective: Collective,
        size_bytes: int,
        table: npt.NDArray[np.float32],
        type_name: str,
    ) -> _Picked:
        """NCCL's own pick: the first of the cheapest cells. Raises NcclFailed without any."""
        costs = np.where(np.isfinite(table) & (table >= 0), table, np.inf)
        if not np.isfinite(costs).any():
            if self.version >= NAMED_CHOICES:
                self._warn_impossible(collective, type_name)
                raise NcclFailed(INVALID_USAGE if self._settings.forced else INTERNAL_ERROR)
            whole = self.model.cost_table(collective, size_bytes, len(table), forced=False)
            ring = np.full_like(whole, np.inf)
            ring[Algorithm.Ring] = np.where(
                whole[Algorithm.Ring] >= 0, whole[Algorithm.Ring], np.inf
            )
            costs = ring
        cell = int(np.argmin(costs))
        algorithm, protocol = Algorithm(cell // NUM_PROTOCOLS), Protocol(cell % NUM_PROTOCOLS)
        return algorithm, protocol, float(costs.flat[cell])

    def _warn_impossible(self, collective: Collective, type_name: str) -> None:
        start = "No" if self.version >= NcclVersion(2, 30) else "Error : no"
        text = f"{start} algorithm/protocol available for function {collective.wire}"
        text += f" with datatype {log_lines.DATATYPES.get(type_name, type_name)}."
        for name in ("NCCL_ALGO", "NCCL_PROTO"):
            if name in self._environment:
                text += f" {name} was set to {self._environment[name]}."
        self.log.fail(text, "enqueue.cc:1970")

    def _choice(
        self,
        collective: Collective,
        size_bytes: int,
        picked: _Picked,
        advice: Advice,
        *,
        acted: bool = False,
    ) -> Choice:
        # The number lies in a signed byte; none, or less than none, is divided by.
        asked = (advice.num_channels + 128) % 256 - 128
        if advice.num_channels and asked <= 0:
            mischief.die(signal.SIGFPE)
        used = actual_channels(
            self.model.group,
            collective,
            *picked[:2],
            size_bytes,
            asked or None,
            max_channels=self._opened(picked[0]),
        )
        requested = acted or bool(asked) or self._settings.forced
        return Choice(*picked[:2], used, asked or None, None, requested, picked[2])

    def _chunk(
        self, context: int, collective: Collective, size_bytes: int, choice: Choice
    ) -> Choice:
        """The choice with the chunk that the plugin wants for the largest of its parts."""
        assert self._tuner is not None
        if self._tuner.version < 6:
            return choice
        own = _LL_CHUNKS.get(choice.protocol) or default_chunk_bytes(collective, choice.algorithm)
        wanted = [
            self._tuner.chunk_bytes(context, collective, part, choice.cell, own)
            for part in _parts(size_bytes, choice.num_channels)
        ]
        if min(wanted) < 16:
            mischief.die(signal.SIGFPE)
        if wanted[0] == own or choice.protocol is not Protocol.Simple:
            return choice
        chunk = actual_chunk_bytes(collective, choice.algorithm, wanted[0])
        return replace(choice, chunk_bytes=chunk, requested=True)


def _comm_id(environment: Mapping[str, str]) -> int:
    """A number that the processes of one launch have in common, without talking to each other."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "SLURM_STEP_ID")
    launch = [environment[name] for name in names if name in environment]
    session = "/".join(launch or [str(os.getpid())])
    return int(hashlib.sha256(session.encode()).hexdigest()[:16], 16)


def _parts(size_bytes: int, num_channels: int) -> list[int]:
    """Bytes of the first, a middle and the last channel: NCCL plans for each of the three."""
    share = -(-size_bytes // num_channels)
    last = size_bytes - share * (num_channels - 1)
    if num_channels == 1:
        return [size_bytes]
    return [share, max(last, 1)] if num_channels == 2 else [share, share, max(last, 1)]
