"""A full disk under `export` and `install`: an error, nothing left over, and the next try works."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def starved(most_bytes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command that can write no file larger than `most_bytes`, as on a disk that fills up."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    code = (
        "import signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from dynamiccl.serve.cli import main; sys.argv[0] = 'dynamiccl-deploy'; main()"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )


@pytest.mark.parametrize("most_bytes", [10, 4000])
def test_half_an_export_is_in_nobodys_way(policy: Path, most_bytes: int, tmp_path: Path) -> None:
    out = tmp_path / "made" / "artifact"
    out.parent.mkdir()
    failed = starved(most_bytes, "export", policy, "--out", out)
    assert failed.returncode == 4, failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in failed.stderr
    assert list(out.parent.iterdir()) == []
    assert starved(1 << 30, "export", policy, "--out", out).returncode == 0


def test_half_an_install_is_in_nobodys_way(
    artifact: Path, plugin_path: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    install = ("install", artifact, "--ungated", "--plugin", plugin_path, "--to", home)
    failed = starved(20_000, *install)
    assert failed.returncode == 4, failed.stderr
    assert not [path for path in home.rglob("*") if path.name.startswith(".")]
    assert not (home / "artifact").exists()
    assert starved(1 << 30, *install).returncode == 0
