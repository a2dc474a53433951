"""The file of a decision table: what it holds, and what is found when it is damaged."""

from pathlib import Path

import numpy as np
import pytest

from dynamiccl.errors import CorruptFile, MissingPath, UserError
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.schedule import fnv1a
from dynamiccl.serve.table import (
    ENTRY,
    HEADER_BYTES,
    MAX_BINS,
    MAX_FILE_BYTES,
    DecisionTable,
    relative_path,
)
from dynamiccl.sizes import bin_center_bytes, size_bin
from tests.serve.tables import random_table

RING = Config(Algorithm.Ring, Protocol.LL128, 8)


def table_of(config: Config | None, *, first_bin: int = 80, num_bins: int = 3) -> DecisionTable:
    return DecisionTable.from_configs(
        [[config] * num_bins] * 5, num_nodes=1, num_ranks=8, first_bin=first_bin
    )


def test_round_trip() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        num_nodes, first_bin = int(random.integers(1, 1001)), int(random.integers(201))
        table = random_table(
            random,
            num_nodes=num_nodes,
            num_ranks=num_nodes * int(random.integers(1, 73)),
            first_bin=first_bin,
            num_bins=int(random.integers(1, 50)),
        )
        again = DecisionTable.from_bytes(table.to_bytes())
        assert again == table
        assert again.to_bytes() == table.to_bytes()


def test_every_flipped_bit_and_truncation_is_found_and_the_longest_file_is_known() -> None:
    data = table_of(RING).to_bytes()
    flipped = (
        bytes(byte ^ (1 << bit) * (index == at) for index, byte in enumerate(data))
        for at in range(len(data))
        for bit in range(8)
    )
    for damaged in (*flipped, *(data[:size] for size in range(len(data))), data + b"\0"):
        with pytest.raises(CorruptFile, match=r"nodes1_ranks8\.dct is not a usable decision table"):
            DecisionTable.from_bytes(damaged, where="nodes1_ranks8.dct")
    assert len(table_of(RING, first_bin=0, num_bins=MAX_BINS).to_bytes()) == MAX_FILE_BYTES


@pytest.mark.parametrize(
    ("config", "column", "values", "problem"),
    [
        (RING, 0, (7, 254), "outside the vocabulary"),
        (RING, 1, (3, 254), "outside the vocabulary"),
        (RING, 2, (65, 200), "outside the vocabulary"),
        (RING, 3, (2, 255), "outside the vocabulary"),
        (RING, 3, (0,), "if, and only if"),
        (None, 3, (1,), "if, and only if"),
    ],
)
def test_entry_that_cannot_be_is_found_under_a_good_checksum(
    config: Config | None, column: int, values: tuple[int, ...], problem: str
) -> None:
    for value in values:
        data = bytearray(table_of(config).to_bytes()[:-8])
        data[HEADER_BYTES + column] = value
        with pytest.raises(CorruptFile, match=problem):
            DecisionTable.from_bytes(bytes(data) + fnv1a(bytes(data)).to_bytes(8, "little"))


def test_lookup_inside_and_outside_the_bins() -> None:
    table = table_of(RING)
    sizes = [0, 1 << 70, *(bin_center_bytes(index) for index in (79, 80, 82, 83))]
    found = [table.lookup(Collective.AllReduce, size) for size in sizes]
    assert found == [None, None, None, RING, RING, None]
    assert table.lookup(Collective.AlltoAll, sizes[3]) is None
    # Size zero has no bin.
    table = table_of(RING, first_bin=0)
    assert size_bin(0) == -1
    assert table.lookup(Collective.AllReduce, 0) is None
    assert table.lookup(Collective.AllReduce, 1) == RING
    assert table_of(ABSTAIN) == table_of(None)
    part = Config(protocol=Protocol.LL, chunk_bytes=1 << 19)  # and the rest is NCCL's own
    assert table_of(part).lookup(Collective.Broadcast, 1 << 20) == part


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (Config(Algorithm.Tree, Protocol.LL), "Broadcast has no Tree"),
        (Config(num_channels=65), "outside the vocabulary"),
        (Config(num_channels=300), "does not fit"),
        (Config(chunk_bytes=1 << 31), "does not fit"),
        (Config(chunk_bytes=-1), "outside the vocabulary"),
    ],
)
def test_what_nccl_cannot_run_is_never_written(config: Config, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        table_of(config)


@pytest.mark.parametrize(
    ("num_nodes", "num_ranks", "first_bin", "shape"),
    [
        *((2, 7, 0, (5, 1)), (0, 0, 0, (5, 1)), (1, 1 << 31, 0, (5, 1)), (1, 8, -1, (5, 1))),
        *((1, 8, 0, (5, 0)), (1, 8, 248, (5, 2)), (1, 8, 0, (4, 1))),
    ],
)
def test_impossible_shapes_are_refused(
    num_nodes: int, num_ranks: int, first_bin: int, shape: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match=r"do not lie alike|are outside|are not of five"):
        DecisionTable(
            num_nodes=num_nodes,
            num_ranks=num_ranks,
            first_bin=first_bin,
            entries=np.zeros(shape, dtype=ENTRY),
        )


def test_read_names_the_file_and_what_was_checked_cannot_be_changed(tmp_path: Path) -> None:
    path = tmp_path / relative_path("h100", 1, 8)
    with pytest.raises(MissingPath, match=r"nodes1_ranks8\.dct; a policy has none:"):
        DecisionTable.read(path)
    path.parent.mkdir(parents=True)
    path.write_bytes(table_of(RING).to_bytes())
    assert DecisionTable.read(path) == table_of(RING)
    with pytest.raises(ValueError, match="read-only"):
        DecisionTable.read(path).entries["algorithm"] = 99
    for system in ("", "..", "a/b", "H100", "a b", "-x"):
        with pytest.raises(UserError, match="cannot name a table directory"):
            relative_path(system, 1, 8)


def test_fnv1a_of_known_strings() -> None:
    # Published test vectors of the FNV reference (draft-eastlake-fnv, appendix C).
    assert fnv1a(b"") == 0xCBF29CE484222325
    assert fnv1a(b"foobar") == 0x85944171F73967E8
