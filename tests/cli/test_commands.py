"""The four commands as people type them: help, results, one-line errors and exit codes.

They run in this process, through the entry points of the console scripts, but for one start of each
as a program.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from bench_health import rows

from dynamiccl.datasets import store
from dynamiccl.datasets.store import measurements_table
from dynamiccl.simulator.systems import find_system, system_text
from dynamiccl.train import tracking
from tests.cli.conftest import COMMANDS, LOG_ROW, MODULES, ROOT, Shell, refused
from tests.collect import test_fit_simulator as fits
from tests.conftest import Trained
from tests.stores import uri_of

HEAD = "# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 8 minBytes 8 maxBytes 64\n"
IMPORT = ("dynamiccl-collect", "import", "--out", "data", "--system", "box")


def test_light_commands_load_no_heavy_package() -> None:
    """`dynamiccl-collect` runs on a login node, and --help at once."""
    heavy = {"torch", "d3rlpy", "mlflow", "matplotlib", "jinja2", "ray", "optuna"}
    code = f"import sys, {', '.join(MODULES.values())}; print({heavy} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "set()\n"


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


def test_a_directory_stands_for_the_files_in_it(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "logs" / "deep").mkdir(parents=True)
    (tmp_path / "logs" / "deep" / "a.log").write_text(HEAD + LOG_ROW)
    (tmp_path / "logs" / "b.csv").write_text(
        "collective,size_bytes,time_us\nallreduce,2097152,140\n"
    )
    (tmp_path / "logs" / "notes.txt").write_text("remember the milk\n")
    (tmp_path / "logs" / "systems.toml").write_text("[systems.box]\nnic_gbits_per_s = 400\n")
    told = shell(*IMPORT, "logs", "--systems", "logs/systems.toml")
    assert told.out.startswith("2 rows read, 3 measurements written")
    assert "systems.toml" not in told.err
    assert "logs/notes.txt: left alone, no kind that is known" in told.err


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


@pytest.fixture(name="champion")
def champion_fixture(trained: Trained, tmp_path: Path) -> None:
    """A copy of the run's store, since a champion is named in it; where the commands look."""
    shutil.copy(trained.tracking_uri.removeprefix("sqlite:///"), tmp_path / "mlflow.db")
    uri = uri_of(tmp_path)
    tracking.register(uri, trained.run_id, tracking.CHAMPION)


@pytest.mark.usefixtures("champion")
def test_export_takes_every_name_of_a_policy(trained: Trained, shell: Shell) -> None:
    names = (trained.run_id, "models:/dynamiccl@champion", trained.policy, trained.run_directory)
    found = [
        shell("dynamiccl-deploy", "export", name, "--out", f"out-{i}")
        for i, name in enumerate(names)
    ]
    assert [done.code for done in found] == [0] * len(names)
    hashes = {Path(f"out-{i}/policy.pt").read_bytes() for i in range(len(names))}
    assert hashes == {(trained.policy / "policy.pt").read_bytes()}


@pytest.mark.parametrize(
    "arguments",
    [
        ("dynamiccl-deploy", "export", "badc0de", "--out", "out"),
        ("dynamiccl-deploy", "export", "models:/dynamiccl@nobody", "--out", "out"),
        ("dynamiccl-evaluate", "gate", "--policy", "badc0de", "--data", "DATA", "--out", "out"),
        ("dynamiccl-evaluate", "report", "--policy", "badc0de", "--data", "DATA", "--out", "out"),
        ("dynamiccl-evaluate", "simulate", "--policy", "badc0de", "--out", "out"),
        ("dynamiccl-train", "promote", "badc0de", "--gated", "DATA"),
    ],
    ids=lambda arguments: f"{arguments[1]}-{arguments[2]}",
)
def test_a_wrong_name_is_told(arguments: tuple[str, ...], trained: Trained, shell: Shell) -> None:
    words = [str(trained.data) if word == "DATA" else word for word in arguments]
    without = refused(shell(*words), 2)
    assert "no MLflow store at mlflow.db" in without or "badc0de" in without
    assert not Path("mlflow.db").exists()  # a look for a run leaves nothing behind
    shutil.copy(trained.tracking_uri.removeprefix("sqlite:///"), "mlflow.db")
    line = refused(shell(*words), 2)
    assert "badc0de" in line or "nobody" in line


def test_slow_nic_is_exit_code_1_text_and_json(shell: Shell, tmp_path: Path) -> None:
    table = measurements_table(rows(4, "nic:2:1:1.5", gpus=4).to_dicts())
    store.write_part(tmp_path / "data", table, provenance={})
    done = shell("dynamiccl-collect", "health", "data", "--json")
    assert done.code == 1, done.err
    assert json.loads(done.out)["is_well"] is False
    again = shell("dynamiccl-collect", "health", "data")
    assert again.code == 1
    assert re.search(r"nic: node2 GPU 1 (?:4[5-9]|5[0-4])% \(z \d+\)", again.out)
    assert max(map(len, again.out.splitlines())) <= 100


def test_a_fitted_file_is_a_system_to_sweep_on(shell: Shell, tmp_path: Path) -> None:
    fits.store_of(tmp_path / "data", fits.rows(noise=0.01))
    text = system_text(fits.ring_only(lambda value: 1.5 * value))
    (tmp_path / "base.toml").write_text(text, encoding="utf-8")
    words = ("--data", "data", "--base", "base.toml", "--out", "mine.toml")
    done = shell("dynamiccl-collect", "fit-simulator", *words)
    assert done.code == 0
    assert "above 1 MiB" in done.out
    assert "mine -> mine.toml" in done.out
    assert find_system(str(tmp_path / "mine.toml")).name == "mine"
    sweep = tmp_path / "on_mine.toml"
    sweep.write_text(
        'name = "s"\nsystem = "mine"\ncollectives = ["AllReduce"]\n'
        "groups = [{ num_nodes = 1, ranks_per_node = 8 }]\n"
        'sizes = { list = ["1M"] }\nprotocols = ["LL"]\nalgorithms = ["Ring"]\n'
        '[simulator]\nsystem = "mine.toml"\n'
    )
    ran = shell("dynamiccl-collect", "run", sweep, "--runner", "simulator", "--out", "o", "--json")
    assert ran.json["rows_by_status"] == {"ok": 15}
    assert shell("dynamiccl-collect", "plan", sweep, "--json").json["system"] == "mine"
