import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiccl import schedule
from dynamiccl.errors import CorruptFile, InvalidSweep
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol

RING = Config(Algorithm.Ring, Protocol.LL128, 8)
TREE = Config(Algorithm.Tree, Protocol.Simple, 4, 1 << 16)
GOOD = schedule.Schedule(
    collective=Collective.AllReduce,
    num_ranks=16,
    num_nodes=2,
    warmup=((1024, 5), (2048, 5)),
    calls_per_half=22,
    sizes=(1024, 4096),
    cycles=((RING, ABSTAIN), (TREE, RING), (ABSTAIN, TREE)),
)


def test_blocks_and_calls_are_counted_within_limits() -> None:
    """The layout is what the plugin reads: tests/serve/test_sweep.py."""
    data = GOOD.to_bytes()
    assert data[-8:] == schedule.fnv1a(data[:-8]).to_bytes(8, "little")
    assert GOOD.num_blocks == 6
    assert schedule.totals_of(data) == (GOOD.content_hash, 10 + 6 * 2 * 22)
    cycles = ((ABSTAIN,) * schedule.MAX_SIZES,) * (schedule.MAX_BLOCKS // schedule.MAX_SIZES)
    longest = dataclasses.replace(GOOD, sizes=(1,) * schedule.MAX_SIZES, cycles=cycles)
    assert longest.num_blocks == schedule.MAX_BLOCKS
    assert len(longest.to_bytes()) <= schedule.MAX_SCHEDULE_BYTES


def test_what_cannot_be_played_is_refused() -> None:
    for changes, reason in (
        ({"warmup": ((1024, (1 << 24) + 1),)}, "16777217 calls of a warm-up run cannot be played"),
        ({"calls_per_half": 0}, "0 calls of half a block cannot be played; spread them over"),
        ({"calls_per_half": (1 << 24) + 1}, "launches of 1 to 16777216 calls"),
        ({"sizes": (), "cycles": ((),)}, "a schedule of 0 sizes cannot"),
        ({"cycles": ((Config(chunk_bytes=1 << 31), RING),)}, "a chunk of 2147483648 bytes"),
        ({"cycles": ()}, "a schedule of 0 blocks cannot"),
        ({"cycles": ((RING, RING), (RING,))}, "give each cycle of a schedule one config"),
        (
            {"cycles": ((RING, RING),) * (schedule.MAX_BLOCKS // 2 + 1)},
            "launches of 1 to 1048576 blocks",
        ),
        (
            {
                "cycles": tuple(
                    (Config(chunk_bytes=i), RING) for i in range(1, schedule.MAX_CONFIGS + 1)
                )
            },
            "4097 distinct configs .* 1 to 4096",
        ),
    ):
        with pytest.raises(InvalidSweep, match=reason):
            dataclasses.replace(GOOD, **changes)


@given(byte=st.integers(0), bit=st.integers(0, 7))
def test_flipped_bit_is_found(byte: int, bit: int) -> None:
    data = bytearray(GOOD.to_bytes())
    data[byte % len(data)] ^= 1 << bit
    with pytest.raises(CorruptFile, match="its checksum does not match"):
        schedule.totals_of(bytes(data))


def test_every_truncation_is_found() -> None:
    data = GOOD.to_bytes()
    for size in range(len(data)):
        with pytest.raises(CorruptFile, match=r"x/schedule is damaged"):
            schedule.totals_of(data[:size], where="x/schedule")


def report_bytes(*, states: bytes = b"\1\2", stopped: int = 0, blocks: int = 2) -> bytes:
    header = struct.pack("<8sIi3Q24x", schedule.REPORT_MAGIC, 1, blocks, 0xAB, 77, stopped)
    assert len(header) == schedule.REPORT.size
    return header + struct.pack("<2I", 0, 65024) + states


def test_report_of_an_orderly_end_and_of_a_mismatch() -> None:
    report = schedule.PlayReport.from_bytes(report_bytes())
    assert report.states == (schedule.BlockState.ABSTAINED, schedule.BlockState.PLAYED)
    assert report.chunk_bytes == (0, 65024)
    assert report.schedule_hash == "00000000000000ab"
    assert report.calls == 77
    assert report.stopped_at_call is None
    assert schedule.PlayReport.from_bytes(report_bytes(stopped=78)).stopped_at_call == 78


def test_what_is_not_a_report_is_refused() -> None:
    for data, reason in (
        (b"", "0 bytes are too few"),
        (bytes(schedule.REPORT.size + 10), "had only begun it"),
        (b"x" + report_bytes()[1:], "does not begin with DCPLAYS"),
        (report_bytes(states=b"\0"), "do not fit 2 blocks"),
        (report_bytes(blocks=0), "do not fit 0 blocks"),
        (report_bytes(states=b"\0\5"), "5 is no block state"),
    ):
        with pytest.raises(CorruptFile, match=reason):
            schedule.PlayReport.from_bytes(data)
