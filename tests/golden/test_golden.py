"""Every golden is as it was kept."""

from pathlib import Path

import pytest

from tests.golden import commands
from tests.golden.golden import (
    DATA,
    Golden,
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
