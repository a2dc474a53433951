"""Loads a tuner plugin as an NCCL release does, and calls it through that release's ABI.

The layouts are those of `serve/plugin/nccl/tuner_abi.h`. Nothing of the package's own caller is
used: a mistake there must not hide here.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import Collective, NcclVersion
from tests.fakes.nccl_tests.debug import DebugLog
from tests.fakes.nccl_tests.releases import tuner_versions

#: Names and subsystem bits of NCCL's logger (`src/include/nccl_common.h`).
_BITS: Final = {0x1: "INIT", 0x40: "TUNING", 0x80: "ENV"}
_LOGGER: Final = ctypes.CFUNCTYPE(
    None,
    ctypes.c_int,
    ctypes.c_ulong,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
)
_INT: Final = ctypes.POINTER(ctypes.c_int)
#: Doubles in ncclTunerConstants_v5_t: base and hop latencies, then five tables of bandwidths.
_NUM_CONSTANTS: Final = 7 * 3 + 3 * 7 * 3 + 5 * 4 * 3


class _Domains(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("fewest", ctypes.c_int), ("most", ctypes.c_int))


class TunerFailed(Exception):
    """A call into the plugin returned something else than ncclSuccess."""

    def __init__(self, call: str, result: int) -> None:
        super().__init__(f"{call} returned {result}")
        self.result = result


@dataclass(frozen=True, slots=True)
class Advice:
    """The result of one getCollInfo."""

    #: The plugin's own choice, v2 only; -1 where it left that to NCCL.
    algorithm: int
    protocol: int
    num_channels: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a communicator, as passed to a tuner."""

    comm_id: int
    num_ranks: int
    num_nodes: int


class Tuner:
    """One loaded plugin; every communicator and rank has a context of its own."""

    def __init__(self, struct: Any, version: int, log: DebugLog) -> None:
        """Take the struct that `load` found."""
        self.version = version
        self.name = str(struct.name.decode())
        self._struct = struct
        self._log = log
        self._contexts: list[ctypes.c_void_p] = []
        self._logger = _LOGGER(self._logged)
        # v5 and v6 may edit these. The stand-in's cost model does not read them back.
        self._constants = (ctypes.c_double * _NUM_CONSTANTS)()

    @property
    def num_contexts(self) -> int:
        """Contexts made so far."""
        return len(self._contexts)

    def add_context(self, shape: Shape) -> None:
        """`init` for one more rank. Raises TunerFailed."""
        context = ctypes.c_void_p()
        arguments = (shape.num_ranks, shape.num_nodes, self._logger)
        if self.version >= 5:
            local = shape.num_ranks // shape.num_nodes
            domains = _Domains(shape.num_nodes, local, local)
            result = self._struct.init(
                ctypes.byref(context),
                shape.comm_id,
                *arguments,
                ctypes.byref(domains),
                ctypes.byref(self._constants),
            )
        else:
            result = self._struct.init(*arguments, ctypes.byref(context))
        if result != 0:
            raise TunerFailed("init", result)
        self._contexts.append(context)

    def ask(
        self,
        context: int,
        collective: Collective,
        size_bytes: int,
        table: npt.NDArray[np.float32],
        *,
        nvls: bool,
    ) -> Advice:
        """`getCollInfo`; v3 and later write into `table`. Raises TunerFailed."""
        algorithm, protocol, channels = (ctypes.c_int(value) for value in (-1, -1, 0))
        start = (self._contexts[context], int(collective), size_bytes)
        if self.version == 2:
            outputs = (ctypes.byref(algorithm), ctypes.byref(protocol), ctypes.byref(channels))
            result = self._struct.get_coll_info(*start, 0, int(nvls), 1, *outputs)
        else:
            registered = (0,) if self.version >= 4 else ()
            result = self._struct.get_coll_info(
                *start, 1, table.ctypes.data, *table.shape, *registered, ctypes.byref(channels)
            )
        if result != 0:
            raise TunerFailed("getCollInfo", result)
        return Advice(algorithm.value, protocol.value, channels.value)

    def chunk_bytes(
        self, context: int, collective: Collective, size_bytes: int, cell: tuple[int, int], own: int
    ) -> int:
        """`getChunkSize` of v6 for one part with one channel; `own` is NCCL's chunk.

        Returns `own` where the plugin has no such function. Raises TunerFailed.
        """
        if self.version < 6 or not self._struct.get_chunk_size:
            return own
        chunk = ctypes.c_size_t(own)
        result = self._struct.get_chunk_size(
            self._contexts[context], int(collective), size_bytes, *cell, 1, ctypes.byref(chunk)
        )
        if result != 0:
            raise TunerFailed("getChunkSize", result)
        return int(chunk.value)

    def finalize(self) -> None:
        """`finalize`, or `destroy` before v5, for every context."""
        for context in self._contexts:
            self._struct.finalize(context)
        self._contexts = []

    def _logged(self, _level: int, flags: int, _file: bytes, _line: int, *text: bytes) -> None:
        form, argument = text
        line = argument if form == b"%s" else form
        subsystems = [name for bit, name in _BITS.items() if flags & bit]
        self._log.say(line.decode(errors="replace"), *subsystems)


