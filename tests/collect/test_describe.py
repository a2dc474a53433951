from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.describe import describe, lines
from dynamiccl.datasets.store import measurements_table, write_part
from dynamiccl.errors import MissingPath, NotEnoughData
from tests.rows import default, forced


def summaries(directory: Path, *rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    write_part(directory, measurements_table(rows), provenance={})
    return {summary["system"]: summary for summary in describe(directory)}


def test_counts_by_hand(tmp_path: Path) -> None:
    big = {"size_bytes": 1 << 22}
    rows = [
        # 1 MiB: default twice, two forced configs: scorable.
        default(100.0, verified=True),
        default(102.0, repeat=1, verified=True),
        forced("Ring", "LL", 90.0),
        forced("Tree", "LL", 95.0),
        # 4 MiB: two forced configs, no default.
        forced("Ring", "LL", 90.0, **big),
        forced("Ring", None, 95.0, **big),
        # 64 B: default alone.
        default(5.0, size_bytes=64),
        # Nothing was measured.
        forced("NVLS", "LL", None, status="infeasible"),
        forced("NVLS", "Simple", None, status="failed", num_nodes=2, num_ranks=16),
    ]
    found = summaries(tmp_path, *rows)["box"]
    assert (found["rows"], found["rows_with_time"]) == (9, 7)
    assert found["rows_by_status"] == {"failed": 1, "infeasible": 1, "ok": 7}
    sizes = (found["min_size_bytes"], found["max_size_bytes"], found["num_sizes"])
    assert sizes == (64, 1 << 22, 3)
    assert (found["num_configs"], found["tasks"], found["tasks_scorable"]) == (3, 3, 1)
    assert (found["tasks_with_default"], found["tasks_with_two_forced"]) == (2, 2)
    assert found["cells_repeated"] == 1
    assert found["verified_share"] == pytest.approx(2 / 7)
    assert found["shapes"] == ["1x8", "2x8"]
    assert found["noise_median"] == pytest.approx(0.02)
    gain = found["gain"]
    assert (gain["compared"], gain["faster"], gain["most"]["best"]) == (1, 1, "Ring/LL")
    assert lines(found)["to gain"].startswith(
        "in 1 of 1 tasks a config is faster than NCCL's own choice beyond noise; most: Ring/LL, "
    )
    assert (found["gpu"], found["source"], found["simulated"]) == ("H100", "nccl-tests-text", False)


def test_the_noise_is_that_of_calls_that_ran_alone(tmp_path: Path) -> None:
    loud = {"interference_kind": "congestion", "interference_level": 1.0}
    found = summaries(
        tmp_path,
        default(100.0),
        default(102.0, repeat=1),
        default(150.0, **loud),
        default(300.0, repeat=1, **loud),
    )["box"]
    assert found["noise_median"] == found["noise_band"] == pytest.approx(0.02)


def test_unknown_noise_and_lines(tmp_path: Path) -> None:
    found = summaries(tmp_path, default(), forced("Ring"))["box"]
    assert found["noise_median"] is None
    text = lines(found)
    assert text["noise band"].startswith("unknown: no cell has two independent")
    assert text["GPU"] == "H100; nodes x ranks per node: 1x8"
    assert text["rows"] == "2 (2 ok); 2 with a time, left out: none"
    assert text["verified"] == "0% of the rows that worked"


def test_system_where_nothing_worked_is_described(tmp_path: Path) -> None:
    found = summaries(tmp_path, default(None, status="failed"))["box"]
    counts = (found["rows"], found["rows_with_time"], found["tasks"], found["num_configs"])
    assert counts == (1, 0, 0, 0)
    assert (found["verified_share"], found["tasks_scorable"]) == (0.0, 0)


def test_rows_of_unwell_gpus_are_shown_and_not_used(tmp_path: Path) -> None:
    hot = [default(50.0 * i, repeat=i, throttled=True) for i in (1, 2, 3)]
    erring = forced("Ring", "LL", 9.0, ecc_errors=4)
    found = summaries(tmp_path, default(), *hot, erring, forced("Tree", "LL", throttled=False))
    assert (found["box"]["rows"], found["box"]["rows_with_time"]) == (6, 2)
    assert found["box"]["rows_left_out"] == {"throttled": 3, "ecc_errors": 1}
    assert (found["box"]["num_configs"], found["box"]["noise_band"]) == (1, None)
    text = lines(found["box"])["rows"]
    assert text == "6 (6 ok); 2 with a time, left out: 3 throttled, 1 ecc_errors"


def test_no_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(MissingPath):
        describe(tmp_path / "gone")
    with pytest.raises(NotEnoughData):
        describe(tmp_path)
