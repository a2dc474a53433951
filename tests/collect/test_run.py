from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.collect.run import RunSummary, run_sweep
from dynamiccl.collect.runner import Row
from dynamiccl.collect.simulator.runner import SimulatorRunner
from dynamiccl.collect.sweep import Sweep, Trial, parse_sweep
from dynamiccl.datasets import store
from dynamiccl.datasets.schema import REQUESTED_COLUMNS
from dynamiccl.errors import InvalidSweep, UserError

TEXT = """
name = "grid"
system = "sim"
collectives = ["AllReduce"]
algorithms = ["Ring", "NVLSTree"]
protocols = ["LL", "Simple"]
groups = [{ num_nodes = 2, ranks_per_node = 8 }]
sizes = { min = "1M", max = "4M" }
cycles = 3
"""
#: 3 sizes x (default, Ring/LL, Ring/Simple, NVLSTree/LL, NVLSTree/Simple); NVLSTree has no LL.
TRIALS, INFEASIBLE = 15, 3


def sweep(text: str = TEXT) -> Sweep:
    return parse_sweep(text, where="s.toml")


def run(out: Path, made: Sweep | None = None, *, resume: bool = False) -> RunSummary:
    made = made or sweep()
    return run_sweep(made, SimulatorRunner(made.file), out, resume=resume)


def figures(out: Path) -> list[tuple[object, ...]]:
    columns = ("trial", "run", "repeat", "status", "time_us", "actual_algorithm")
    return sorted(store.read(out).select(columns).rows(), key=str)


def parts(out: Path) -> list[Path]:
    return [path for path in out.rglob("*") if path.is_file()]


class Interrupted(Exception):
    """Ends a sweep as Ctrl-C would."""


class StopsAfter:
    """The simulator on a machine that goes down after so many trials."""

    def __init__(self, made: Sweep, trials: int) -> None:
        self._runner = SimulatorRunner(made.file)
        self._left = trials
        self.seen: list[str] = []

    def check(self, trials: Sequence[Trial]) -> None:
        self._runner.check(trials)

    def measure(self, trial: Trial, *, run: str, repeat: int) -> list[Row]:
        if not self._left:
            raise Interrupted
        self._left -= 1
        self.seen.append(trial.key)
        return self._runner.measure(trial, run=run, repeat=repeat)


def test_every_trial_is_a_row_of_every_cycle(tmp_path: Path) -> None:
    summary = run(tmp_path)
    assert (summary.trials, summary.cycles_done, summary.cycles_skipped) == (TRIALS, 3, 0)
    assert summary.rows_written == 3 * TRIALS
    assert summary.rows_by_status == {
        "ok": 3 * (TRIALS - INFEASIBLE),
        "infeasible": 3 * INFEASIBLE,
    }
    rows = store.read(tmp_path)
    assert rows.group_by("run", "repeat").len().sort("run").rows() == [
        (f"cycle-{cycle}", cycle, TRIALS) for cycle in range(3)
    ]
    assert rows["trial"].n_unique() == TRIALS


def test_each_cycle_is_a_part_of_its_own(tmp_path: Path) -> None:
    run(tmp_path)
    assert len(parts(tmp_path)) == 3
    assert all(pl.read_parquet(path)["run"].n_unique() == 1 for path in parts(tmp_path))


def test_rows_are_marked_as_simulated(tmp_path: Path) -> None:
    run(tmp_path)
    assert store.read(tmp_path)["source"].unique().to_list() == ["simulator"]


def test_default_requests_nothing_and_says_what_ran(tmp_path: Path) -> None:
    run(tmp_path)
    rows = store.read(tmp_path).filter("is_default")
    assert rows.height == 3 * 3
    assert rows.select(pl.all_horizontal(pl.col(REQUESTED_COLUMNS).is_null()).all()).item()
    assert rows["actual_algorithm"].null_count() == rows["actual_protocol"].null_count() == 0
    assert rows["verified"].all()


