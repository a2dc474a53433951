"""The other strategies through the real runner: what they pick is played, and its odds recorded."""

from pathlib import Path

import polars as pl
import pytest

from dynamiccl.collect.benchmark.runner import NcclTestsRunner
from dynamiccl.collect.runs.run import run_sweep
from dynamiccl.collect.strategies import make_strategy
from tests.collect.benchmark.stand_in import ROOT, rows, site
from tests.collect.benchmark.sweeps import sweep

SIZES = '{ min = "64K", max = "8M" }'


def run_with(strategy: str, folder: Path, plugin: Path) -> pl.DataFrame:
    made = sweep(strategy=strategy, sizes=SIZES, num_channels="[0, 2, 4, 8]", cycles="3")
    where = site(made, folder, plugin)
    runner = NcclTestsRunner(made.file, where)
    summary = run_sweep(
        made, make_strategy(made.file, made.trials), runner, where.out, resume=False
    )
    assert summary.ended == "done"
    return rows(folder).filter(~pl.col("in_place").fill_null(value=False))


@pytest.mark.parametrize("kind", [pytest.param("random", marks=pytest.mark.soak), "adaptive"])
def test_what_is_picked_is_played_and_its_probability_recorded(
    kind: str, tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = run_with(f'{{ kind = "{kind}", max_rounds = 2 }}', tmp_path, sweep_path)
    forced = found.filter(~pl.col("is_default"), pl.col("status") == "ok")
    assert forced["verified"].all()
    odds = forced["behaviour_probability"]
    assert odds.null_count() == 0
    assert ((odds > 0) & (odds <= 1)).all()
    # Less than the whole grid in every round, and the default pair in each.
    per_round = forced.group_by("round").len()
    assert (per_round["len"] < 8 * 16).all()
    pairs = found.filter("is_default", pl.col("default_scope") == "profile", pl.col("repeat") < 2)
    tasks = found.group_by("round").agg(
        pl.col("size_bytes").filter(~pl.col("is_default")).n_unique()
    )
    assert pairs.height >= 2 * tasks["size_bytes"].sum()
    table = pl.read_csv(tmp_path / "out" / "choices" / "system=box" / "sweep=grid.csv")
    assert table["size_bytes"].n_unique() == 8
