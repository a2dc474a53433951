"""Files that are replaced whole, whoever else writes them or was killed."""

import os
from pathlib import Path

import pytest

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.files import replacing, toml_names
from tests.policies import hand_made_manifest
from tests.rows import default, forced, frame


def test_of_two_writers_each_publishes_its_own_and_one_that_fails_nothing(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path, is_synced=True) as second:
            second.write_text("second")
        assert path.read_text() == "second"
        with pytest.raises(FileNotFoundError), replacing(path) as third:
            third.with_name("gone").read_text()
        assert first.read_text() == "first"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_an_editor_s_backup_beside_a_file_is_no_name(tmp_path: Path) -> None:
    for name in ("b.toml", "a.toml", "a.toml~", ".a.toml.swp"):
        (tmp_path / name).touch()
    assert toml_names(tmp_path) == ["a", "b"]


def test_what_killed_writers_left_is_in_no_manifest_and_goes_after_an_hour(tmp_path: Path) -> None:
    killed = [replacing(tmp_path / "state") for _ in range(2)]
    old, new = (writer.__enter__() for writer in killed)
    old.write_text("half")
    new.write_text("half")
    os.utime(old, (0, 0))
    rows = frame(default(), forced("Ring", "LL"))
    policy = hand_made_manifest(rows, rows.select("system", "collective", noise_band=0.01))
    written = policy.write(tmp_path)
    assert written.files == {}
    assert Manifest.read(tmp_path) == written
    assert (old.exists(), new.exists()) == (False, True)