def load(nccl: NcclVersion, setting: str | None, log: DebugLog) -> Tuner | None:
    """Find and open a plugin; None for NCCL's own tuner, as after every failed attempt."""
    say = _Speaker(nccl, log)
    if setting:
        say.setting(setting)
        if setting.lower() == "none" and nccl >= NcclVersion(2, 28):
            return None
    for name in _names(setting):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_LOCAL)
            return _struct(library, nccl, name, say)
    say.missing(_names(setting))
    return None


def _names(setting: str | None) -> list[str]:
    if not setting:
        return ["libnccl-tuner.so"]
    is_library = setting.startswith("lib") and setting.endswith(".so")
    plain = "/" not in setting and not is_library
    return [setting, f"libnccl-tuner-{setting}.so"] if plain else [setting]


def _struct(library: ctypes.CDLL, nccl: NcclVersion, name: str, say: "_Speaker") -> Tuner | None:
    for version in tuner_versions(nccl):
        try:
            struct = _layout(version).in_dll(library, f"ncclTunerPlugin_v{version}")
        except ValueError:
            say.no_symbol(version)
            continue
        tuner = Tuner(struct, version, say.log)
        say.found(tuner, name)
        return tuner
    say.unsupported(name)
    return None


class _Speaker:
    """The lines about loading, which changed with every few releases (`src/plugin/tuner.cc`)."""

    def __init__(self, nccl: NcclVersion, log: DebugLog) -> None:
        self.log = log
        self._newest = nccl >= NcclVersion(2, 28)

    def setting(self, text: str) -> None:
        line = f"TUNER/Plugin: NCCL_TUNER_PLUGIN set to {text}"
        if self._newest:
            line = f"NCCL_TUNER_PLUGIN set by environment to {text}"
        self._say(line)

    def found(self, tuner: Tuner, name: str) -> None:
        if self._newest:
            self._say(f"TUNER/Plugin: Using {tuner.name} (v{tuner.version})")
            self._say(f"Successfully loaded external tuner plugin {name}")
        else:
            self._say(f"TUNER/Plugin: Using tuner plugin {tuner.name}")

    def missing(self, names: Iterable[str]) -> None:
        tail = "" if self._newest else ". Using internal tuner plugin."
        self._say(f"TUNER/Plugin: Could not find: {' '.join(names)}{tail}")

    def no_symbol(self, version: int) -> None:
        if not self._newest:
            self._say(f"TUNER/Plugin: Failed to find ncclTunerPlugin_v{version} symbol.")

    def unsupported(self, name: str) -> None:
        if self._newest:
            self._say(f"External tuner plugin {name} is unsupported")

    def _say(self, line: str) -> None:
        self.log.say(line, "INIT" if self._newest else "ENV", "TUNING")


def _layout(version: int) -> type[ctypes.Structure]:
    """`ncclTuner_v<version>_t`."""
    context = ctypes.POINTER(ctypes.c_void_p)
    shape = (ctypes.c_size_t, ctypes.c_size_t, _LOGGER)
    init: tuple[Any, ...] = (*shape, context)
    if version >= 5:
        init = (context, ctypes.c_uint64, *shape, ctypes.POINTER(_Domains), ctypes.c_void_p)
    ask: tuple[Any, ...] = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    if version == 2:
        ask += (*[ctypes.c_int] * 3, *[_INT] * 3)
    else:
        ask += (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        ask += (ctypes.c_int, _INT) if version >= 4 else (_INT,)
    chunk = (*ask[:3], *[ctypes.c_int] * 3, ctypes.POINTER(ctypes.c_size_t))
    fields: list[tuple[str, Any]] = [
        ("name", ctypes.c_char_p),
        ("init", ctypes.CFUNCTYPE(ctypes.c_int, *init)),
        ("get_coll_info", ctypes.CFUNCTYPE(ctypes.c_int, *ask)),
        ("finalize", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
        ("get_chunk_size", ctypes.CFUNCTYPE(ctypes.c_int, *chunk)),
    ]
    kept = fields if version >= 6 else fields[:4]
    return type(f"Tuner{version}", (ctypes.Structure,), {"_fields_": kept})
