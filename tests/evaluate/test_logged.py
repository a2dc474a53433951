"""What a policy is worth by a sweep that drew what it measured, against the whole grid's truth."""

from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid, task_grid, usable
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.ope.estimators import NO_INTERVAL, NO_OVERLAP
from dynamiccl.evaluate.ope.logged import LoggedValue, logged_blocks, logged_values
from dynamiccl.evaluate.ope.logs import drawn_rows, read_log
from dynamiccl.evaluate.policies import Actions, LearnedPolicy
from tests.data_sets import SYSTEM, make_data

SWEEP = """
name = "drawn"
system = "sim-4x8"
collectives = ["AllReduce"]
algorithms = ["Ring", "Tree", "NVLSTree"]
groups = [{{ num_nodes = 4, ranks_per_node = 8 }}]
sizes = {{ min = "64K", max = "1G" }}
nccl_version = "2.27.5"
cycles = {cycles}
strategy = {strategy}
[simulator]
seed = 3
noise_sigma = {sigma}
"""
RANDOM = '{ kind = "random", share = 0.3 }'
WHOLE = [*Split]


def measured(folder: Path, strategy: str, cycles: int = 40, sigma: float = 0.05) -> pl.DataFrame:
    text = SWEEP.format(strategy=strategy, cycles=cycles, sigma=sigma)
    return read(make_data(folder, text))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    return measured(tmp_path_factory.mktemp("random") / "store", RANDOM)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> TaskGrid:
    """All configs without noise."""
    folder = tmp_path_factory.mktemp("truth") / "store"
    frame = measured(folder, '{ kind = "exhaustive" }', 1, 0.0)
    return task_grid(frame, Catalogue.from_frame(usable(frame)), WHOLE)


class Always:
    """A policy that wants one config everywhere, but for the first `abstains` tasks."""

    def __init__(self, action: int, abstains: int = 0) -> None:
        self.name = f"always-{action}"
        self._action, self._abstains = action, abstains

    def choose_among(self, tasks: pl.DataFrame, mask: npt.NDArray[np.bool_]) -> Actions:
        assert mask[:, self._action].all()
        return np.where(np.arange(tasks.height) < self._abstains, ABSTAIN_ACTION, self._action)


def value_of(frame: pl.DataFrame, policy: Always) -> LoggedValue:
    catalogue = Catalogue.from_frame(usable(frame))
    grid = task_grid(frame, catalogue, WHOLE)
    found = logged_values(frame, catalogue, grid, [cast(LearnedPolicy, policy)])
    assert list(found) == [SYSTEM]
    return found[SYSTEM][0]


def test_the_log_holds_every_draw_and_its_probability(drawn: pl.DataFrame) -> None:
    catalogue = Catalogue.from_frame(usable(drawn))
    grid = task_grid(drawn, catalogue, WHOLE)
    rows = drawn_rows(drawn, catalogue, grid)
    log = read_log(rows, grid)
    per_cycle = np.ceil(0.3 * (len(catalogue) - 1))
    assert len(log) == grid.tasks.height * 40 * per_cycle
    assert log.propensity == pytest.approx(1 / (len(catalogue) - 1))
    assert not log.adaptive
    assert (log.action != ABSTAIN_ACTION).all()
    assert log.reward == pytest.approx(-rows["time_us"].to_numpy() / grid.default_us[log.task])


@pytest.mark.parametrize("action", [1, 4])
@pytest.mark.parametrize("abstains", [0, 5])
def test_estimates_hold_the_truth_of_the_whole_grid(
    action: int, abstains: int, drawn: pl.DataFrame, exact: TaskGrid
) -> None:
    found = value_of(drawn, Always(action, abstains))
    ratio = (exact.times_us[:, action] / exact.default_us)[abstains:]
    assert (found.tasks, found.acts) == (exact.tasks.height, exact.tasks.height - abstains)
    for name in ("SNIPS", "DR"):
        each = found.estimates[name]
        assert each.value is not None
        assert each.low is not None
        assert each.high is not None
        # Means of noisy times and the noise of the default lie a little off the exact ones.
        assert -each.value == pytest.approx(ratio.mean(), rel=0.05)
        assert -each.high - 0.03 < ratio.mean() < -each.low + 0.03


def test_who_abstains_everywhere_needs_no_estimate(drawn: pl.DataFrame) -> None:
    found = value_of(drawn, Always(ABSTAIN_ACTION))
    assert (found.acts, found.draws, dict(found.estimates)) == (0, 0, {})
    (table,) = logged_blocks([found])
    assert table.rows == [["always-0", f"0 of {found.tasks}", "0", "-", "-", "-"]]


def test_few_draws_are_no_overlap_and_the_page_says_so(drawn: pl.DataFrame) -> None:
    few = drawn.filter(pl.col("round") < 3)
    (table,) = logged_blocks([value_of(few, Always(1))])
    row = dict(zip(table.heads, table.rows[0], strict=True))
    assert row["DR"] == row["SNIPS"] == NO_OVERLAP
    assert float(row["DM"]) > 0.0


def test_a_sweep_that_follows_what_it_sees_gives_no_interval(tmp_path: Path) -> None:
    frame = measured(tmp_path / "store", '{ kind = "adaptive", max_rounds = 3, epsilon = 0.5 }')
    found = value_of(frame, Always(1))
    assert found.estimates["DM"].note == NO_INTERVAL
    assert found.estimates["DR"].low is None
    assert found.estimates["DR"].note in {NO_INTERVAL, NO_OVERLAP}


def test_a_whole_grid_holds_no_draws(data_dir: Path) -> None:
    frame = read(data_dir)
    catalogue = Catalogue.from_frame(usable(frame))
    grid = task_grid(frame, catalogue, WHOLE)
    assert logged_values(frame, catalogue, grid, [cast(LearnedPolicy, Always(1))]) == {}
    assert list(logged_blocks(())) == []
