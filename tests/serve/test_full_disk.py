"""A full disk under `export` and `install`: an error, nothing left over, and the next try works."""

import resource
from pathlib import Path

from tests.cli.in_process import run


def starved(most_bytes: int, line: str) -> None:
    """A command that can write no larger file, as on a disk that fills up, ends in one line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        code, said = run(line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 4, said
    assert said.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in said


def test_half_an_export_is_in_nobodys_way(policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "artifact"
    out.parent.mkdir()
    export = f"dynamiccl-deploy export {policy} --out {out}"
    for most_bytes in (10, 4000):
        starved(most_bytes, export)
        assert list(out.parent.iterdir()) == []
    code, said = run(export)
    assert code == 0, said


def test_half_an_install_is_in_nobodys_way(
    artifact: Path, plugin_path: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    install = f"dynamiccl-deploy install {artifact} --ungated --plugin {plugin_path} --to {home}"
    starved(20_000, install)
    assert not [path for path in home.rglob("*") if path.name.startswith(".")]
    assert not (home / "artifact").exists()
    code, said = run(install)
    assert code == 0, said
