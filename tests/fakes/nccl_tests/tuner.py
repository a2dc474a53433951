"""Loads a tuner plugin as NCCL 2.30 does, and calls it through its ABI, v6.

The layout is that of `tests/tuner_abi.py`. Nothing else of the package's own caller is used: a
mistake there must not hide here.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import c_int, c_size_t, c_void_p
from typing import Any, Final

from dynamiccl.nccl import Collective
from tests.tuner_abi import CONSTANTS, LOGGER, NvlDomains, tuner_struct

#: Subsystem bits of NCCL's logger (`src/include/nccl_common.h`).
_BITS: Final = {0x1: "INIT", 0x40: "TUNING", 0x80: "ENV"}


class Tuner:
    """One loaded plugin with a context for each rank of this process; its errors end that."""

    def __init__(self, struct: Any, say: Callable[..., None]) -> None:
        """Take the struct of a loaded library and what logs a line of given subsystems."""
        self.contexts: list[c_void_p] = []
        self._struct = struct
        self._say = say
        self._logger = LOGGER(self._logged)
        # A plugin may edit these. The stand-in's cost model does not read them back.
        self._constants = CONSTANTS()

    def add_context(self, comm_id: int, num_ranks: int, num_nodes: int) -> None:
        """`init` for one more rank of a communicator."""
        context, local = c_void_p(), num_ranks // num_nodes
        domains = NvlDomains(num_nodes, local, local)
        more = (self._logger, domains, ctypes.byref(self._constants))
        init = self._struct.init
        assert init(ctypes.byref(context), comm_id, num_ranks, num_nodes, *more) == 0
        self.contexts.append(context)

    def ask(
        self, context: c_void_p, collective: Collective, size_bytes: int, costs: Sequence[float]
    ) -> tuple[tuple[float, ...], int]:
        """`getCollInfo`: costs as the plugin leaves them, and channels; 0 = NCCL's own number.

        Costs are those of 7 algorithms by 3 protocols, in us, flat.
        """
        table, channels = (ctypes.c_float * len(costs))(*costs), c_int()
        shape = (len(costs) // 3, 3, 0, ctypes.byref(channels))
        ask = self._struct.ask
        assert ask(context, int(collective), size_bytes, 1, table, *shape) == 0
        return tuple(table), channels.value

    def chunk_bytes(
        self, context: c_void_p, call: tuple[Collective, int], cell: tuple[int, int], own: int
    ) -> int:
        """`getChunkSize` for one channel's part of a call, whose chunk would be `own`."""
        ask = self._struct.get_chunk_size
        chunk = c_size_t(own)
        if ask:  # a plugin may leave it out
            assert ask(context, int(call[0]), call[1], *cell, 1, ctypes.byref(chunk)) == 0
        return chunk.value

    def finalize(self) -> None:
        for context in self.contexts:
            self._struct.finalize(context)

    def _logged(self, _level: int, flags: int, _file: bytes, _line: int, *text: bytes) -> None:
        form, argument = text
        line = argument if form == b"%s" else form
        self._say(line.decode(errors="replace"), *(_BITS[bit] for bit in _BITS if flags & bit))


def load(setting: str | None, say: Callable[..., None]) -> Tuner | None:
    """Open what NCCL_TUNER_PLUGIN names (`src/plugin/tuner.cc`); None after a failed attempt."""
    name = setting or "libnccl-tuner.so"
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        struct = tuner_struct(6).in_dll(library, "ncclTunerPlugin_v6")
    except (OSError, ValueError):  # it is not there, or of another version
        say(f"TUNER/Plugin: Could not find: {name}", "INIT", "TUNING")
        return None
    say(f"TUNER/Plugin: Using {struct.name.decode()} (v6)", "INIT", "TUNING")
    return Tuner(struct, say)
