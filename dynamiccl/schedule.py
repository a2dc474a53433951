r"""The schedule of configs that the tuner plugin applies in sweep mode, and the plugin's report.

One nccl-tests process measures a whole grid (2.16 and later, `src/common.cu`): the warm-up; then
for each cycle of `-N`, each size, out-of-place and then in-place: one synchronising call, n timed
calls, c check calls. A *block* is one (cycle, size): all its calls get one Config. Every rank plays
the same file.

Schedule file, all numbers little-endian, packed:

    offset  bytes  field
    0       8      magic "DCSCHED\0"
    8       4      uint32 format version
    12      4      int32 num_nodes          NCCL's own nNodes
    16      4      int32 num_ranks
    20      4      int32 collective         dynamiccl.nccl.Collective
    24      4      int32 halves
    28      4      int32 calls_per_half
    32      4      int32 number of warm-up runs
    36      4      int32 number of sizes
    40      4      int32 number of cycles
    44      4      int32 number of configs
    48      ...    warm-up runs: uint64 nBytes, uint64 calls
    ...     ...    sizes: uint64 nBytes
    ...     ...    configs, each once: int8 algorithm, protocol (-1: AUTO), num_channels, act,
                   int32 chunk_bytes (0: NCCL decides); act is 0 for ABSTAIN alone
    ...     ...    blocks [cycle][size]: uint16 index of a config
    end-8   8      uint64 FNV-1a of every byte before it

Report file, which one rank of a launch writes while it plays (`serve/plugin/sweep/player.cpp`):

    0       8      magic "DCPLAYS\0"
    8       4      uint32 format version
    12      4      int32 number of blocks
    16      8      uint64 checksum of the schedule
    24      8      uint64 calls counted
    32      8      uint64 the call that did not fit, from 1; 0 when all did
    40      24     zero
    64      ...    chunk sizes [block]: uint32
    ...     ...    states [block]: uint8, see BlockState
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Final, Self

from dynamiccl.errors import CorruptFile, InvalidSweep
from dynamiccl.nccl import ABSTAIN, Collective, Config

SCHEDULE_MAGIC: Final = b"DCSCHED\0"
SCHEDULE_VERSION: Final = 1
REPORT_MAGIC: Final = b"DCPLAYS\0"
REPORT_VERSION: Final = 1
#: The plugin refuses more; 2^20 are 512 configs x 40 sizes x 51 repeats.
MAX_BLOCKS: Final = 1 << 20
MAX_CONFIGS: Final = 1 << 12
MAX_SIZES: Final = 1 << 12
MAX_WARMUP_RUNS: Final = 1 << 12
#: Of half a block, or a warm-up run.
MAX_CALLS: Final = 1 << 24
#: FNV-1a, 64 bits (draft-eastlake-fnv): only a guard against damaged files.
FNV_OFFSET: Final = 0xCBF29CE484222325
FNV_PRIME: Final = 0x100000001B3
AUTO: Final = -1
_INT32_MAX: Final = (1 << 31) - 1
HEADER: Final = struct.Struct("<8sI9i")
_RUN: Final = struct.Struct("<QQ")
_CONFIG: Final = struct.Struct("<4bi")
_SIZE: Final = struct.Struct("<Q")
_BLOCK: Final = struct.Struct("<H")
_CHECKSUM_BYTES: Final = 8
REPORT: Final = struct.Struct("<8sIi3Q24x")
_REPORT_BLOCK_BYTES: Final = 4 + 1
MAX_SCHEDULE_BYTES: Final = (
    HEADER.size
    + MAX_WARMUP_RUNS * _RUN.size
    + MAX_SIZES * _SIZE.size
    + MAX_CONFIGS * _CONFIG.size
    + MAX_BLOCKS * _BLOCK.size
    + _CHECKSUM_BYTES
)


class BlockState(IntEnum):
    """The state of a block in the report."""

    NOT_REACHED = 0
    #: The schedule asks for NCCL's own choice.
    ABSTAINED = 1
    #: Every call so far got the config.
    PLAYED = 2
    #: No cell of NCCL's cost table that the config could win; NCCL's own choice ran.
    UNAVAILABLE = 3
    MIXED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Which Config each call of one nccl-tests process gets.

    Sizes are nccl-tests' size column: element size x count, x ranks for AllGather and
    ReduceScatter. Raises InvalidSweep for what the plugin would refuse.
    """

    collective: Collective
    num_ranks: int
    num_nodes: int
    #: (nBytes, calls) of runs of equal calls before the first block; NCCL's own choice.
    warmup: tuple[tuple[int, int], ...]
    #: Out-of-place and in-place; 1 where a benchmark has no in-place half.
    halves: int = 2
    #: 1 synchronising + n timed + c check calls.
    calls_per_half: int
    sizes: tuple[int, ...]
    #: Shape [cycle][size]; ABSTAIN is NCCL's own choice.
    cycles: tuple[tuple[Config, ...], ...]

    def __post_init__(self) -> None:
        problem = next(_problems(self), None)
        if problem is not None:
            raise InvalidSweep(problem)

    @property
    def num_blocks(self) -> int:
        """In the order of nccl-tests' rows: cycle by cycle, all sizes."""
        return len(self.cycles) * len(self.sizes)

    @property
    def content_hash(self) -> str:
        """DYNAMICCL_SCHEDULE_HASH: the file's checksum, 16 hexadecimal digits."""
        return f"{int.from_bytes(self.to_bytes()[-_CHECKSUM_BYTES:], 'little'):016x}"

    def to_bytes(self) -> bytes:
        """Equal schedules give equal bytes."""
        blocks = list(chain.from_iterable(self.cycles))
        index = {config: number for number, config in enumerate(dict.fromkeys(blocks))}
        counts = (len(self.warmup), len(self.sizes), len(self.cycles), len(index))
        shape = (self.num_nodes, self.num_ranks, self.collective, self.halves, self.calls_per_half)
        data = b"".join(
            (
                HEADER.pack(SCHEDULE_MAGIC, SCHEDULE_VERSION, *shape, *counts),
                *(_RUN.pack(*run) for run in self.warmup),
                struct.pack(f"<{len(self.sizes)}Q", *self.sizes),
                *(_CONFIG.pack(*config_columns(config)) for config in index),
                struct.pack(f"<{len(blocks)}H", *map(index.__getitem__, blocks)),
            )
        )
        return data + fnv1a(data).to_bytes(_CHECKSUM_BYTES, "little")


