"""The four commands as people type them: help, results, one-line errors and exit codes.

They run in this process, through the entry points of the console scripts, but for one start of each
as a program.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests.cli.conftest import (
    COMMANDS,
    LOG_ROW,
    MODULES,
    ROOT,
    Done,
    Shell,
    age,
    damage,
    only_part,
    refused,
)
from tests.stores import new_store


@pytest.mark.parametrize("module", MODULES.values())
def test_command_starts_as_a_program(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout


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
    assert f"Example: {command} {subcommand}" in done.out.replace('eval "$(', "")


@pytest.mark.parametrize(("command", "subcommands"), COMMANDS)
def test_every_subcommand_is_known_here(
    command: str, subcommands: tuple[str, ...], shell: Shell
) -> None:
    registered = {info.name for info in import_module(MODULES[command]).app.registered_commands}
    assert registered == set(subcommands)
    assert all(name in shell(command, "--help").out for name in subcommands)


@pytest.fixture(name="reading", params=["describe", "fit", "report"])
def reading_fixture(
    request: pytest.FixtureRequest, shell: Shell, policy: Path, tmp_path: Path
) -> Callable[[Path], Done]:
    """Each command that reads a data directory."""
    uri = new_store(tmp_path)

    def read(data: Path) -> Done:
        commands: dict[str, tuple[object, ...]] = {
            "describe": ("dynamiccl-collect", "describe", data),
            "fit": ("dynamiccl-train", "fit", "--data", data, "--tracking-uri", uri),
            "report": ("dynamiccl-evaluate", "report", "--data", data, "--policy", policy),
        }
        out = ("--out", tmp_path / "report") if request.param == "report" else ()
        return shell(*commands[request.param], *out)

    return read


@pytest.mark.parametrize(
    ("harm", "said"), [(damage, "is damaged"), (age, "holds schema measurements version 99")]
)
def test_bad_parquet_is_exit_3_everywhere(
    harm: Callable[[Path], None], said: str, data: Path, reading: Callable[[Path], Done]
) -> None:
    harm(data)
    line = refused(reading(data), 3)
    assert said in line
    assert str(only_part(data)) in line


def test_empty_data_directory_is_exit_3_everywhere(
    reading: Callable[[Path], Done], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no measurements" in refused(reading(tmp_path / "empty"), 3)


def test_plan_counts_what_would_run(sweep: Path, shell: Shell) -> None:
    plan = shell("dynamiccl-collect", "plan", sweep, "--json").json
    # 2 sizes x (default + 2 algorithms x 3 protocols); NVLSTree has Simple only; the default twice.
    assert (plan["trials"], plan["feasible"], plan["measurements"]) == (14, 10, 24)
    assert plan["infeasible"] == {
        "NVLSTree has no LL for AllReduce": 2,
        "NVLSTree has no LL128 for AllReduce": 2,
    }
    said = shell("dynamiccl-collect", "plan", sweep).out
    assert "10 feasible trials of 14, exhaustive, 2 rounds, about 24 measurements" in said
    assert "one process for each config would be" in said


def test_run_describe_and_resume(sweep: Path, shell: Shell) -> None:
    command = ("dynamiccl-collect", "run", sweep, "--out", "o", "--runner", "simulator")
    done = shell(*command, "--json")
    assert done.code == 0
    assert json.loads(done.out)["rows_written"] == 28
    [system] = shell("dynamiccl-collect", "describe", "o", "--json").json
    assert (system["system"], system["rows"], system["simulated"]) == ("sim", 28, True)
    assert "sim (simulated)" in shell("dynamiccl-collect", "describe", "o").out
    assert "go on with --resume" in refused(shell(*command), 2)
    again = json.loads(shell(*command, "--resume", "--json").out)
    assert (again["rows_written"], again["launches_run"], again["ended"]) == (0, 0, "done")


def test_recipes_are_listed(shell: Shell) -> None:
    recipes = shell("dynamiccl-train", "list", "--json").json
    assert {"ddqn-dueling", "drqn-lstm", "cql", "bc", "gaussian-process"} <= {
        r["name"] for r in recipes
    }
    assert "ddqn-dueling" in shell("dynamiccl-train", "list").out


@pytest.mark.parametrize("command", ["run", "import"])
def test_out_that_is_a_file_is_one_line(
    command: str, sweep: Path, shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("x")
    (tmp_path / "x.log").write_text(LOG_ROW)
    arguments: dict[str, list[object]] = {
        "run": [sweep, "--runner", "simulator"],
        "import": [tmp_path / "x.log", "--system", "s", "--collective", "AllReduce"],
    }
    done = shell("dynamiccl-collect", command, *arguments[command], "--out", tmp_path / "taken")
    assert done.code in {2, 4}
    assert "taken" in refused(done, int(str(done.code)))


def test_describe_draws_its_plots(sweep: Path, shell: Shell) -> None:
    assert shell("dynamiccl-collect", "run", sweep, "--out", "o", "--runner", "simulator").code == 0
    found = shell("dynamiccl-collect", "describe", "o", "--plots", "p", "--json").json
    assert [Path(plot).name for plot in found["plots"]] == ["sim.png"]


def test_doctor_tells_what_is_missing_and_what_to_do(sweep: Path, shell: Shell) -> None:
    done = shell("dynamiccl-collect", "doctor", sweep, "--json")
    checks = {check["name"]: check for check in json.loads(done.out)}
    assert "nccl-tests" in checks
    assert all(check["advice"] for check in checks.values() if check["status"] == "fail")
    failed = any(check["status"] == "fail" for check in checks.values())
    assert done.code == (4 if failed else 0)
