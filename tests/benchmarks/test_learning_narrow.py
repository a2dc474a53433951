"""Logs of a table in use: how narrow they are, and that the truth is without noise."""

from pathlib import Path

import numpy as np
import pytest
from learning_narrow import EXPLORED, TIMES, _grids, _judged, _make_logs, _table

from dynamiccl.datasets.cells import task_grid, tuned
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import part_paths, read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("narrow")
    _make_logs(made, 0)
    return made


def test_nearly_all_calls_run_what_the_table_says(folder: Path) -> None:
    _, _, catalogue = _grids(folder)
    log = task_grid(tuned(read(folder / "log")), catalogue, list(Split))
    table = _table(folder, log, catalogue)
    rows = np.arange(len(table))
    # NCCL's own choice is timed once more than it is taken.
    calls = log.repeats.sum() - len(table)
    assert calls == TIMES * len(table)
    kept = log.repeats[rows, table].sum() - (table == 0).sum()
    random = EXPLORED / log.mask.sum(axis=1).clip(min=1)
    assert kept / calls == pytest.approx(1.0 - EXPLORED, abs=0.02 + float(random.mean()))
    assert part_paths(folder / "log", "costs")


def test_the_best_has_no_regret_and_nccl_keeps_no_gain(folder: Path) -> None:
    truth, log, _ = _grids(folder)
    best = _judged(truth, np.nanargmin(truth.times_us, axis=1))
    assert best["mean_regret"] == best["share_worse"] == 0.0
    assert best["gain_kept"] == pytest.approx(1.0)
    assert _judged(truth, np.zeros(len(truth.times_us), dtype=np.int64))["gain_kept"] == 0.0
    assert set(log.tasks["split"]) == {"train"}
