r"""The decision table that the plugin looks up, and its file format.

No network runs inside a job: it is asked beforehand about each (collective, size bin) of a
communicator shape. Ranks that read the same integers answer alike, in tens of nanoseconds.

One file per shape, `tables/<system>/nodes<N>_ranks<R>.dct`, all numbers little-endian:

    offset  bytes  field
    0       8      magic "DCTABLE\0"
    8       4      uint32 format version    1
    12      4      int32 num_nodes          NCCL's own nNodes
    16      4      int32 num_ranks
    20      4      int32 ranks_per_node     num_ranks = num_nodes x ranks_per_node
    24      4      int32 first_bin          of dynamiccl.sizes.size_bin
    28      4      int32 num_bins
    32      4      int32 num_collectives    5
    36      4      int32 bins_per_octave    4
    40      4      uint32 entry_bytes       8
    44      ...    entries [collective][bin], row-major; see ENTRY
    end-8   8      uint64 FNV-1a of every byte before it
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from dynamiccl import nccl
from dynamiccl.errors import CorruptFile, MissingPath, UserError
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.schedule import AUTO, config_columns, fnv1a
from dynamiccl.sizes import BINS_PER_OCTAVE, MAX_SIZE_BITS, size_bin

MAGIC: Final = b"DCTABLE\0"
FORMAT_VERSION: Final = 1
MAX_BINS: Final = size_bin((1 << MAX_SIZE_BITS) - 1) + 1
#: `num_channels` and `chunk_bytes` are 0 where NCCL decides; `act` is 0 to abstain.
ENTRY: Final = np.dtype(
    [
        ("algorithm", "i1"),
        ("protocol", "i1"),
        ("num_channels", "i1"),
        ("act", "i1"),
        ("chunk_bytes", "<i4"),
    ]
)
_HEADER: Final = struct.Struct("<8sI7iI")
_CHECKSUM: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _HEADER.size
CHECKSUM_BYTES: Final = _CHECKSUM.size
#: The plugin refuses a longer file unread.
MAX_FILE_BYTES: Final = (
    HEADER_BYTES + nccl.NUM_TUNED_COLLECTIVES * MAX_BINS * ENTRY.itemsize + CHECKSUM_BYTES
)
#: DYNAMICCL_SYSTEM: a plain directory name, the same on any file system.
_SYSTEM: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,119}")


def relative_path(system: str, num_nodes: int, num_ranks: int) -> str:
    """A table's path in an artifact; raises UserError for a bad system name.

    >>> relative_path("h100-ib", 2, 16)
    'tables/h100-ib/nodes2_ranks16.dct'
    """
    if not _SYSTEM.fullmatch(system):
        raise UserError(
            f"system name '{system}' cannot name a table directory; use lower-case letters, "
            "digits, '.', '_' and '-', and begin with a letter or digit"
        )
    return f"tables/{system}/nodes{num_nodes}_ranks{num_ranks}.dct"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecisionTable:
    """A communicator shape's decisions; raises ValueError for what the plugin would refuse."""

    num_nodes: int
    num_ranks: int
    #: Bins outside first_bin .. first_bin + num_bins - 1 abstain.
    first_bin: int
    #: ENTRY records, [5 collectives][num_bins]; read-only.
    entries: npt.NDArray[np.void]

    def __post_init__(self) -> None:
        reason = _shape_problem(self) or _entry_problem(self.entries)
        if reason:
            raise ValueError(reason)
        # A copy: what was checked must not change.
        entries = np.array(self.entries, dtype=ENTRY)
        entries.setflags(write=False)
        object.__setattr__(self, "entries", entries)

    @property
    def num_bins(self) -> int:
        """Size bins of each collective."""
        return int(self.entries.shape[-1])

    @classmethod
    def from_configs(
        cls,
        configs: Sequence[Sequence[Config | None]],
        *,
        num_nodes: int,
        num_ranks: int,
        first_bin: int = 0,
    ) -> Self:
        """From one row per tuned collective; None abstains. Raises ValueError as the class does."""
        rows = [[config_columns(config or ABSTAIN) for config in row] for row in configs]
        try:
            entries = np.array(rows, dtype=ENTRY)
        except OverflowError as error:
            raise ValueError(f"a config does not fit a table entry: {error}") from error
        return cls(num_nodes=num_nodes, num_ranks=num_ranks, first_bin=first_bin, entries=entries)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "the table") -> Self:
        """Read a table file's bytes; raises CorruptFile, naming `where`."""
        try:
            _, _, num_nodes, num_ranks, _, first_bin, *_ = _HEADER.unpack_from(data)
            body = np.frombuffer(data[HEADER_BYTES:-CHECKSUM_BYTES], dtype=ENTRY)
            table = cls(
                num_nodes=num_nodes,
                num_ranks=num_ranks,
                first_bin=first_bin,
                entries=body.reshape(nccl.NUM_TUNED_COLLECTIVES, -1),
            )
            # One table, one file: a file of other bytes was not written by us.
            reason = "" if table.to_bytes() == data else "its header or checksum does not fit"
        except (struct.error, ValueError) as error:
            reason = str(error)
        if reason:
            raise CorruptFile(f"{where} is not a usable decision table: {reason}; export it again")
        return table

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a table file; raises MissingPath and CorruptFile."""
        if not path.is_file():
            advice = "a policy has none: make an artifact of it with 'dynamiccl-deploy export'"
            raise MissingPath("decision table", path, advice)
        return cls.from_bytes(path.read_bytes(), where=str(path))

    def to_bytes(self) -> bytes:
        """The file's bytes; equal tables give equal bytes."""
        header = _HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            self.num_nodes,
            self.num_ranks,
            self.num_ranks // self.num_nodes,
            self.first_bin,
            self.num_bins,
            nccl.NUM_TUNED_COLLECTIVES,
            BINS_PER_OCTAVE,
            ENTRY.itemsize,
        )
        data = header + self.entries.tobytes()
        return data + _CHECKSUM.pack(fnv1a(data))

    def at(self, collective: Collective, index: int) -> Config | None:
        """The config for calls of size bin `index`; None = abstain."""
        column = index - self.first_bin
        if not collective.tunable or not 0 <= column < self.num_bins:
            return None
        entry = self.entries[collective, column]
        return _config(entry) if entry["act"] else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecisionTable) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())


