import subprocess
import sys
from pathlib import Path

import pytest

from dynamiccl.errors import UserError
from tests import vocabulary


def test_committed_header_is_what_would_be_generated() -> None:
    vocabulary.check()


def test_stale_header_fails_and_names_the_command(tmp_path: Path) -> None:
    header = tmp_path / "vocabulary.h"
    vocabulary.write(header)
    vocabulary.check(header)
    header.write_text(header.read_text().replace("kMaxChannels = 64", "kMaxChannels = 63"))
    with pytest.raises(UserError, match=r"stale; run 'python -m tests\.vocabulary'"):
        vocabulary.check(header)


def test_missing_header_is_stale(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stale"):
        vocabulary.check(tmp_path / "vocabulary.h")


def test_check_command_ends_well_on_the_committed_header() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.vocabulary", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
