from datetime import datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect.runs.journal import Sealing
from dynamiccl.collect.runs.parts import PartWriter, with_noise_band
from dynamiccl.datasets import store
from dynamiccl.datasets.rows import measurements_table
from dynamiccl.datasets.schema import MEASUREMENTS
from tests.collect.benchmark.sweeps import sweep
from tests.rows import MIB, default, forced


def bands(*rows: dict[str, Any]) -> list[float | None]:
    found: list[float | None] = with_noise_band(measurements_table(rows))[
        "aa_noise_band"
    ].to_pylist()
    return found


def test_band_is_how_much_a_pair_of_defaults_differs() -> None:
    rows = [default(100.0), default(103.0, repeat=1), forced("Ring", "LL", 50.0)]
    assert bands(*rows) == pytest.approx([0.03] * 3)


def test_every_pair_counts_and_nine_in_ten_differ_by_less() -> None:
    # 100..104: ten pairs; the largest is 4 %, the ninth by size 3/101.
    rows = [default(100.0 + i, repeat=i) for i in range(5)]
    assert bands(*rows)[0] == pytest.approx(3 / 100)


def test_sizes_make_no_pair_with_each_other() -> None:
    assert bands(default(1.0), default(2.0, size_bytes=2 * MIB)) == [None, None]


def test_two_processes_make_a_pair() -> None:
    """Untouched, and under our plugin: other queue pairs, another way through the network."""
    assert bands(default(1.0), default(2.0, default_scope="profile")) == [1.0, 1.0]


@pytest.mark.parametrize(
    "out",
    [
        {"in_place": True},
        {"status": "wrong_values"},
        {"time_us": None},
        {"throttled": True},
        {"ecc_errors": 1},
        {"is_default": False, "requested_algorithm": "Ring"},
    ],
)
def test_only_usable_out_of_place_defaults_make_a_pair(out: dict[str, Any]) -> None:
    assert bands(default(1.0), {**default(2.0, repeat=1), **out}) == [None, None]


@pytest.mark.parametrize(
    "other",
    [
        {"round": 1},
        {"collective": "AllGather"},
        {"num_nodes": 2},
        {"ranks_per_node": 4},
        {"datatype": "half"},
        {"launch_profile": "net"},
        {"interference_kind": "cpu", "interference_level": 0.5},
    ],
)
def test_each_setting_and_round_has_its_own_band(other: dict[str, Any]) -> None:
    here = [default(100.0, round=0), default(101.0, round=0, repeat=1)]
    there = [{**row, **other, "time_us": time} for row, time in zip(here, (100, 120), strict=True)]
    lone = forced("Ring", "LL", 1.0, round=7)
    found = bands(here[0], there[0], lone, here[1], there[1])
    assert found == pytest.approx([0.01, 0.2, None, 0.01, 0.2])


def test_unknown_conditions_are_equal_to_each_other() -> None:
    unknown = {"num_nodes": None, "ranks_per_node": None, "datatype": None, "round": None}
    rows = [default(100.0, **unknown), default(150.0, repeat=1, **unknown)]
    assert bands(*rows) == pytest.approx([0.5, 0.5])


def test_table_without_a_row_or_a_time_stays_one() -> None:
    assert with_noise_band(measurements_table([])).schema == MEASUREMENTS
    assert bands(default(None, status="failed")) == [None]


ROW = st.fixed_dictionaries(
    {
        "time_us": st.floats(1.0, 100.0),
        "size_bytes": st.sampled_from([64, 128]),
        "round": st.sampled_from([0, 1]),
        "default_scope": st.sampled_from(["untouched", "profile"]),
        "status": st.sampled_from(["ok", "ok", "ok", "failed"]),
        "in_place": st.sampled_from([False, False, True]),
        "is_default": st.booleans(),
    }
)


