"""Call the built plugin from Python exactly as NCCL calls it, without NCCL and without a GPU.

Used by the demo, the parity check and the tests. `TunerPlugin.communicator` is one NCCL
communicator of one rank: `init`, any number of `ask`, `finalize`. The layouts are those of
`serve/plugin/nccl/tuner_abi.h`, per version (`src/plugin/tuner.cc` v2.30.7-1 and its forebears).

The logger is variadic in C. The plugin formats its line itself and passes it as the one argument of
"%s", so a callback with six fixed arguments receives it on x86-64 and on 64-bit Arm Linux.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.errors import PluginError
from dynamiccl.nccl import (
    ABSTAIN,
    NUM_ALGORITHMS,
    NUM_PROTOCOLS,
    RELEGATED_COST_RATIO,
    TUNER_ABI_SINCE,
    Algorithm,
    Collective,
    Config,
    Protocol,
)

#: Predicted microseconds, shape [6 or 7 algorithms][3 protocols]; -1.0 where not available.
CostTable = npt.NDArray[np.float32]

_UNDEFINED: Final = -1
_COLLNET: Final = frozenset({Algorithm.CollNetDirect, Algorithm.CollNetChain})
_NVLS: Final = frozenset({Algorithm.NVLS, Algorithm.NVLSTree})
_INT_OUT: Final = ctypes.POINTER(ctypes.c_int)
_SIZE_OUT: Final = ctypes.POINTER(ctypes.c_size_t)
_LOGGER: Final = ctypes.CFUNCTYPE(
    None,
    ctypes.c_int,
    ctypes.c_ulong,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
)
#: Without what follows the format: somebody else's may be anything.
_FOREIGN_LOGGER: Final = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p
)
#: Name in the structs of our own plugin.
OUR_NAME: Final = "DynamICCL"
#: `ncclTunerConstants_v5_t`: baseLatencies[7][3], hwLatencies[3][7][3], five tables [4][3].
_CONSTANTS: Final = ctypes.c_double * (7 * 3 + 3 * 7 * 3 + 5 * 4 * 3)


class _NvlDomains(ctypes.Structure):
    """`ncclNvlDomainInfo_v5_t`."""

    _fields_ = (("number", ctypes.c_int), ("min_ranks", ctypes.c_int), ("max_ranks", ctypes.c_int))


def _struct_of(version: int) -> type[ctypes.Structure]:
    """`ncclTuner_v<version>_t`."""
    context_out = ctypes.POINTER(ctypes.c_void_p)
    init: tuple[Any, ...]
    shape = (ctypes.c_size_t, ctypes.c_size_t, _LOGGER)
    if version >= 5:
        domains = ctypes.POINTER(_NvlDomains)
        init = (context_out, ctypes.c_uint64, *shape, domains, ctypes.c_void_p)
    else:
        init = (*shape, context_out)
    ask: tuple[Any, ...] = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    if version == 2:
        ask += (ctypes.c_int, ctypes.c_int, ctypes.c_int, _INT_OUT, _INT_OUT, _INT_OUT)
    else:
        ask += (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        ask += (ctypes.c_int, _INT_OUT) if version >= 4 else (_INT_OUT,)
    fields: list[tuple[str, Any]] = [
        ("name", ctypes.c_char_p),
        ("init", ctypes.CFUNCTYPE(ctypes.c_int, *init)),
        ("ask", ctypes.CFUNCTYPE(ctypes.c_int, *ask)),
        ("finalize", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
    ]
    if version >= 6:
        part = (*ask[:3], ctypes.c_int, ctypes.c_int, ctypes.c_int, _SIZE_OUT)
        fields.append(("get_chunk_size", ctypes.CFUNCTYPE(ctypes.c_int, *part)))
    return type(f"TunerV{version}", (ctypes.Structure,), {"_fields_": fields})


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What one call came back with, and what NCCL would run then."""

    #: None where NCCL is left to choose without a cost table (v2), or no cell is available.
    algorithm: Algorithm | None
    protocol: Protocol | None
    #: As written to `*nChannels`; 0 leaves it to NCCL.
    num_channels: int
    #: Whether the plugin wrote anything at all.
    acted: bool
    #: None with v2, which has no cost table.
    cost_table_after: CostTable | None

    @property
    def config(self) -> Config:
        """The Config that NCCL runs after this answer: the argmin of the table."""
        return Config(self.algorithm, self.protocol, self.num_channels or None)


