"""Bad input ends in one line with the value and the way out: the table, signals, disk, rights."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import COMMANDS, LOG_ROW, SWEEP, Shell, refused

PROGRAMS = Path(sys.executable).parent
TABLE = tomllib.loads(Path(__file__).with_name("bad_input.toml").read_text(encoding="utf-8"))
ROWS = [row for rows in TABLE.values() for row in rows]


def test_the_table_is_large_and_has_every_command() -> None:
    assert len(ROWS) >= 60
    typed = {tuple(row["line"].split()[:2]) for row in ROWS}
    missing = {(name, sub) for name, subs in COMMANDS for sub in subs} - typed
    assert missing == {("dynamiccl-train", "list")}  # it reads nothing
    assert all(len(row["said"]) >= 2 for row in ROWS)


def name_of(row: dict[str, Any]) -> str:
    changed = [*row.get("files", ()), *row.get("sweep", ())[1:]]
    return f"{row['line']} [{', '.join(changed)}]" if changed else str(row["line"])


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_it_ends_in_one_line(
    row: dict[str, Any], shell: Shell, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    old, new = row.get("sweep", ("", ""))
    assert old in SWEEP
    (tmp_path / "s.toml").write_text(SWEEP.replace(old, new) if old else SWEEP)
    files: dict[str, str] = row.get("files", {})
    named = {word.split("/")[0] for word in (*shlex.split(row["line"]), *files)}
    for fixture in named & {"data", "artifact"}:
        request.getfixturevalue(fixture)
    if "policy" in named:
        shutil.copytree(request.getfixturevalue("policy"), tmp_path / "policy")
    for name, content in files.items():
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            text = content.replace("LOG_ROW", LOG_ROW).replace("SWEEP", SWEEP)
            (tmp_path / name).write_bytes(text.encode("latin-1"))
    line = refused(shell(*shlex.split(row["line"])), row["code"])
    for part in row["said"]:
        assert part in line


def full_disk(tmp_path: Path) -> Path:
    """A file system of 64 KiB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    asked = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(asked, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    return disk


@pytest.mark.parametrize(
    "line",
    [
        "dynamiccl-collect run s.toml --runner simulator --out disk/o",
        "dynamiccl-collect import a.csv --system s --out disk/o",
        "dynamiccl-deploy export policy --out disk/o",
    ],
)
def test_a_full_disk_is_named(line: str, policy: Path, shell: Shell, tmp_path: Path) -> None:
    disk = full_disk(tmp_path)
    try:
        (disk / "filler").write_bytes(b"0" * (64 << 10))
        (tmp_path / "s.toml").write_text(SWEEP)
        shutil.copytree(policy, tmp_path / "policy")
        rows = [f"AllReduce,{1 << (10 + i % 20)},1,8,{i + 1}" for i in range(2000)]
        head = "collective,size_bytes,num_nodes,ranks_per_node,time_us"
        (tmp_path / "a.csv").write_text("\n".join([head, *rows]))
        told = refused(shell(*line.split()), 4)
        assert "No space left" in told
        assert "free some space" in told
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("line", "closed"),
    [
        ("dynamiccl-collect plan s.toml", "s.toml"),
        ("dynamiccl-collect import a.log --system s --out o", "a.log"),
        ("dynamiccl-collect describe data", "data"),
        ("dynamiccl-collect run s.toml --runner simulator --out closed/o", "closed"),
        ("dynamiccl-train fit --data data", "closed"),
        ("dynamiccl-deploy install artifact --to o", "artifact/manifest.json"),
    ],
)
@pytest.mark.usefixtures("data", "artifact")
def test_what_may_not_be_read_or_written_is_named(line: str, closed: str, tmp_path: Path) -> None:
    """Root without the right to pass over permissions is as anybody else."""
    for name in ("s.toml", "a.log"):
        (tmp_path / name).write_text(SWEEP)
    (tmp_path / "closed").mkdir()
    command, *arguments = line.split()
    drop = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    if os.geteuid() == 0 and subprocess.run([*drop, "true"], check=False).returncode != 0:
        pytest.skip("this root may not give up a right")
    (tmp_path / closed).chmod(0o500 if closed == "closed" else 0)
    done = subprocess.run(
        [*(drop if os.geteuid() == 0 else []), str(PROGRAMS / command), *arguments],
        cwd=tmp_path,
        env=os.environ | {"MLFLOW_TRACKING_URI": "sqlite:///closed/m.db"},
        capture_output=True,
        text=True,
        check=False,
    )
    (tmp_path / closed).chmod(0o700)
    assert done.returncode in {2, 4}, done.stderr
    *working, told = done.stderr.removesuffix("\n").split("\n")
    # On a slow machine a log gets a line for what took seconds.
    assert all(re.fullmatch("loading .*: [0-9]+ s", line) for line in working)
    assert told.startswith("error: ")
    assert closed in told
    assert any(word in told.lower() for word in ("permission", "read-only", "not readable"))
