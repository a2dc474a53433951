"""What docs/ddp-hook.md shows to copy, run as it stands there."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from tests.serve.ddp.ranks import run_ranks, small_model, step_of
from tests.stores import new_store

PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "ddp-hook.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def run_block(rank: int, block: str) -> dict[str, float]:
    model = small_model()
    names: dict[str, Any] = {"model": model}
    exec(block, names)
    for step in range(3):
        step_of(model, rank, step)
    stats: dict[str, float] = names["state"].stats()
    return stats


def test_the_three_lines_of_the_page_train(tmp_path: Path) -> None:
    three = blocks()[0]
    assert len([line for line in three.splitlines() if line]) == 3
    found = run_ranks(run_block, 2, tmp_path, three)
    assert all(stats["steps"] == 3 and stats["wire_bytes"] > 0 for stats in found)


def logged(rank: int, argument: tuple[str, str]) -> None:
    import mlflow

    block, uri = argument
    mlflow.set_tracking_uri(uri)
    with mlflow.start_run():
        run_block(rank, block)


def test_the_line_for_mlflow_logs_every_step(tmp_path: Path) -> None:
    (block,) = (each for each in blocks() if "mlflow.log_metrics" in each)
    run_ranks(logged, 1, tmp_path / "ranks", (block, new_store(tmp_path)))
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        steps = database.execute("select step from metrics where key = 'ratio'").fetchall()
    assert sorted(steps) == [(1,), (2,)]