def totals_of(data: bytes, *, where: str = "the schedule") -> tuple[str, int]:
    """`content_hash` and all calls of a communicator; raises CorruptFile, naming `where`."""
    body, checksum = data[:-_CHECKSUM_BYTES], int.from_bytes(data[-_CHECKSUM_BYTES:], "little")
    if len(body) < HEADER.size or fnv1a(body) != checksum:
        raise CorruptFile(f"{where} is damaged: its checksum does not match; run the launch again")
    *_, halves, calls_per_half, num_runs, num_sizes, num_cycles, _ = HEADER.unpack_from(body)
    runs = _RUN.iter_unpack(body[HEADER.size : HEADER.size + num_runs * _RUN.size])
    in_blocks = num_cycles * num_sizes * halves * calls_per_half
    return f"{checksum:016x}", sum(calls for _, calls in runs) + in_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayReport:
    """What the plugin applied, as one rank saw it; written continuously, so it survives a kill."""

    schedule_hash: str
    #: Exact once the communicator was freed; before that as of the last untimed call.
    calls: int
    states: tuple[BlockState, ...]
    #: The smallest that NCCL was given in each block; 0: NCCL kept its own.
    chunk_bytes: tuple[int, ...]
    #: From 1: the call that was not as expected; from it on nothing was played.
    stopped_at_call: int | None = None

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "the sweep report") -> Self:
        """Raises CorruptFile, naming `where`, for anything odd."""
        header = REPORT.unpack_from(data.ljust(REPORT.size, b"\0"))
        magic, version, num_blocks, digest, calls, stopped = header
        states_at = len(data) - num_blocks
        problem = ""
        if len(data) < REPORT.size:
            problem = f"{len(data)} bytes are too few"
        elif not any(magic):
            problem = "the plugin had only begun it"
        elif (magic, version) != (REPORT_MAGIC, REPORT_VERSION):
            problem = f"it does not begin with DCPLAYS and format version {REPORT_VERSION}"
        elif num_blocks < 1 or len(data) != REPORT.size + num_blocks * _REPORT_BLOCK_BYTES:
            problem = f"{len(data)} bytes do not fit {num_blocks} blocks"
        elif max(data[states_at:]) > max(BlockState):
            problem = f"{max(data[states_at:])} is no block state"
        if problem:
            raise CorruptFile(
                f"{where} is not a usable sweep report: {problem}; run the launch again"
            )
        return cls(
            schedule_hash=f"{digest:016x}",
            calls=calls,
            states=tuple(map(BlockState, data[states_at:])),
            chunk_bytes=struct.unpack(f"<{num_blocks}I", data[REPORT.size : states_at]),
            stopped_at_call=stopped or None,
        )


def fnv1a(data: bytes) -> int:
    """64-bit FNV-1a hash.

    >>> hex(fnv1a(b"a"))
    '0xaf63dc4c8601ec8c'
    """
    digest = FNV_OFFSET
    for byte in data:
        digest = (digest ^ byte) * FNV_PRIME & 0xFFFF_FFFF_FFFF_FFFF
    return digest


def config_columns(config: Config) -> tuple[int, int, int, int, int]:
    """As in schedules and tables; the fourth, `act`, is 0 for ABSTAIN alone."""
    return (
        AUTO if config.algorithm is None else config.algorithm,
        AUTO if config.protocol is None else config.protocol,
        config.num_channels or 0,
        int(config != ABSTAIN),
        config.chunk_bytes or 0,
    )


def _problems(schedule: Schedule) -> Iterator[str]:
    """What a sweep file may ask for and the plugin refuses; its grid has only valid configs."""
    if any(len(cycle) != len(schedule.sizes) for cycle in schedule.cycles):
        yield "give each cycle of a schedule one config for each size, ABSTAIN for NCCL's own"
    configs = set(chain.from_iterable(schedule.cycles))
    chunk_bytes = max((config.chunk_bytes or 0 for config in configs), default=0)
    if chunk_bytes > _INT32_MAX:
        yield f"a chunk of {chunk_bytes} bytes is outside 1..{_INT32_MAX}: take it out"
    for what, count, most in (
        ("calls of half a block", schedule.calls_per_half, MAX_CALLS),
        *(("calls of a warm-up run", calls, MAX_CALLS) for _, calls in schedule.warmup),
        ("sizes", len(schedule.sizes), MAX_SIZES),
        ("blocks", schedule.num_blocks, MAX_BLOCKS),
        ("distinct configs", len(configs), MAX_CONFIGS),
    ):
        if not 1 <= count <= most:
            yield (
                f"a schedule of {count} {what} cannot be played; spread them over launches of 1 to "
                f"{most} {what}"
            )
