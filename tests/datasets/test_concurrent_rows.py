"""Rows of several communicators at once: tasks of their own, and never taken for lone ones."""

from typing import Any

import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import cell_times, interfered, noise_bands, quiet
from dynamiccl.datasets.episodes import training_steps
from dynamiccl.datasets.reward import with_interfered_reference, with_reference
from tests.rows import default, forced, frame

AT_ONCE: dict[str, Any] = {"num_comms": 4, "comm_split": "DIV 8"}


def test_they_are_cells_of_their_own() -> None:
    rows = frame(default(100.0), default(140.0, **AT_ONCE), default(150.0, num_comms=2, run="b"))
    cells = cell_times(rows)
    assert sorted(cells["time_us"]) == [100.0, 140.0, 150.0]
    assert rows["trial"].n_unique() == 3


def test_lone_rows_have_the_ids_that_they_had() -> None:
    alone = frame(default())["trial"][0]
    assert alone == frame(default(num_comms=None, comm_split=None))["trial"][0]
    assert alone != frame(default(**AT_ONCE))["trial"][0]


def test_they_are_disturbed_and_no_noise() -> None:
    rows = frame(default(100.0), default(140.0, repeat=1, **AT_ONCE))
    assert quiet(rows)["time_us"].to_list() == [100.0]
    assert interfered(rows)["time_us"].to_list() == [140.0]
    assert noise_bands(quiet(rows)).is_empty()


def test_no_reference_of_a_lone_row_comes_from_them() -> None:
    rows = frame(default(140.0, **AT_ONCE), forced("Ring", time_us=90.0))
    assert with_reference(rows.filter(~rows["is_default"]), rows)["reference_us"].to_list() == [
        None
    ]


def test_their_reference_is_the_default_of_as_many_at_once() -> None:
    rows = frame(
        default(100.0),
        default(150.0, **AT_ONCE),
        default(300.0, num_comms=8, comm_split="DIV 8"),
        forced("Ring", time_us=120.0, **AT_ONCE),
    )
    found = with_interfered_reference(
        interfered(rows).filter(~interfered(rows)["is_default"]), rows
    )
    assert found["reference_us"].to_list() == [150.0]
    assert found["interference"].to_list() == pytest.approx([0.5])


def test_training_windows_hold_rows_of_one_kind() -> None:
    # 4 MiB lies in an even octave, which trains.
    lone = [
        row
        for run in range(3)
        for row in (
            default(100.0, size_bytes=4 << 20, run=f"r{run}"),
            forced("Ring", "LL", 90.0, size_bytes=4 << 20, run=f"r{run}"),
        )
    ]
    at_once = [{**row, **AT_ONCE, "time_us": 2 * row["time_us"]} for row in lone]
    rows = frame(*lone, *at_once)
    steps = training_steps(rows, Catalogue.from_frame(rows), ["default"], seed=0)
    assert steps.counts.interfered == len(at_once)
    alone = training_steps(frame(*lone), Catalogue.from_frame(frame(*lone)), ["default"], seed=0)
    assert alone.counts.interfered == 0
    assert steps.counts.rows == 2 * alone.counts.rows