def test_cycles_take_the_trials_in_different_random_orders(tmp_path: Path) -> None:
    made = sweep()
    runner = StopsAfter(made, -1)
    run_sweep(made, runner, tmp_path, resume=False)
    orders = [runner.seen[i : i + TRIALS] for i in range(0, 3 * TRIALS, TRIALS)]
    assert all(sorted(order) == sorted(trial.key for trial in made.trials) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_sweep_that_is_there_is_not_run_again(tmp_path: Path) -> None:
    run(tmp_path)
    before = figures(tmp_path)
    with pytest.raises(UserError, match=r"holds 3 cycles of sweep 'grid' .* go on with --resume"):
        run(tmp_path)
    assert figures(tmp_path) == before


def test_resume_of_a_finished_sweep_does_nothing(tmp_path: Path) -> None:
    run(tmp_path)
    before = parts(tmp_path)
    summary = run(tmp_path, resume=True)
    assert (summary.cycles_done, summary.cycles_skipped, summary.rows_written) == (0, 3, 0)
    assert parts(tmp_path) == before


@pytest.mark.parametrize("stop", [0, 1, TRIALS - 1, TRIALS, 2 * TRIALS + 3])
def test_resume_gives_the_figures_of_an_uninterrupted_run(stop: int, tmp_path: Path) -> None:
    made = sweep()
    with pytest.raises(Interrupted):
        run_sweep(made, StopsAfter(made, stop), tmp_path / "broken", resume=False)
    assert len(parts(tmp_path / "broken")) == stop // TRIALS
    summary = run(tmp_path / "broken", resume=True)
    assert (summary.cycles_skipped, summary.cycles_done) == (stop // TRIALS, 3 - stop // TRIALS)
    run(tmp_path / "whole")
    assert figures(tmp_path / "broken") == figures(tmp_path / "whole")


def test_more_cycles_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    run(tmp_path)
    longer = sweep(TEXT.replace("cycles = 3", "cycles = 5"))
    assert run(tmp_path, longer, resume=True).cycles_done == 2
    run(tmp_path / "whole", longer)
    assert figures(tmp_path) == figures(tmp_path / "whole")


def test_another_sweep_or_system_in_the_same_directory_is_not_in_the_way(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, sweep(TEXT.replace('"grid"', '"other"')))
    run(tmp_path, sweep(TEXT.replace('"sim"', '"other"')))
    assert store.read(tmp_path).height == 9 * TRIALS


def test_provenance_holds_the_sweep_and_the_runner(tmp_path: Path) -> None:
    run(tmp_path)
    record = store.provenance_of(tmp_path)[0]
    assert record["sweep_file"] == TEXT
    assert (record["tool"], record["runner"]) == ("run", "SimulatorRunner")
    assert {"git_commit", "host", "python", "dynamiccl_version"} <= record.keys()


def test_sweep_that_the_runner_refuses_leaves_nothing(tmp_path: Path) -> None:
    made = sweep(TEXT.replace("num_nodes = 2", "num_nodes = 3"))
    with pytest.raises(InvalidSweep):
        run(tmp_path / "out", made)
    assert not (tmp_path / "out").exists()


def test_progress_is_told_after_every_trial(tmp_path: Path) -> None:
    made = sweep()
    told: list[None] = []
    run_sweep(
        made,
        SimulatorRunner(made.file),
        tmp_path,
        resume=False,
        progress=lambda: told.append(None),
    )
    assert len(told) == 3 * TRIALS


def test_resume_with_other_trials_is_refused(tmp_path: Path) -> None:
    whole = sweep()
    run(tmp_path, Sweep(whole.file, whole.text, whole.trials[:2]))
    before = parts(tmp_path)
    with pytest.raises(UserError, match="other trials"):
        run(tmp_path, whole, resume=True)
    assert parts(tmp_path) == before