@given(rows=st.lists(ROW, max_size=24))
@settings(deadline=None, max_examples=60)
def test_band_is_that_of_brute_force(rows: list[dict[str, Any]]) -> None:
    table = with_noise_band(measurements_table({**default(), **row} for row in rows))
    assert table.schema == MEASUREMENTS
    assert table["time_us"].to_pylist() == [row["time_us"] for row in rows]
    for row, band in zip(rows, table["aa_noise_band"].to_pylist(), strict=True):
        spreads = brute_force([other for other in rows if other["round"] == row["round"]])
        if not spreads:
            assert band is None
            continue
        # A percentile lies at or between two of them.
        low, high = (np.quantile(spreads, 0.9, method=side) for side in ("lower", "higher"))
        assert low * (1 - 1e-9) <= band <= high * (1 + 1e-9)


def brute_force(rows: list[dict[str, Any]]) -> list[float]:
    good = [
        row for row in rows if row["is_default"] and row["status"] == "ok" and not row["in_place"]
    ]
    return [
        max(a["time_us"], b["time_us"]) / min(a["time_us"], b["time_us"]) - 1.0
        for a, b in combinations(good, 2)
        if a["size_bytes"] == b["size_bytes"]
    ]


MADE = sweep()


def commit(launch: str, *rows: dict[str, Any]) -> dict[str, Any]:
    plain = [{**row, "sweep": "grid", "launch": launch} for row in rows]
    return {"launch": launch, "rows": plain}


def scribe(out: Path, journal: str = "j1") -> PartWriter:
    out.mkdir(exist_ok=True)
    return PartWriter(MADE, out, journal, "nccl-tests")


STAMP = "2026-01-02T03:04:05.678901+00:00"
SEALING = Sealing(
    3,
    (
        commit("0:a", default(100.0, timestamp=STAMP), default(110.0, repeat=1)),
        commit("0:empty"),
        commit("0:b", forced("Ring", "LL", 90.0)),
    ),
)


def test_segment_becomes_one_part_with_its_band_and_origin(tmp_path: Path) -> None:
    scribe(tmp_path).write(SEALING)
    [path] = store.part_paths(tmp_path)
    rows = store.read(tmp_path)
    assert rows["launch"].to_list() == ["0:a", "0:a", "0:b"]
    assert rows["aa_noise_band"].to_list() == pytest.approx([0.1] * 3)
    assert rows["timestamp"].to_list() == [datetime.fromisoformat(STAMP), None, None]
    origin = store.part_provenance(path)
    assert (origin["segment"], origin["journal"], origin["runner"]) == (3, "j1", "nccl-tests")
    assert origin["sweep_file"] == MADE.text


def test_segment_without_rows_leaves_nothing(tmp_path: Path) -> None:
    scribe(tmp_path).write(Sealing(0, (commit("0:a"),)))
    assert list(tmp_path.iterdir()) == []


def test_segments_are_those_of_this_journal_and_sweep(tmp_path: Path) -> None:
    scribe(tmp_path).write(SEALING)
    scribe(tmp_path).write(Sealing(5, SEALING.commits))
    scribe(tmp_path, journal="j2").write(Sealing(7, SEALING.commits))
    other = measurements_table([{**default(), "sweep": "other"}])
    store.write_part(tmp_path, other, provenance={"journal": "j1", "segment": 9})
    imported = measurements_table([default()])
    store.write_part(tmp_path, imported, provenance={})
    assert scribe(tmp_path).segments() == {3, 5}
    assert scribe(tmp_path, journal="j2").segments() == {7}


def test_band_of_a_part_does_not_depend_on_the_order_of_its_rows() -> None:
    rows = [default(100.0 + i, repeat=i, size_bytes=64 << (i % 2)) for i in range(9)]
    forwards = pl.DataFrame(with_noise_band(measurements_table(rows)))
    backwards = pl.DataFrame(with_noise_band(measurements_table(rows[::-1])))
    assert forwards["aa_noise_band"].to_list() == backwards["aa_noise_band"].to_list()
