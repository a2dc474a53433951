"""The real runner on the stand-in: real processes, the real plugin, times of the simulator."""

import json
import platform
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator import h100
from tests.collect.benchmark.stand_in import rows, run, statuses, wanted
from tests.collect.benchmark.sweeps import sweep

QUICK = "{ startup_timeout_s = 20, stall_timeout_s = 10 }"
TIMED_ONLY = "{ startup_timeout_s = 20, stall_timeout_s = 10, read_back = false }"


def test_whole_grid_in_one_process_is_measured_verified_and_true(
    tmp_path: Path, sweep_path: Path
) -> None:
    made = sweep(collectives='["AllReduce", "AllGather"]')
    summary = run(made, tmp_path, sweep_path)
    # A cycle: the grid and the reference for each collective; and what runs is read back once.
    assert summary.launches_run == 2 * (2 + 2) + 2
    found = rows(tmp_path)
    assert statuses(found) == {"ok": 2 * 2 * 3 * (10 + 2 + 6 + 2), "infeasible": 3 * 4}
    forced = wanted(found)
    assert forced["verified"].all()
    assert (forced["requested_algorithm"] == forced["actual_algorithm"]).all()
    assert (forced["requested_protocol"] == forced["actual_protocol"]).all()
    asked = forced.drop_nulls("requested_num_channels")
    assert (asked["actual_num_channels"] <= asked["requested_num_channels"]).all()
    ratios = [
        row["time_us"]
        / h100.true_us(
            h100.Group(1, 8),
            Collective.parse(row["collective"]),
            Algorithm.parse(row["actual_algorithm"]),
            Protocol.parse(row["actual_protocol"]),
            row["size_bytes"],
            num_channels=row["requested_num_channels"],
        )
        for row in forced.iter_rows(named=True)
    ]
    assert sum(0.9 < ratio < 1.1 for ratio in ratios) > 0.9 * len(ratios)