def nccl_choice(cost_table: CostTable) -> tuple[Algorithm, Protocol] | None:
    """NCCL's own argmin: the first of the cheapest cells, None when no cell is available.

    `src/enqueue.cc` topoGetAlgoInfo, v2.30.7-1.
    """
    costs = np.where(_available(cost_table), cost_table, np.inf)
    cell = int(np.argmin(costs))
    if not np.isfinite(costs.flat[cell]):
        return None
    return Algorithm(cell // NUM_PROTOCOLS), Protocol(cell % NUM_PROTOCOLS)


def asked_in_a_job(config: Config | None) -> Config | None:
    """What a job asks for where its table holds `config`; None for nothing at all.

    A chunk size is for sweeps: a rank that simulates a group would have NCCL's own at its next
    call, and the others ours.
    """
    asked = config and replace(config, chunk_bytes=None)
    return None if asked == ABSTAIN else asked


def expected_answer(config: Config | None, cost_table: CostTable, *, num_nodes: int) -> Answer:
    """What the plugin must answer (v3 to v6) when its table holds `config`: the law, in Python.

    The same rules as `choose` in `serve/plugin/choice.h`, written a second time on purpose: the
    parity check compares the two.
    """
    untouched = _answer(cost_table, cost_table, 0)
    if config is None:
        return untouched
    available = _available(cost_table)
    if (cost_table == 0).any():
        return untouched  # NCCL's tie might go to that cell and not to ours
    allowed = available.copy()
    if config.algorithm is not None:
        allowed &= (np.arange(len(cost_table)) == config.algorithm)[:, None]
    if config.protocol is not None:
        allowed &= np.arange(NUM_PROTOCOLS) == config.protocol
    if _ring_is_relegated(cost_table, available):
        allowed[Algorithm.Ring] = False
    if not allowed.any():
        return untouched
    cell = int(np.argmin(np.where(allowed, cost_table, np.inf)))
    after = cost_table.copy()
    after.flat[cell] = 0.0
    algorithm = Algorithm(cell // NUM_PROTOCOLS)
    unclamped = algorithm in _COLLNET or (algorithm in _NVLS and num_nodes > 1)
    return _answer(cost_table, after, 0 if unclamped else config.num_channels or 0)


def _available(cost_table: CostTable) -> npt.NDArray[np.bool_]:
    return np.isfinite(cost_table) & (cost_table >= 0)


def _ring_is_relegated(cost_table: CostTable, available: npt.NDArray[np.bool_]) -> bool:
    ring = np.arange(len(cost_table)) == Algorithm.Ring
    ring_costs = cost_table[ring][available[ring]]
    other_costs = cost_table[~ring][available[~ring]]
    if not ring_costs.size or not other_costs.size:
        return False
    with np.errstate(over="ignore"):
        return bool(ring_costs.min() >= np.float32(RELEGATED_COST_RATIO) * other_costs.min())


def _answer(before: CostTable, after: CostTable, num_channels: int) -> Answer:
    algorithm, protocol = nccl_choice(after) or (None, None)
    acted = before.tobytes() != after.tobytes() or num_channels != 0
    return Answer(algorithm, protocol, num_channels, acted, after)


class Communicator:
    """One communicator of one rank; made by `TunerPlugin.communicator`."""

    def __init__(self, version: int, struct: Any, context: ctypes.c_void_p) -> None:
        #: Lines that the plugin logged, in order.
        self.lines: list[str] = []
        self._version = version
        self._struct = struct
        self._context = context

    def ask(self, collective: Collective, size_bytes: int, cost_table: CostTable) -> Answer:
        """One getCollInfo of v3 to v6; `size_bytes` is NCCL's nBytes.

        `cost_table` is not changed. Raises ValueError for a table of another shape and PluginError
        when the plugin returns an error, which it must never do.
        """
        before = np.ascontiguousarray(cost_table, dtype=np.float32)
        if before.ndim != 2 or before.shape[1] != NUM_PROTOCOLS or len(before) > NUM_ALGORITHMS:
            raise ValueError(f"cost table of shape {before.shape} is not [6 or 7][3]")
        if self._version == 2:
            raise ValueError("tuner v2 has no cost table; use ask_v2")
        after = before.copy()
        num_channels = ctypes.c_int(0)
        tail = (
            (0, ctypes.byref(num_channels)) if self._version >= 4 else (ctypes.byref(num_channels),)
        )
        self._check(
            "getCollInfo",
            self._struct.ask(
                self._context,
                int(collective),
                size_bytes,
                1,
                after.ctypes.data,
                *after.shape,
                *tail,
            ),
        )
        return _answer(before, after, num_channels.value)

    def ask_v2(
        self, collective: Collective, size_bytes: int, *, nvls_support: bool = False
    ) -> Answer:
        """One getCollInfo of v2 (NCCL 2.21), which returns the choice itself.

        Raises ValueError on another version and PluginError when the plugin returns an error.
        """
        if self._version != 2:
            raise ValueError(f"tuner v{self._version} has a cost table; use ask")
        algorithm, protocol = ctypes.c_int(_UNDEFINED), ctypes.c_int(_UNDEFINED)
        num_channels = ctypes.c_int(0)
        outputs = [ctypes.byref(out) for out in (algorithm, protocol, num_channels)]
        self._check(
            "getCollInfo",
            self._struct.ask(
                self._context, int(collective), size_bytes, 0, int(nvls_support), 1, *outputs
            ),
        )
        acted = (algorithm.value, protocol.value, num_channels.value) != (_UNDEFINED,) * 2 + (0,)
        return Answer(
            None if algorithm.value == _UNDEFINED else Algorithm(algorithm.value),
            None if protocol.value == _UNDEFINED else Protocol(protocol.value),
            num_channels.value,
            acted,
            None,
        )

    @staticmethod
    def _check(function: str, result: int) -> None:
        if result != 0:
            raise PluginError(f"the plugin's {function} returned {result}; it may only return 0")


class TunerPlugin:
    """The plugin's shared library, loaded as NCCL loads it (`src/os/linux.cc`)."""

    def __init__(self, path: Path) -> None:
        """Load the library at `path`; raises PluginError when it is not a tuner plugin."""
        self.path = path
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise PluginError(f"cannot load {path}: {error}; rebuild it: 'make plugin'") from error
        self._structs: dict[int, Any] = {}
        for version in TUNER_ABI_SINCE:
            with contextlib.suppress(ValueError):  # it does not export this one
                struct = _struct_of(version).in_dll(library, f"ncclTunerPlugin_v{version}")
                self._structs[version] = struct
        if not self._structs:
            known = ", ".join(f"v{version}" for version in TUNER_ABI_SINCE)
            raise PluginError(f"{path} exports no tuner of {known}; is it a tuner plugin?")

    @property
    def versions(self) -> tuple[int, ...]:
        """The tuner ABI versions that it exports, ascending."""
        return tuple(sorted(self._structs))

    @property
    def name(self) -> str:
        """The name that NCCL's log shows."""
        return str((self._structs[self.versions[-1]].name or b"").decode(errors="replace"))

    @contextlib.contextmanager
    def communicator(
        self,
        num_ranks: int,
        num_nodes: int,
        *,
        version: int = 5,
        environment: Mapping[str, str | None] | None = None,
        ranks_per_domain: tuple[int, int] | None = None,
    ) -> Iterator[Communicator]:
        """A communicator as NCCL of tuner ABI `version` makes it; freed on leaving.

        `environment` is set around `init` only, the one time that the plugin reads it; None unsets.
        `ranks_per_domain` is (fewest, most) ranks in an NVLink domain, as v5 and v6 are told.
        Raises PluginError when `init` returns an error, with the lines that it logged: of ours in
        a sweep alone it may (`serve/plugin/sweep/player.h`).
        """
        struct = self._structs[version]
        context = ctypes.c_void_p()
        communicator = Communicator(version, struct, context)

        def keep(*arguments: Any) -> None:
            communicator.lines.append(arguments[-1].decode(errors="replace"))

        logger = _LOGGER(keep)
        if self.name != OUR_NAME:
            # Only the format is a pointer for sure. The cast keeps what it is cast from alive.
            logger = ctypes.cast(_FOREIGN_LOGGER(keep), _LOGGER)
        shape = (num_ranks, num_nodes, logger)
        domains = _NvlDomains(num_nodes, *ranks_per_domain) if ranks_per_domain else None
        constants = _CONSTANTS()  # NCCL always has some, and NVIDIA's example changes them
        with _environment(environment or {}):
            result = (
                struct.init(ctypes.byref(context), 1, *shape, domains, constants)
                if version >= 5
                else struct.init(*shape, ctypes.byref(context))
            )
        if result != 0:
            said = "; ".join(communicator.lines) or "nothing"
            raise PluginError(f"the plugin's init returned {result} and said: {said}")
        try:
            yield communicator
        finally:
            struct.finalize(context)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
