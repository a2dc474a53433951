"""Calls the built plugin from Python as NCCL calls it, without NCCL and without a GPU.

Used by the demo, the parity check and the tests. `TunerPlugin.communicator` is one NCCL
communicator: `init` of one rank or of all, any number of `ask` of the first, `finalize`. The
layouts are those of `serve/plugin/nccl/tuner_abi.h`, per version (`src/plugin/tuner.cc` v2.30.7-1
and its forebears).

The logger is variadic in C. The plugin formats its line itself and passes it as the one argument of
"%s", so a callback with six fixed arguments receives it on x86-64 and on 64-bit Arm Linux.
"""

import contextlib
import ctypes
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dynamiccl.errors import PluginError
from dynamiccl.nccl import NUM_ALGORITHMS, NUM_PROTOCOLS, TUNER_ABI_SINCE, Collective
from dynamiccl.serve.answers import Answer, CostTable, answer_of

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
#: Of all communicators of this process: a tuner takes one of a known id for the same one.
_IDS: Final = itertools.count(1)
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
    ask += (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, _INT_OUT)
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


class _ProfilerV4(ctypes.Structure):
    """`ncclProfiler_v4_t`, as far as `init`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        (
            "init",
            ctypes.CFUNCTYPE(
                ctypes.c_int,
                ctypes.POINTER(ctypes.c_void_p),
                ctypes.POINTER(ctypes.c_int),
                ctypes.c_char_p,
                ctypes.c_uint64,
                ctypes.c_int,
                ctypes.c_int,
                ctypes.c_int,
                _LOGGER,
            ),
        ),
    )


class Communicator:
    """The first rank of a communicator; made by `TunerPlugin.communicator`."""

    def __init__(self, version: int, struct: Any, context: ctypes.c_void_p) -> None:
        #: Lines that the plugin logged, in order.
        self.lines: list[str] = []
        self._version = version
        self._struct = struct
        self._context = context

    def ask(
        self,
        collective: Collective,
        size_bytes: int,
        cost_table: CostTable,
        *,
        num_pipe_ops: int = 1,
        reg_buff: int = 0,
    ) -> Answer:
        """One getCollInfo; `size_bytes` is NCCL's nBytes.

        `cost_table` is not changed. Raises ValueError for a table of another shape and PluginError
        when the plugin returns an error, which it must never do.
        """
        before = np.ascontiguousarray(cost_table, dtype=np.float32)
        if before.ndim != 2 or before.shape[1] != NUM_PROTOCOLS or len(before) > NUM_ALGORITHMS:
            raise ValueError(f"cost table of shape {before.shape} is not [6 or 7][3]")
        after = before.copy()
        num_channels = ctypes.c_int(0)
        result = self._struct.ask(
            self._context,
            int(collective),
            size_bytes,
            num_pipe_ops,
            after.ctypes.data,
            *after.shape,
            reg_buff,
            ctypes.byref(num_channels),
        )
        if result != 0:
            raise PluginError(f"the plugin's getCollInfo returned {result}; it may only return 0")
        return answer_of(before, after, num_channels.value)


@dataclass(frozen=True, slots=True)
class _InitArguments:
    """The arguments of `init` that all ranks share."""

    version: int
    comm_id: int
    num_ranks: int
    num_nodes: int
    domains: _NvlDomains | None
    all_ranks: bool


class TunerPlugin:
    """The plugin's shared library, loaded as NCCL loads it (`src/os/linux.cc`)."""

    def __init__(self, path: Path) -> None:
        """Load the library at `path`; raises PluginError when it is not a tuner plugin."""
        self.path = path
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise PluginError(f"cannot load {path}: {error}; rebuild it: 'make plugin'") from error
        self._library = library
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
        """The plugin's name, as NCCL logs it."""
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
        all_ranks: bool = False,
    ) -> Iterator[Communicator]:
        """A communicator as NCCL of tuner ABI `version` makes it; freed on leaving.

        `environment` is set around `init` only, the one time that the plugin reads it; None unsets.
        `ranks_per_domain` is (fewest, most) ranks in an NVLink domain, as v5 and v6 are told. With
        `all_ranks` the others call `init` too, each in a thread, so that a tuner that asks them all
        agrees (see `serve.loopback`); else the first one is alone. Raises PluginError when `init`
        returns an error, with the lines that it logged: of ours in a sweep alone it may
        (`serve/plugin/sweep/player.cpp`).
        """
        struct = self._structs[version]
        domains = _NvlDomains(num_nodes, *ranks_per_domain) if ranks_per_domain else None
        told = _InitArguments(version, next(_IDS), num_ranks, num_nodes, domains, all_ranks)
        contexts = [ctypes.c_void_p() for _ in range(num_ranks if all_ranks else 1)]
        communicator = Communicator(version, struct, contexts[0])

        def keep(*arguments: Any) -> None:
            communicator.lines.append(arguments[-1].decode(errors="replace"))

        logger = _LOGGER(keep)
        if self.name != OUR_NAME:
            # Only the format is a pointer for sure. The cast keeps what it is cast from alive.
            logger = ctypes.cast(_FOREIGN_LOGGER(keep), _LOGGER)
        with _environment(environment or {}):
            others = [
                threading.Thread(target=self._init, args=(told, context, _LOGGER()))
                for context in contexts[1:]
            ]
            for other in others:
                other.start()
            result = self._init(told, contexts[0], logger)
            for other in others:
                other.join()
        if result != 0:
            said = "; ".join(communicator.lines) or "nothing"
            raise PluginError(f"the plugin's init returned {result}; log: {said}")
        try:
            yield communicator
        finally:
            for context in contexts:
                struct.finalize(context)

    def _init(self, told: _InitArguments, context: ctypes.c_void_p, logger: Any) -> int:
        """Call one rank's `init`; returns its result code."""
        struct, shape = self._structs[told.version], (told.num_ranks, told.num_nodes, logger)
        if told.version >= 5:
            constants = _CONSTANTS()  # NCCL always has some, and NVIDIA's example changes them
            reference = ctypes.byref(context)
            return int(struct.init(reference, told.comm_id, *shape, told.domains, constants))
        if told.all_ranks:
            self._tell_profiler(told.comm_id, told.num_ranks, told.num_nodes)
        return int(struct.init(*shape, ctypes.byref(context)))

    def _tell_profiler(self, comm_id: int, num_ranks: int, num_nodes: int) -> None:
        """Call the profiler's `init`, as NCCL 2.27 does before a tuner's, on its thread."""
        profiler = _ProfilerV4.in_dll(self._library, "ncclProfiler_v4")
        mask, ignored = ctypes.c_int(0), ctypes.c_void_p()
        profiler.init(
            ctypes.byref(ignored),
            ctypes.byref(mask),
            b"",
            comm_id,
            num_nodes,
            num_ranks,
            0,
            _LOGGER(),
        )


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
