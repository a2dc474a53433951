"""What compute loses to calls, as rows beside matrix products tell it."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.job_tasks import losses_at, losses_of, near, placed_calls
from dynamiccl.datasets.manifest import JobTask, Losses
from dynamiccl.datasets.objective import change_of_task_us
from dynamiccl.evaluate.job.calls import job_of
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.sizes import size_bin
from tests.calls import calls_frame, traced
from tests.evaluate.jobs import sweep
from tests.policies import hand_made_manifest
from tests.rows import MIB, default, forced, frame


def told(share: float, channels: int, **columns: Any) -> dict[str, Any]:
    beside = {"interference_kind": "matmul", "interference_level": 4096.0, "size_bytes": 1 << 20}
    row = {"compute_loss_us": 200.0 * share, "compute_period_us": 400.0}
    made = forced("Ring", "LL", 200.0, channels=channels)
    return {**made, **beside, **row, "run": f"{share}", **columns}


def own(share: float, **columns: Any) -> dict[str, Any]:
    return {**told(share, 0), **default(160.0), "run": f"{share}", **columns}


def test_losses_are_shares_of_the_kernels_time_of_each_config() -> None:
    beside = {"interference_kind": "matmul", "interference_level": 4096.0}
    rows = [told(0.02, 1), told(0.04, 1), told(0.01, 4), own(0.12)]
    drifts = told(0.05, 8, compute_aa_difference=0.03)
    more = [{**own(0.12), **beside, "compute_loss_us": 0.12 * 160}, drifts]
    by_place = losses_of(frame(*rows[:3], *({**own(0.0), **told(0.0, 0)} for _ in ()), *more))
    [(place, by_bin)] = by_place.items()
    assert place == ("AllReduce", 1, 8)
    [losses] = by_bin.values()
    [by_config] = losses.values()
    assert by_config["Ring/LL/1ch"] == pytest.approx((0.03, 0.01, 1.25))
    # Of a single row no error is known: as large as what it says; or as its rates alone differ.
    assert by_config["Ring/LL/4ch"] == pytest.approx((0.01, 0.01, 1.25))
    assert by_config["Ring/LL/8ch"] == pytest.approx((0.05, 0.06, 1.25))
    assert by_config[""] == pytest.approx((0.12, 0.12, 1.0))


def test_tables_and_the_jobs_answer_place_a_trace_alike() -> None:
    """Groups of eight ranks on one node, on eight, and unnamed; of four nothing was measured.

    A table is not asked about the unnamed one: it may lie as either of two measured shapes.
    """
    rows = pl.concat([sweep(), sweep(num_nodes=8, ranks_per_node=1)])
    manifest = hand_made_manifest(rows, rows.select("system", "collective", noise_band=0.01))
    groups = ([*range(8)], [*range(0, 64, 8)], None, [*range(4)])
    named = [
        traced(n, size_bytes=MIB << n, group_ranks=ranks, num_ranks=len(ranks or range(8)))
        for n, ranks in enumerate(groups)
    ]
    calls = calls_frame(*named)
    found, [note] = placed_calls(calls, manifest)
    assert found["num_nodes"].to_list() == [1, 8]
    told = job_of(calls, None, 8)
    assert told.kinds["num_nodes"].to_list() == [1, 8, 1, 1]
    assert "ranks of 4 calls" in note
    assert note.endswith(
        "about 1, whose shape may be one of several: import with --nodes and --ranks"
    )
    assert told.lacks["nodes"] == 4


def test_products_of_a_persistent_kernel_are_one_more_condition() -> None:
    rows = [own(0.12), told(0.02, 1)]
    rows += [{**row, "interference_kind": "persistent-matmul"} for row in (own(0.4), told(0.3, 1))]
    beside = {"interference_level": 4096.0, "size_bytes": 1 << 20, "compute_period_us": 400.0}
    [by_bin] = losses_of(frame(*({**row, **beside} for row in rows))).values()
    [losses] = by_bin.values()
    found = {name: by_config["Ring/LL/1ch"][0] for name, by_config in losses.items()}
    assert found == pytest.approx({"matmul 4096": 0.02, "persistent-matmul 4096": 0.3})
    assert losses_at(losses, [ABSTAIN])[0].shape == (2, 1)


def test_without_nccls_own_choice_and_in_other_environments_nothing_is_said() -> None:
    assert losses_of(frame(told(0.02, 1))) == {}
    rows = told(0.02, 1, launch_profile="nvls-off"), own(0.1, launch_profile="nvls-off")
    assert losses_of(frame(*rows)) == {}


def test_the_nearest_size_within_an_octave_tells() -> None:
    by_bin: dict[int, dict[str, Losses]] = {
        40: {"1": {"": (0.1, 0.0, 1.0)}},
        44: {"2": {"": (0.2, 0.0, 1.0)}},
    }
    assert near(by_bin, 41) == by_bin[40]
    assert near(by_bin, 47) == by_bin[44]
    assert near(by_bin, 60) == {}


def test_own_choice_surely_costs_less_than_measured_and_others_more() -> None:
    losses = {"4096": {"": (0.12, 0.05, 1.0), "Ring/LL/2ch": (0.02, 0.01, 1.1)}}
    configs = [ABSTAIN, *(Config(Algorithm.Ring, Protocol.LL, n) for n in (2, 8))]
    [shares], [longer] = losses_at(losses, configs)
    assert shares.tolist() == pytest.approx([0.07, 0.03, np.nan], nan_ok=True)
    assert longer.tolist() == pytest.approx([1.0, 1.1, np.nan], nan_ok=True)


def test_what_an_h200_lost_foretells_what_its_jobs_gained() -> None:
    """Steps of 29,706 us took 2,636, 1,826 and 1,864 us less with 1, 2 and 4 channels than with 16.

    Medians of two jobs of each (tests/gpu/test_step.py, November 2026): an all-reduce of 16 MiB
    beside eight products of edge 8,192. Of the sweep before them one of two cycles was kept.
    """
    table = pl.read_csv(Path(__file__).parents[1] / "data" / "h200_beside.csv")
    plain = {"interference_kind": "matmul"}
    rows = [
        {**(default() if row["is_default"] else forced("Ring", "Simple")), **plain, **row}
        for row in table.to_dicts()
    ]
    measured = frame(*rows)
    [(_, by_bin)] = losses_of(measured.filter(sweep="channels")).items()
    whole = by_bin[size_bin(64 << 20)]["matmul 8192"]
    means = [whole[f"Ring/Simple/{count}ch"][0] for count in (1, 2, 4, 8, 16)]
    # Not by SMs, of which 16 channels are a quarter, but by waves of tiles.
    assert means == pytest.approx([0.01, 0.07, 0.14, 0.11, 0.16], abs=0.02)
    step = measured.filter(sweep="step")
    [losses] = losses_of(step).values()
    losses_there = losses[size_bin(16 << 20)]
    configs = [ABSTAIN, *(Config(Algorithm.Ring, Protocol.Simple, n) for n in (1, 2, 4))]
    lost, longer = losses_at(losses_there, configs)
    own_us = float(np.median(step.filter("is_default")["time_us"]))
    compute_us = 8 * 2e-6 * 8192**3 / float(np.median(step["compute_alone_tflops"]))
    task = JobTask(("AllReduce", 2, 2, 0), own_us, 0.0, [compute_us], losses_there)
    change = change_of_task_us(longer, lost, task)
    # What is surely gained is gained, and more; and one channel is foretold to be the best.
    gained_us = np.array([2_636.0, 1_826.0, 1_864.0])
    assert change[1] < -500.0
    assert (-change[1:] < gained_us).all()
    assert change.argmin() == 1
