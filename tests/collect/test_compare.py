"""Two data sets against each other: in the simulator, where it is known what changed."""

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.collect.compare import OWN_CHOICE, compare, lines
from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.store import measurements_table, read, write_part
from dynamiccl.errors import NotEnoughData
from tests.cli.conftest import Shell
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414

SAMPLE = Path(__file__).parents[2] / "datasets" / "sample"
SWEEP = """
name = "NAME"
system = "h100-ib-simulated"
collectives = ["AllReduce", "AllGather"]
algorithms = ["Ring", "Tree"]
groups = [{ num_nodes = 4, ranks_per_node = 8 }]
sizes = { min = "1K", max = "1G", factor = 2 }
nccl_version = "2.27.5"
cycles = 5

[simulator]
seed = SEED
noise_sigma = 0.02
"""
Sweeps = Callable[[int], pl.DataFrame]
IN_RING = (pl.col("requested_algorithm") == "Ring") & (pl.col("requested_protocol") == "Simple")
LARGE = pl.col("size_bytes") > 4 << 20


@pytest.fixture(name="sweeps", scope="module")
def sweeps_fixture(tmp_path_factory: pytest.TempPathFactory) -> Sweeps:
    """Like sweeps by seed, 2 % of noise and one launch in some hundred slow by a multiple."""
    known: dict[int, pl.DataFrame] = {}

    def sweep(seed: int) -> pl.DataFrame:
        if seed not in known:
            folder = tmp_path_factory.mktemp("sweep")
            simulate(SWEEP.replace("NAME", f"s{seed}").replace("SEED", str(seed)), folder)
            known[seed] = read(folder)
        return known[seed]

    return sweep


def slowed(frame: pl.DataFrame, where: pl.Expr, factor: float) -> pl.DataFrame:
    time = pl.when(where).then(pl.col("time_us") * factor).otherwise(pl.col("time_us"))
    return frame.with_columns(time_us=time)


@pytest.mark.parametrize(("status", "first"), [("timed_out", 8 << 20), ("wrong_values", 1024)])
def test_what_fails_that_did_not_is_told(status: str, first: int, sweeps: Sweeps) -> None:
    fails, time = IN_RING & LARGE, pl.col("time_us")
    is_lost = fails & pl.lit(status != "wrong_values")
    now = sweeps(1).with_columns(
        status=pl.when(fails).then(pl.lit(status)).otherwise("status"),
        time_us=pl.when(~is_lost).then(time),
    )
    found = compare(sweeps(0), now)
    assert found["is_slower"]
    told = [(each["collective"], each["config"], each["first_bytes"]) for each in found["failures"]]
    assert set(told) >= {(name, "Ring/Simple", first) for name in ("AllGather", "AllReduce")}
    assert not any("Tree" in config for _, config, _ in told)
    assert any("computes wrong values now" in line for line in lines(found))
    assert not compare(now, sweeps(1))["failures"]
    assert not compare(now, now)["failures"]


def test_like_sweeps_are_told_to_be_alike(sweeps: Sweeps) -> None:
    found = compare(sweeps(0), sweeps(1))
    assert not found["is_changed"]
    assert not found["is_slower"]
    assert found["changes"] == found["other_changes"] == []
    [system] = found["systems"]
    assert system["cells"] == 2 * 21 * (1 + 3 + 3) - 21 * 3
    assert abs(system["change"]) < 0.02
    # Noise of 2 %, five runs on both sides: 1.96 * 0.02 * sqrt(2 / 5).
    assert system["noise"] == pytest.approx(0.025, rel=0.2)
    # One slow launch is no change.
    wild = (pl.col("run") == "cycle-2") & (pl.col("size_bytes") == 1 << 20)
    assert not compare(sweeps(0), slowed(sweeps(1), wild, 3.0))["is_changed"]


def test_a_config_that_changed_at_large_sizes_is_found(sweeps: Sweeps) -> None:
    for factor in (1.04, 0.96):
        found = compare(sweeps(0), slowed(sweeps(1), IN_RING & LARGE, factor))
        assert (found["is_changed"], found["is_slower"]) == (True, factor > 1.0)
        assert {each["config"] for each in found["changes"]} == {"Ring/Simple"}
        assert {each["collective"] for each in found["changes"]} == {"AllReduce", "AllGather"}
        for each in found["changes"]:
            assert (each["is_beyond_noise"], each["is_confirmed"]) == (True, True)
            assert each["first_bytes"] > 4 << 20
            assert each["low"] < factor - 1.0 < each["high"]


