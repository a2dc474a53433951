"""Every golden is as it was kept."""

from pathlib import Path

import pytest

from tests.golden.__main__ import GOLDENS
from tests.golden.golden import DATA, Golden


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_golden(golden: Golden, tmp_path: Path) -> None:
    lines = "\n".join(golden.differences(tmp_path))
    again = f"python -m tests.golden {golden.name}"
    assert not lines, f"{lines}\nif this is meant, write it anew and say why: {again}"


def test_every_kept_file_has_a_golden() -> None:
    names = [golden.name for golden in GOLDENS]
    assert len(set(names)) == len(names)
    assert {path.stem for path in DATA.glob("*")} == set(names)