def test_default_is_measured_untouched_and_in_its_profile(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_PROTO", "LL")  # the user's own environment
    profiles = '[{ name = "default" }, { name = "net", transport = "NET" }]'
    run(sweep(profiles=profiles, cycles="1"), tmp_path, sweep_path)
    found = rows(tmp_path).filter("is_default", ~pl.col("in_place"))
    by_scope = statuses(found, ("launch_profile", "default_scope"))
    assert by_scope == {
        ("default", "untouched"): 6,
        ("default", "profile"): 6,
        ("net", "profile"): 6,
    }
    times = {
        key: part["time_us"].median()
        for key, part in found.group_by("launch_profile", "default_scope")
    }
    # What the user has set holds for the reference alone; the network is slower than NVLink.
    assert times["default", "untouched"] > times["default", "profile"]  # type: ignore[operator]
    assert times["net", "profile"] > 1.3 * times["default", "profile"]  # type: ignore[operator]


def test_noise_band_is_a_column_of_every_row_with_a_time(tmp_path: Path, sweep_path: Path) -> None:
    run(sweep(), tmp_path, sweep_path)
    found = rows(tmp_path).filter(pl.col("status") == "ok")
    assert found["aa_noise_band"].null_count() == 0
    # How wide is up to the machine: the stand-in has a real clock, and others may be busy.
    assert found["aa_noise_band"].min() > 0  # type: ignore[operator]


def test_iteration_times_come_from_json_and_the_release_from_text(
    tmp_path: Path, sweep_path: Path
) -> None:
    run(sweep(cycles="1"), tmp_path / "plain", sweep_path)
    assert rows(tmp_path / "plain")["iteration_times_us"].null_count() == 2 * 3 * 12
    run(sweep(cycles="1", runner="{ per_iteration = true }"), tmp_path, sweep_path)
    found = rows(tmp_path).filter(pl.col("status") == "ok")
    assert set(found["source"]) == {"nccl-tests-json"}
    assert set(found["iteration_times_us"].list.len()) == {5}
    assert set(found["nccl_tests_version"]) == {"2.19.6"}
    assert set(found["gpu"]) == {"FAKE H100"}


def test_untouched_default_is_in_the_journal_for_choices(tmp_path: Path, sweep_path: Path) -> None:
    run(sweep(cycles="1"), tmp_path, sweep_path)
    [path] = tmp_path.glob("out/.journal/system=box/sweep=grid/segment-*.sealed")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    told = [record for record in records if record.get("references")]
    assert [record["launch"].split(":")[3] for record in told] == ["reference"]
    assert all(record["outcomes"] == [] for record in told)
    # Three sizes, twice each.
    assert len(told[0]["references"]) == 6


def test_rows_know_their_hosts(tmp_path: Path, sweep_path: Path) -> None:
    run(sweep(cycles="1"), tmp_path, sweep_path)
    found = rows(tmp_path).filter(pl.col("status") == "ok")
    assert set(found["hosts"]) == {platform.node().partition(".")[0]}
    assert not found["partial_launch"].any()


def test_topology_is_kept_and_its_features_are_columns(tmp_path: Path, sweep_path: Path) -> None:
    run(sweep(cycles="1"), tmp_path, sweep_path)
    kept = tmp_path / "out" / "topology" / "system=box" / "allreduce-1x8-default"
    assert {path.name for path in kept.iterdir()} == {"topology.xml", "graph.xml", "nccl.log"}
    log = (kept / "nccl.log").read_text()
    assert "Algorithm" in log
    assert " Bytes -> " not in log
    found = rows(tmp_path).filter(pl.col("status") == "ok")
    facts = ("nvswitch", "nvlink_generation", "compute_capability", "cpu_vendor", "nics_per_node")
    assert found.select(facts).unique().rows() == [(True, 4, 9.0, "intel", 8)]


@pytest.mark.parametrize(
    ("release", "nccl"),
    [
        ("2.13.12", "2.22.3"),
        pytest.param("2.16.9", "2.23.4", marks=pytest.mark.soak),
        pytest.param("2.17.3", "2.24.3", marks=pytest.mark.soak),
        ("2.17.8", "2.27.7"),
        pytest.param("2.18.2", "2.28.9", marks=pytest.mark.soak),
        ("2.19.2", "2.30.7"),
    ],
)
def test_every_release_gives_the_same_grid(
    release: str,
    nccl: str,
    tmp_path: Path,
    sweep_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_NCCL_TESTS_VERSION", release)
    monkeypatch.setenv("FAKE_NCCL_VERSION", nccl)
    run(sweep(cycles="1", nccl_version=f'"{nccl}"'), tmp_path, sweep_path)
    found = rows(tmp_path)
    assert statuses(found) == {"ok": 2 * 3 * (2 + 10)}
    assert wanted(found)["verified"].all()
    assert set(found["nccl_version"]) == {nccl}


def test_without_a_plugin_each_config_has_a_process(tmp_path: Path) -> None:
    summary = run(sweep(cycles="1"), tmp_path, None)
    assert summary.launches_run == 9 + 9
    found = rows(tmp_path)
    assert statuses(found) == {"ok": 2 * 3 * 10}
    assert found["verified"].all()
    assert set(found.filter("is_default")["default_scope"]) == {"untouched"}


def test_config_that_nccl_ignores_shows_in_what_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.24 an impossible choice silently used Ring."""
    monkeypatch.setenv("FAKE_NCCL_VERSION", "2.23.4")
    made = sweep(cycles="1", algorithms='["CollNetDirect"]', protocols='["Simple"]')
    run(made, tmp_path, None)
    forced = wanted(rows(tmp_path))
    assert set(forced["requested_algorithm"]) == {"CollNetDirect"}
    assert set(forced["actual_algorithm"]) == {"Ring"}


def test_cell_that_the_machine_has_not_is_infeasible_with_the_reason(
    tmp_path: Path, sweep_path: Path
) -> None:
    run(sweep(cycles="1", algorithms='["CollNetDirect", "Ring"]'), tmp_path, sweep_path)
    lost = rows(tmp_path).filter(pl.col("reason") == "NCCL's cost table has no such cell here")
    assert lost.height == 3 * 2
    assert lost["time_us"].null_count() == lost.height


def test_collectives_for_reference_are_measured_as_they_are(
    tmp_path: Path, sweep_path: Path
) -> None:
    made = sweep(collectives='["AlltoAll", "SendRecv"]', cycles="1")
    run(made, tmp_path, sweep_path)
    found = rows(tmp_path)
    assert set(found["collective"]) == {"AlltoAll", "SendRecv"}
    assert set(found["status"]) == {"ok"}
    assert found["is_default"].all()


def test_all_five_tuned_collectives_run(tmp_path: Path, sweep_path: Path) -> None:
    names = ["AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce"]
    made = sweep(
        collectives=str(names).replace("'", '"'),
        algorithms='["Ring"]',
        protocols='["LL"]',
        num_channels="[0]",
        sizes='{ min = "1M", max = "1M" }',
        cycles="1",
    )
    run(made, tmp_path, sweep_path)
    forced = wanted(rows(tmp_path))
    assert set(forced["collective"]) == set(names)
    assert forced["verified"].all()


def test_chunk_sizes_are_played_where_nccl_asks_for_them(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NCCL_VERSION", "2.30.7")
    made = sweep(
        algorithms='["Ring"]',
        protocols='["Simple"]',
        num_channels="[0]",
        chunk_sizes='[0, "64K", "256K"]',
        cycles="1",
    )
    run(made, tmp_path, sweep_path)
    forced = wanted(rows(tmp_path))
    asked = forced.drop_nulls("requested_chunk_bytes")
    assert asked.height == 2 * 3 * 2
    assert (asked["actual_chunk_bytes"] <= asked["requested_chunk_bytes"]).all()
    left = forced.filter(pl.col("requested_chunk_bytes").is_null())
    assert left["actual_chunk_bytes"].null_count() == left.height