def test_what_all_cells_share_is_told_as_one_change(sweeps: Sweeps) -> None:
    found = compare(sweeps(0), slowed(sweeps(1), pl.lit(value=True), 1.1))
    [system] = found["systems"]
    assert system["is_beyond_noise"]
    assert system["is_confirmed"]
    assert found["is_slower"]
    assert system["low"] < 0.1 < system["high"]
    assert found["changes"] == []
    assert not compare(sweeps(0), slowed(sweeps(1), pl.lit(value=True), 0.9))["is_slower"]


def test_another_choice_of_nccl_is_told_from_a_slower_config(sweeps: Sweeps) -> None:
    """NCCL goes over from whatever it took to Ring/LL, at a cost."""
    is_own = pl.col("is_default") & (pl.col("collective") == "AllReduce") & LARGE
    after = slowed(sweeps(1), is_own, 1.3).with_columns(
        actual_algorithm=pl.when(is_own).then(pl.lit("Ring")).otherwise("actual_algorithm"),
        actual_protocol=pl.when(is_own).then(pl.lit("LL")).otherwise("actual_protocol"),
    )
    found = compare(sweeps(0), after)
    assert found["is_slower"]
    assert {each["config"] for each in found["changes"]} == {OWN_CHOICE}
    assert min(each["first_bytes"] for each in found["changes"]) == 8 << 20
    assert all("runs Ring/LL, before" in each["why"] for each in found["changes"])
    slow = slowed(sweeps(1), LARGE & (pl.col("is_default") | IN_RING), 1.2)
    same = [e for e in compare(sweeps(0), slow)["changes"] if e["config"] == OWN_CHOICE]
    assert same
    assert all(each["why"].startswith("the same choice: ") for each in same)


def test_of_one_run_each_nothing_is_confirmed(sweeps: Sweeps) -> None:
    before, after = (sweeps(seed).filter(pl.col("run") == "cycle-0") for seed in (0, 1))
    found = compare(before, after)
    assert not found["is_changed"]
    assert not found["systems"][0]["is_confirmed"]
    # A size alone may be one slow launch.
    assert all(each["first_bytes"] < each["last_bytes"] for each in found["changes"])
    # Of two runs with 2 % of noise each.
    assert 0.04 < found["systems"][0]["noise"] < 0.09
    found = compare(before, slowed(after, IN_RING & LARGE, 1.3))
    assert not found["is_slower"]
    assert {each["config"] for each in found["changes"]} == {"Ring/Simple"}
    assert all(each["is_beyond_noise"] for each in found["changes"])
    assert not any(each["is_confirmed"] for each in found["changes"])


def test_data_that_share_nothing_say_why(sweeps: Sweeps) -> None:
    other = sweeps(1).with_columns(system=pl.lit("elsewhere"))
    with pytest.raises(NotEnoughData, match="system is h100-ib-simulated in one and elsewhere"):
        compare(sweeps(0), other)
    shared = sweeps(1).with_columns(exclusive_node=pl.lit(value=False))
    with pytest.raises(NotEnoughData, match="no cell: no config at a size was measured alone"):
        compare(sweeps(0), shared)


def test_the_command_has_an_exit_code(sweeps: Sweeps, shell: Shell, tmp_path: Path) -> None:
    few = pl.col("collective") == "AllReduce"
    after = slowed(sweeps(1), IN_RING & LARGE, 1.05).with_columns(driver_version=pl.lit("580.1"))
    text = {"before": 'cycles = 5\nnccl_version = "2.27.5"', "after": "cycles = 3"}
    for name, frame in (("before", sweeps(0)), ("after", after)):
        table = measurements_table(frame.filter(few).to_dicts())
        write_part(tmp_path / name, table, provenance={"sweep_file": text[name]})
    done = shell("dynamiccl-collect", "compare", "before", "after")
    assert done.code == 1
    assert "Ring/Simple" in done.out
    assert "driver_version: not known -> 580.1" in done.out
    assert "sweep file: cycles: 5 -> 3" in done.out
    assert "sweep file: nccl_version: 2.27.5 -> not known" in done.out
    found = shell("dynamiccl-collect", "compare", "after", "before", "--json").json
    assert found["is_changed"]
    assert not found["is_slower"]
    alike = shell("dynamiccl-collect", "compare", "before", "before")
    assert alike.code == 0
    assert "Nothing changed beyond noise" in alike.out
