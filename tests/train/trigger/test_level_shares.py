"""Levels of calls that jobs recorded, as the Trigger tells them, and what cells feel of them."""

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
import torch

from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.datasets.steps import CALLS_USED, timed_calls
from dynamiccl.datasets.store import read
from dynamiccl.nccl import Collective
from dynamiccl.simulator.record_jobs import all_configs, record_jobs, write_calls
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import WorkCall, Workload, make_workload
from dynamiccl.simulator.world import World
from dynamiccl.train.cautious import cell_of
from dynamiccl.train.cautious_fit import share_table
from dynamiccl.train.environment import JobCalls, Tables
from dynamiccl.train.trigger import Detector, TriggerModule, interference_levels, level_shares_of

#: None of a test bin.
SIZES = (1 << 18, 1 << 20, 1 << 24)
SHARES = {"Ring": 1.0, "Tree": 0.4, "NVLS": 0.0}
LEVEL = 0.8


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    """Quiet calls of every config; in every other thousand they take longer, as SHARES say."""
    out = tmp_path_factory.mktemp("calls")
    group = Group(1, 8)
    work = tuple(WorkCall(group, Collective.AllReduce, size, 100.0) for size in SIZES)
    workload, system = Workload("three sizes", work), find_system("b300-nvlink")
    record_jobs(
        *(out, system, workload, find_scenario("quiet")),
        share=1.0,
        hold_calls=4.0,
        jobs=2,
        calls=4_000,
        seed=0,
        name="recorded",
    )
    quiet = read(out, "calls").select(CALLS_USED)
    share = pl.col("actual_algorithm").replace_strict(SHARES, return_dtype=pl.Float64)
    return quiet.with_columns(time_us=pl.col("time_us") * (1.0 + share * level()))


def level() -> pl.Expr:
    return pl.when(pl.col("sequence") // 1_000 % 2 == 1).then(LEVEL).otherwise(0.0)


def told(timed: pl.DataFrame) -> npt.NDArray[np.float32]:
    return timed.select(level()).to_series().to_numpy().astype(np.float32)


def the_same(value: float, timed: pl.DataFrame) -> npt.NDArray[np.float32]:
    return np.full(timed.height, value, dtype=np.float32)


def test_each_cell_has_its_own_share_where_it_was_disturbed_and_none_of_test_bins(
    calls: pl.DataFrame,
) -> None:
    found = level_shares_of(calls, told)
    assert set(found["octave"]) == {18, 20, 24}
    assert set(found["algorithm"]) == set(SHARES)
    for algorithm, share in found.select("algorithm", "share").iter_rows():
        assert share == pytest.approx(SHARES[algorithm], abs=0.06)
    for value in (0.0, -1.0):  # quiet, unknown
        assert level_shares_of(calls, partial(the_same, value)).is_empty()
    assert level_shares_of(calls.filter(pl.col("sequence") < 1_010), told).is_empty()
    moved = calls.with_columns(size_bytes=pl.lit(1 << 23, pl.Int64))
    assert with_split(moved.head(1))["split"].to_list() == [Split.TEST.value]
    assert level_shares_of(moved, told).is_empty()


def test_the_table_fills_up_what_was_not_recorded() -> None:
    one = {"system": "here", "collective": "AllReduce", "algorithm": "NVLS", "protocol": "Simple"}
    shares = pl.DataFrame(
        [{**one, "octave": 18, "share": 0.2}, {**one, "octave": 24, "share": 0.0}]
    )
    here, there = share_table(shares, ["here", "there"]).numpy()
    nvls, ring = cell_of(4, 2), cell_of(1, 0)
    all_reduce, all_gather = 4, 2
    assert here[all_reduce, nvls, [10, 18, 20, 23, 40]].tolist() == [0.2, 0.2, 0.2, 0.0, 0.0]
    assert (here[all_gather, nvls] == here[all_reduce, nvls]).all()
    assert (here[:, ring] == 1.0).all()
    # What NCCL's own choice runs is unknown: it is not called slow.
    assert (here[:, cell_of(7, 3)] == 0.0).all()
    assert (there == 1.0).all()
    assert (share_table(None, ["here"]).numpy() == 1.0).all()


def test_a_recording_gets_the_levels_that_the_environment_saw(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = TriggerModule(0.05).eval()
    system, workload = find_system("h100-ib"), make_workload(["lora"], Group(4, 8))
    world = World(system, workload, all_configs(system, workload), find_scenario("congested"))
    tables = Tables.of(world, ["default"])
    env = JobCalls(world, tables, 2, lambda: Detector(module))
    env.reset(seed=3)
    played, random = [], np.random.default_rng(0)
    seen: dict[tuple[str, int], float] = {}
    for call in range(600):
        # Two configs and NCCL's own: streams get long enough to be known.
        allowed = np.flatnonzero(world.mask.all(axis=0))[:3]
        key = env.jobs.key.copy()
        _, ran = env.step(allowed[random.integers(3, size=2)])
        played.append(ran)
        window = env.look(np.arange(2), key)["window"]  # a call is seen with its level
        seen_level = window[:, -1, WINDOW_COLUMN["interference"]]
        np.testing.assert_allclose(seen_level, env.level.clip(min=0.0), rtol=1e-6)
        seen |= {(f"played-{job}", call): float(env.level[job]) for job in range(2)}
    write_calls(tmp_path, world, "played", played)

    calls = timed_calls(read(tmp_path, "calls").select(CALLS_USED))
    levels = interference_levels(Detector(module), calls)
    expected = [seen[key] for key in calls.select("run", "sequence").iter_rows()]
    np.testing.assert_allclose(levels, expected, rtol=1e-4, atol=1e-4)
    assert (levels > 0.5).any()
    assert (levels < 0).any()
