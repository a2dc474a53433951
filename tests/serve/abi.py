"""Calls the built plugin from Python as NCCL calls it, without NCCL and without a GPU.

`TunerPlugin.communicator` is one NCCL communicator: `init` of one rank or of all, any number of
`ask` of the first, `finalize`. The layouts are those of `tests/tuner_abi.py`.

All ranks may be threads of this process. They agree as in a job, by a word of shared memory. Only
NCCL is a stand-in: a library that says one version.
"""

import contextlib
import ctypes
import itertools
import os
import platform
import secrets
import subprocess
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from dynamiccl.datasets.manifest import INDEX_NAME
from dynamiccl.datasets.store import file_sha256
from dynamiccl.errors import PluginError
from dynamiccl.nccl import TUNER_ABI_SINCE, Algorithm, Collective, Protocol
from dynamiccl.serve.artifact import PluginIndex
from dynamiccl.serve.table import DecisionTable, relative_path
from tests.serve.tables import Answer, CostTable, answer_of
from tests.tuner_abi import CONSTANTS, LOGGER, NvlDomains, ProfilerV4, tuner_struct

#: Of all communicators of this process: a tuner takes one of a known id for the same one.
_IDS: Final = itertools.count(1)


class Communicator:
    """The first rank of a communicator; made by `TunerPlugin.communicator`."""

    def __init__(self, struct: Any, context: ctypes.c_void_p) -> None:
        #: Lines that the plugin logged, in order.
        self.lines: list[str] = []
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
        """One getCollInfo; `size_bytes` is NCCL's nBytes; `cost_table` is not changed.

        Raises PluginError when the plugin returns an error, which it must never do.
        """
        before = np.ascontiguousarray(cost_table, dtype=np.float32)
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

    def chunk_bytes(
        self, cell: tuple[Algorithm, Protocol], own_bytes: int, collective: Collective
    ) -> int:
        """One getChunkSize of v6, about 1 MiB for which NCCL's own is `own_bytes`."""
        chunk = ctypes.c_size_t(own_bytes)
        part = (int(collective), 1 << 20, *map(int, cell), 1)
        result = self._struct.get_chunk_size(self._context, *part, ctypes.byref(chunk))
        assert result == 0, result
        return chunk.value


class TunerPlugin:
    """The plugin's shared library, loaded as NCCL loads it (`src/os/linux.cc`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        self._structs: dict[int, Any] = {}
        for version in TUNER_ABI_SINCE:
            with contextlib.suppress(ValueError):  # it does not export this one
                struct = tuner_struct(version).in_dll(self._library, f"ncclTunerPlugin_v{version}")
                self._structs[version] = struct

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
        agrees (`loopback_environment`); else the first one is alone. Raises PluginError when `init`
        returns an error, with the lines that it logged: of ours in a sweep alone it may
        (`serve/plugin/sweep/player.cpp`).
        """
        struct, comm_id = self._structs[version], next(_IDS)
        domains = NvlDomains(num_nodes, *ranks_per_domain) if ranks_per_domain else None
        contexts = [ctypes.c_void_p() for _ in range(num_ranks if all_ranks else 1)]
        communicator = Communicator(struct, contexts[0])

        def init(context: ctypes.c_void_p, logger: Any) -> int:
            if all_ranks and version < 5:
                self._tell_profiler(comm_id, num_nodes, num_ranks)
            reference, shape = ctypes.byref(context), (num_ranks, num_nodes, logger)
            # NCCL always has constants, and NVIDIA's example changes them.
            v5 = (reference, comm_id, *shape, domains, CONSTANTS())
            return int(struct.init(*(v5 if version >= 5 else (*shape, reference))))

        def keep(*arguments: Any) -> None:
            communicator.lines.append(arguments[-1].decode(errors="replace"))

        logger = LOGGER(keep)
        changed = {**os.environ, **(environment or {})}
        kept = {name: value for name, value in changed.items() if value is not None}
        with patch.dict(os.environ, kept, clear=True):
            others = [
                threading.Thread(target=init, args=(context, LOGGER())) for context in contexts[1:]
            ]
            for other in others:
                other.start()
            result = init(contexts[0], logger)
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

    def _tell_profiler(self, *told: int) -> None:
        """Call the profiler's `init`, as NCCL 2.27 does before a tuner's, on its thread."""
        mask, ignored = ctypes.c_int(0), ctypes.c_void_p()
        profiler = ProfilerV4.in_dll(self._library, "ncclProfiler_v4")
        profiler.init(ctypes.byref(ignored), ctypes.byref(mask), b"", *told, 0, LOGGER())


# --- All ranks in this process ---

#: What the stand-in says that it is: a release that tells a tuner all that it can be told, and has
#: no AllGather whose number of channels must be left alone (from 2.29 on).
NCCL_CODE: Final = 22809
_NO_MANIFEST: Final = "0" * 64


def loopback_environment(artifact: Path, system: str) -> dict[str, str | None]:
    """The environment of ranks of this process that use `artifact`, as on a machine of `system`."""
    _load_nccl()
    return {
        "DYNAMICCL_JOB": secrets.token_hex(8),
        **prepared_environment(artifact, system, NCCL_CODE),
        "DYNAMICCL_WORD": "all",
        **dict.fromkeys(f"DYNAMICCL_{name}" for name in ("DISABLE", "KILL_FILE", "PROBLEM")),
        "NCCL_COMM_ID": None,
    }


def prepared_environment(artifact: Path, system: str, *nccl_codes: int) -> dict[str, str]:
    """What dynamiccl-run would prepare on a machine of `system`, for these releases of NCCL."""
    return {
        "DYNAMICCL_HOST": platform.node(),
        "DYNAMICCL_MACHINE": "loopback",
        "DYNAMICCL_SYSTEMS": " ".join(f"{code}={system}" for code in nccl_codes),
        "DYNAMICCL_TABLES": str(artifact.resolve() / "tables"),
        "DYNAMICCL_INDEX": file_sha256(artifact / INDEX_NAME)[:16],
    }


def fake_nccl(library: Path) -> Path:
    """A libnccl that says its version, and has nothing else."""
    says = f"int ncclGetVersion(int *version) {{ *version = {NCCL_CODE}; return 0; }}\n"
    return compiled(library, says)


def compiled(library: Path, source: str, *options: str) -> Path:
    """A shared library of C."""
    command = ["cc", "-shared", "-fPIC", *options, "-o", str(library), "-x", "c", "-"]
    subprocess.run(command, input=source.encode(), check=True)
    return library


@cache
def _load_nccl() -> "TemporaryDirectory[str]":
    """Load a stand-in NCCL, once a process, where the tuner looks; it is removed with that."""
    folder = TemporaryDirectory(prefix="dynamiccl-loopback-")
    library = fake_nccl(Path(folder.name, "libnccl.so"))
    # No logger of an NCCL calls the tuner, so it looks among the program's own symbols.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return folder


def write_bare_artifact(
    artifact: Path,
    system: str,
    *tables: DecisionTable,
    machines: Mapping[str, str] | None = None,
) -> None:
    """Write an artifact of tables, without policy: all that the plugin reads.

    `machines`: fingerprint -> system.
    """
    digests = {}
    for table in tables:
        key = (system, table.num_nodes, table.num_ranks)
        path = artifact / relative_path(*key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(table.to_bytes())
        digests[key] = file_sha256(path)
    PluginIndex(_NO_MANIFEST, machines or {}, noise_ppm={}, tables=digests).write(artifact)
