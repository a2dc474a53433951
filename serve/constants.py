r"""Tuning constants that replace those of NCCL's own cost model (files and formats).

From NCCL 2.28 on a tuner may change them when a communicator is made; NCCL then decides by itself,
and nothing of ours runs in a call (serve/plugin/tuner/constants.h). One file for each communicator
shape, `constants/<system>/nodes<N>_ranks<R>.dcc`, all numbers little-endian:

    offset  bytes  field
    0       8      magic "DCCONST\0"
    8       4      uint32 format version
    12      4      int32 num_nodes
    16      4      int32 num_ranks
    20      4      uint32 count, 144
    24      1152   doubles in the order of `FIELDS`, row-major; 0 = NCCL's own stays
    1176    8      uint64 FNV-1a of every byte before it

Format history: 1, the first.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from dynamiccl.errors import CorruptFile, MissingPath, UserError
from dynamiccl.schedule import fnv1a
from dynamiccl.serve.table import relative_path as table_path

MAGIC: Final = b"DCCONST\0"
FORMAT_VERSION: Final = 1
#: NCCL's name -> shape (`ncclTunerConstants_v5_t`, v2.28.3-1 `plugin/tuner/tuner_v5.h`).
#: Latencies in microseconds, ceilings in GB/s. Algorithms and protocols as in `dynamiccl.nccl`;
#: links: NVLink, PCI, network; GPUs: Volta, Ampere, Hopper, Blackwell; scales: 1, 2, more nodes.
FIELDS: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {
        "baseLatencies": (7, 3),
        "hwLatencies": (3, 7, 3),
        "llMaxBws": (4, 3),
        "perChMaxRingLL128Bws": (4, 3),
        "perChMaxTreeLL128Bws": (4, 3),
        "perChMaxTreeBws": (4, 3),
        "perChMaxNVLSTreeBws": (4, 3),
    }
)
NUM_CONSTANTS: Final = sum(math.prod(shape) for shape in FIELDS.values())
#: The plugin refuses anything above.
_MOST: Final = 1e12
_HEADER: Final = struct.Struct("<8sIiiI")
_CHECKSUM: Final = struct.Struct("<Q")


def relative_path(system: str, num_nodes: int, num_ranks: int) -> str:
    """Where an artifact keeps the constants of one communicator shape.

    Raises UserError when `system` cannot be the directory's name.

    >>> relative_path("h100-ib", 2, 16)
    'constants/h100-ib/nodes2_ranks16.dcc'
    """
    table = table_path(system, num_nodes, num_ranks)
    return f"constants/{table.removeprefix('tables/').removesuffix('.dct')}.dcc"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TuningConstants:
    """Constants for one communicator shape; raises ValueError for what the plugin would refuse."""

    num_nodes: int
    num_ranks: int
    #: (144,) in the order of `FIELDS`; 0 = NCCL's own stays.
    values: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.values.shape != (NUM_CONSTANTS,):
            raise ValueError(f"{self.values.shape} constants, not ({NUM_CONSTANTS},)")
        if not ((self.values >= 0) & (self.values <= _MOST)).all():
            raise ValueError("a constant is not a finite, positive number")
        if self.num_nodes < 1 or self.num_ranks < 1 or self.num_ranks % self.num_nodes:
            raise ValueError(f"{self.num_ranks} ranks do not fill {self.num_nodes} nodes")

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, num_nodes: int, num_ranks: int) -> Self:
        """From nested lists by NCCL's names; a name or a number that is missing stays NCCL's own.

        `null` and 0 both mean that. Raises UserError, which names the field.
        """
        unknown = sorted(set(data) - set(FIELDS))
        if unknown:
            raise UserError(
                f"NCCL has no tuning constants '{unknown[0]}'; choose from {', '.join(FIELDS)}"
            )
        parts = []
        for name, shape in FIELDS.items():
            try:
                given = np.array(data.get(name, np.zeros(shape)), dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise UserError(f"{name} is not made of numbers in equal rows: {error}") from error
            given = np.nan_to_num(given, nan=0.0, posinf=np.inf)
            if given.shape != shape:
                raise UserError(f"{name} has shape {given.shape}, not {shape}")
            if not ((given >= 0) & (given <= _MOST)).all():
                raise UserError(f"{name} holds {given.flat[0]:g} or another impossible number")
            parts.append(given.reshape(-1))
        return cls(num_nodes=num_nodes, num_ranks=num_ranks, values=np.concatenate(parts))

    def to_json(self) -> dict[str, Any]:
        """Nested lists by NCCL's names; null = NCCL's own."""
        found, first = {}, 0
        for name, shape in FIELDS.items():
            part = self.values[first : first + math.prod(shape)]
            first += math.prod(shape)
            shown = part.reshape(shape).astype(object)
            shown[shown == 0] = None
            found[name] = shown.tolist()
        return found

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Self:
        """Read a file's bytes; raises CorruptFile, which names `where`, for anything odd."""
        body = 8 * NUM_CONSTANTS
        sound = len(data) == _HEADER.size + body + _CHECKSUM.size
        sound = sound and _CHECKSUM.unpack(data[-8:])[0] == fnv1a(data[:-8])
        if sound:
            magic, version, nodes, ranks, count = _HEADER.unpack(data[: _HEADER.size])
            sound = (magic, version, count) == (MAGIC, FORMAT_VERSION, NUM_CONSTANTS)
        try:
            if sound:
                values = np.frombuffer(data, dtype="<f8", count=count, offset=_HEADER.size)
                return cls(num_nodes=nodes, num_ranks=ranks, values=values)
        except ValueError as error:
            raise CorruptFile(f"{where} holds no usable tuning constants: {error}") from error
        raise CorruptFile(f"{where} holds no usable tuning constants; write them again")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file; raises MissingPath, or CorruptFile with its path."""
        if not path.is_file():
            raise MissingPath("tuning constants", path, "see 'dynamiccl-deploy constants --help'")
        return cls.from_bytes(path.read_bytes(), where=str(path))

    def to_bytes(self) -> bytes:
        """The file's bytes."""
        shape = (self.num_nodes, self.num_ranks)
        header = _HEADER.pack(MAGIC, FORMAT_VERSION, *shape, NUM_CONSTANTS)
        data = header + self.values.astype("<f8").tobytes()
        return data + _CHECKSUM.pack(fnv1a(data))


def read_json(path: Path, *, num_nodes: int, num_ranks: int) -> TuningConstants:
    """Constants from a JSON file; raises MissingPath, CorruptFile and UserError."""
    if not path.is_file():
        names = ", ".join(FIELDS)
        raise MissingPath("tuning constants", path, f"a JSON object with some of {names}")
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptFile(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CorruptFile(f"{path} is not a JSON object")
    return TuningConstants.from_json(data, num_nodes=num_nodes, num_ranks=num_ranks)
