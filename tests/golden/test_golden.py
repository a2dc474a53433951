"""Every golden is as it was kept; and a comparison can tell."""

from pathlib import Path
from typing import Any

import pytest

from tests.golden import commands
from tests.golden.golden import (
    DATA,
    Comparer,
    Golden,
    as_json,
    equal_rows,
    equal_values,
    same_share,
    written,
)
from tests.golden.registry import GOLDENS


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_golden(golden: Golden, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    commands.trained = lambda: request.getfixturevalue("trained").run_directory
    found = golden.differences(tmp_path)
    lines = "\n".join(found)
    again = f"python -m tests.golden {golden.name}"
    assert not found, f"{lines}\nif this is meant, write it anew and say why: {again}"


def test_names_say_where_a_golden_is_from_and_every_kept_file_has_one() -> None:
    names = [golden.name for golden in GOLDENS]
    assert len(set(names)) == len(names)
    assert {path.name.partition(".")[0] for path in DATA.glob("*")} <= set(names)


ROWS: dict[str, Any] = {"columns": ["size", "time"], "rows": [[1, 2.0], [2, None]]}
WIDER: dict[str, Any] = {"columns": ["time", "new", "size"], "rows": [[2.0, 5, 1], [None, 5, 2]]}


@pytest.mark.parametrize(
    ("compare", "kept", "made", "differences"),
    [
        (equal_values, {"a": [1, 2.0]}, {"a": [1.0, 2.0 + 1e-10], "later": 3}, 0),
        (equal_values, {"a": 1.0}, {"a": 1.0 + 1e-8}, 1),
        (equal_values, {"a": None, "b": True}, {"a": 0, "b": 1}, 2),
        (equal_values, {"a": "x"}, {}, 1),
        (equal_values, [1, 2], [1, 2, 3], 1),
        (equal_values, [1, 2], {"columns": []}, 1),
        (equal_values, list(range(50)), list(range(1, 51)), 21),
        (equal_rows, ROWS, WIDER, 0),
        (equal_rows, WIDER, ROWS, 2),
        (equal_rows, ROWS, {**ROWS, "rows": ROWS["rows"][:1]}, 1),
        (equal_rows, ROWS, {**ROWS, "rows": ROWS["rows"][::-1]}, 4),
        (same_share(0.99), [0] * 100, [0] * 99 + [1], 0),
        (same_share(0.99), [0] * 100, [0] * 98 + [1, 1], 1),
        (same_share(0.99), [0] * 100, [0] * 99, 1),
        (same_share(0.5), {"a": [0, 0], "b": [1]}, {"a": [0, 1]}, 1),
    ],
)
def test_comparison_sees_what_differs_and_nothing_else(
    compare: Comparer, kept: Any, made: Any, differences: int
) -> None:
    assert len(compare(as_json(kept), as_json(made))) == differences


def test_a_kept_row_is_a_line() -> None:
    value = {"columns": ["a", "b"], "rows": [[number, "x" * 70] for number in range(3)]}
    assert written(value).count("\n") == 8
    assert as_json(value) == value