def _config(entry: Any) -> Config:
    algorithm, protocol, num_channels, _, chunk_bytes = entry.item()
    return Config(
        algorithm=None if algorithm == AUTO else Algorithm(algorithm),
        protocol=None if protocol == AUTO else Protocol(protocol),
        num_channels=num_channels or None,
        chunk_bytes=chunk_bytes or None,
    )


def _shape_problem(table: DecisionTable) -> str | None:
    nodes, ranks = table.num_nodes, table.num_ranks
    if nodes < 1 or not nodes <= ranks < 1 << 31 or ranks % nodes != 0:
        return f"{ranks} ranks do not lie alike on {nodes} nodes"
    last = table.first_bin + table.num_bins
    if table.first_bin < 0 or table.num_bins < 1 or last > MAX_BINS:
        return f"bins {table.first_bin} .. {last - 1} are outside 0 .. {MAX_BINS - 1}"
    if table.entries.shape != (nccl.NUM_TUNED_COLLECTIVES, table.num_bins):
        return f"entries of shape {table.entries.shape} are not of five collectives"
    return None


def _entry_problem(entries: npt.NDArray[np.void]) -> str | None:
    for collective in (each for each in Collective if each.tunable):
        for entry in np.unique(entries[collective]):
            reason = _reason_against(collective, entry)
            if reason:
                return f"entry {entry.item()} of {collective.wire}: {reason}"
    return None


def _reason_against(collective: Collective, entry: Any) -> str | None:
    algorithm, protocol, num_channels, act, chunk_bytes = entry.item()
    in_range = (
        AUTO <= algorithm < nccl.NUM_ALGORITHMS
        and AUTO <= protocol < nccl.NUM_PROTOCOLS
        and 0 <= num_channels <= nccl.MAX_CHANNELS
        and act in {0, 1}
        and chunk_bytes >= 0
    )
    if not in_range:
        return "a number is outside the vocabulary"
    config = _config(entry)
    if (config == ABSTAIN) == bool(act):
        return "an entry acts if, and only if, it sets a knob"
    return nccl.invalid_reason(config, collective)
