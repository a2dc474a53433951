"""How a job on a GPU is judged, without one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamiccl.nccl import Algorithm, Config, Protocol
from tests.collect.calls.files import record
from tests.gpu.nccl_job import (
    Records,
    all_alike,
    choices_of,
    is_loaded,
    misread,
    records_by_rank,
    sums_are_exact,
    table_changes,
)

RING = Config(Algorithm.Ring, Protocol.Simple, 2)


def records(*tables: int, **columns: Any) -> Records:
    return np.array([record(i, 0, table=table, **columns) for i, table in enumerate(tables)])


@pytest.mark.parametrize(
    ("log", "loaded"),
    [
        ("host:1:1 [0] NCCL INFO TUNER/Plugin: Using DynamICCL (v5)", True),
        ("host:1:1 [0] NCCL INFO TUNER/Plugin: Using Example (v5)", False),
        ("host:1:1 [0] NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so", False),
    ],
)
def test_only_our_tuner_counts_as_loaded(log: str, loaded: bool) -> None:
    assert is_loaded(log) is loaded


def test_changes_of_table_are_found_with_their_calls() -> None:
    assert table_changes(records(0, 0, 1, 1, 4)) == [(0, 0), (2, 1), (4, 4)]


def test_ranks_that_switch_at_different_calls_are_told_apart() -> None:
    assert all_alike([table_changes(records(0, 1)), table_changes(records(0, 1))])
    assert not all_alike([table_changes(records(0, 1, 1)), table_changes(records(0, 0, 1))])


def test_calls_that_do_not_run_what_the_table_says_are_named() -> None:
    assert misread(records(0, 1, 1), {1: RING}) == []
    (problem,) = misread(records(0, 1, protocol=0), {1: RING})
    assert "under table 1: Ring/LL" in problem


def test_choices_are_those_under_one_table() -> None:
    mixed = np.concatenate([records(0, 0, protocol=0), records(2, protocol=2)])
    assert choices_of(mixed, 0) == {1 << 20: {(1, 0)}}
    assert choices_of(mixed, 2) == {1 << 20: {(1, 2)}}


def test_a_job_without_records_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no calls file"):
        records_by_rank(tmp_path)


def test_sums_are_compared_bit_for_bit() -> None:
    assert sums_are_exact(3, [6.0, 6.0])
    assert not sums_are_exact(3, [6.0, np.nextafter(6.0, 7.0)])
