"""The four commands as people type them: help, results, one-line errors and exit codes.

They run in this process, through the entry points of the console scripts, but for one start of each
as a program.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from dynamiccl.datasets import store
from dynamiccl.datasets.store import measurements_table
from tests.cli.conftest import COMMANDS, LOG_ROW, MODULES, ROOT, Shell, refused
from tests.collect.clusters import rows
from tests.conftest import Trained

HEAD = "# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 8 minBytes 8 maxBytes 64\n"
IMPORT = ("dynamiccl-collect", "import", "--out", "data", "--system", "box")


def test_light_commands_load_no_heavy_package() -> None:
    """`dynamiccl-collect` runs on a login node, and --help at once."""
    heavy = {"torch", "d3rlpy", "mlflow", "matplotlib", "jinja2", "ray", "optuna"}
    code = f"import sys, {', '.join(MODULES.values())}; print({heavy} & sys.modules.keys())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-P", "-c", code], env=env) == b"set()\n"


@pytest.mark.parametrize(
    ("command", "subcommand"), [(name, sub) for name, subs in COMMANDS for sub in subs]
)
def test_help_has_an_example(command: str, subcommand: str, shell: Shell) -> None:
    done = shell(command, subcommand, "--help")
    assert (done.code, done.err) == (0, "")
    example = done.out.partition("Example: ")[2].partition("\n")[0]
    assert f"{command} {subcommand}" in example


def test_people_are_told_what_json_says(shell: Shell, tmp_path: Path) -> None:
    wrong = LOG_ROW.replace(" 0 102.0", " 3 102.0")
    (tmp_path / "a.log").write_text(HEAD + wrong)
    (tmp_path / "allgather.log").write_text(
        "1048576 32768 float none -1 100.0 10.49 9.18 0 102.0 10.28 9.00 0\n"
    )
    told = shell(*IMPORT, "a.log", "allgather.log")
    assert told.code == 0
    assert "a.log: 1 measurements had wrong values" in told.err
    assert "a.log (and 1 more files): the output shows no NCCL_* setting: taken as" in told.err
    assert "with --algorithm, --protocol, --channels)" in told.err
    assert "collective AllGather taken from the file's name" in told.err
    assert "were there already" not in told.out
    again = shell(*IMPORT, "a.log", "allgather.log")
    assert "4 measurements written; 4 were there already" in again.out


def test_only_the_first_lines_are_shown(shell: Shell, tmp_path: Path) -> None:
    names = ["a", "aa", "aaa", "aaaa", "aaaaa"]
    for name in names:
        rows = "".join(f"allreduce,{size},100\n" for size in (len(name), *"vwxyz"))
        (tmp_path / f"{name}.csv").write_text(f"collective,size_bytes,time_us\n{rows}")
    told = shell(*IMPORT, *(f"{name}.csv" for name in names))
    assert "5 measurements written, 0 dropped, 0 duplicates, 25 rejected" in told.out
    assert told.err.count(": size_bytes: Input should be a valid integer") == 20
    assert told.err.endswith("... and 6 more (with --json)\n")


@pytest.mark.parametrize("command", MODULES)
def test_every_command_says_its_release(command: str, shell: Shell) -> None:
    done = shell(command, "--version")
    assert (done.code, done.out, done.err) == (0, f"{version('dynamiccl')}\n", "")
    assert "--version" in shell(command, "--help").out


@pytest.mark.parametrize(("command", "subcommands"), COMMANDS)
def test_a_bare_command_shows_its_help(
    command: str, subcommands: tuple[str, ...], shell: Shell
) -> None:
    done = shell(command)
    assert done.code == 2
    assert all(f" {name} " in done.out + done.err for name in subcommands)


@pytest.mark.parametrize(
    "line",
    [
        "dynamiccl-deploy export badc0de --out out",
        "dynamiccl-deploy export models:/dynamiccl@nobody --out out",
        "dynamiccl-train promote badc0de --gated .",
    ],
)
def test_a_wrong_name_is_told(line: str, trained: Trained, shell: Shell) -> None:
    words = line.split()
    without = refused(shell(*words), 2)
    assert "no MLflow store at mlflow.db" in without or "badc0de" in without
    assert not Path("mlflow.db").exists()  # a look for a run leaves nothing behind
    shutil.copy(trained.tracking_uri.removeprefix("sqlite:///"), "mlflow.db")
    said = refused(shell(*words), 2)
    assert "badc0de" in said or "nobody" in said


def test_slow_nic_is_exit_code_1(shell: Shell, tmp_path: Path) -> None:
    table = measurements_table(rows(4, "nic:2:1:1.5", gpus=4).to_dicts())
    store.write_part(tmp_path / "data", table, provenance={})
    done = shell("dynamiccl-collect", "health", "data")
    assert done.code == 1
    assert re.search(r"nic: node2 GPU 1 (?:4[5-9]|5[0-4])% \(z \d+\)", done.out)
    assert shell("dynamiccl-collect", "health", "data", "--json").code == 1
