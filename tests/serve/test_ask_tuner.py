"""`dynamiccl-deploy table --plugin` on a tuner that is not ours, and on ours."""

import subprocess
from pathlib import Path

import pytest

from dynamiccl.errors import PluginError
from dynamiccl.libraries import TUNER_NAME
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.serve.abi import TunerPlugin
from dynamiccl.serve.answers import nccl_choice
from dynamiccl.serve.ask_tuner import SIZES, made_up_costs
from tests.cli.conftest import Shell, refused

SHAPE = ("--ranks", 8, "--nodes", 1)
ALL_REDUCE, BROADCAST = int(Collective.AllReduce), int(Collective.Broadcast)


@pytest.fixture(name="csv_tuner", scope="module")
def csv_tuner_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("tuner") / "libnccl-tuner-csv.so"
    source = Path(__file__).parents[1] / "fakes" / "tuners" / "csv_tuner.c"
    strict = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run(["cc", *strict, "-o", library, source], check=True)
    return library


@pytest.fixture(name="rules")
def rules_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rules.csv"
    path.write_text(
        f"{ALL_REDUCE},0,65536,{int(Algorithm.Ring)},{int(Protocol.LL)},4\n"
        f"{ALL_REDUCE},65537,1048576,{int(Algorithm.NVLS)},{int(Protocol.Simple)},0\n"
        f"{BROADCAST},0,99999999999,{int(Algorithm.Tree)},{int(Protocol.LL)},9\n"
    )
    monkeypatch.setenv("CSV_TUNER_RULES", str(path))
    return path


@pytest.mark.usefixtures("rules")
def test_any_tuner_is_asked_through_the_newest_version_it_has(
    csv_tuner: Path, shell: Shell
) -> None:
    said = shell("dynamiccl-deploy", "table", "--plugin", csv_tuner, *SHAPE).json
    assert (said["name"], said["tuner_versions"], said["asked_version"]) == ("CSV", [4], 4)
    at = {row["size_bytes"]: row["config"] for row in said["decisions"]["AllReduce"]}
    assert list(at) == list(SIZES)
    assert at[1024] == at[65536] == "Ring/LL/4ch"
    assert at[131072] == at[1 << 20] == "NVLS/Simple"
    # No rule: it wrote one channel and no cell, and that is what is shown.
    assert at[1 << 21] == at[1 << 34] == "auto/auto/1ch"
    # The cell of a Tree broadcast does not exist, and its rule is passed over.
    assert {row["config"] for row in said["decisions"]["Broadcast"]} == {"auto/auto/1ch"}


@pytest.mark.usefixtures("rules")
def test_table_format_joins_neighbouring_sizes(csv_tuner: Path, shell: Shell) -> None:
    command = ("dynamiccl-deploy", "table", "--plugin", csv_tuner, *SHAPE, "--format", "table")
    done = shell(*command)
    assert (done.code, done.err) == (0, "")
    assert "CSV (tuner v4), 8 ranks on 1 nodes, made-up costs" in done.out
    rows = [line.split("│")[1:5] for line in done.out.splitlines() if "AllReduce" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["AllReduce", "1024", "65536", "Ring/LL/4ch"],
        ["AllReduce", "131072", "1048576", "NVLS/Simple"],
        ["AllReduce", "2097152", "17179869184", "auto/auto/1ch"],
    ]


@pytest.mark.parametrize(
    ("fault", "said"),
    [("crash", "signal 11"), ("init", "init returned 3"), ("ask", "getCollInfo returned 2")],
)
def test_tuner_that_fails_does_not_take_us_along(
    fault: str, said: str, csv_tuner: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSV_TUNER_FAULT", fault)
    done = shell("dynamiccl-deploy", "table", "--plugin", csv_tuner, *SHAPE)
    assert said in refused(done, 4)


def test_what_is_no_tuner_is_exit_4(shell: Shell, tmp_path: Path) -> None:
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "empty.so", source], check=True)
    table = ("dynamiccl-deploy", "table", *SHAPE, "--plugin")
    assert "exports no tuner of v4, v5, v6" in refused(shell(*table, "empty.so"), 4)
    assert "cannot load" in refused(shell(*table, "empty.c"), 4)
    assert "give the path of a .so file" in refused(shell(*table, "gone.so"), 2)


@pytest.mark.parametrize("by_variable", [False, True])
def test_ours_answers_by_the_artifacts_table(
    by_variable: bool,
    artifact: Path,
    plugin_path: Path,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operands = () if by_variable else (artifact,)
    if by_variable:
        monkeypatch.setenv("DYNAMICCL_ARTIFACT", str(artifact))
    said = shell("dynamiccl-deploy", "table", *operands, "--plugin", plugin_path, *SHAPE).json
    assert (said["name"], said["tuner_versions"]) == ("DynamICCL", [4, 5, 6])
    at = {row["size_bytes"]: row["config"] for row in said["decisions"]["AllReduce"]}
    assert at[1 << 20] == "Ring/LL"
    assert at[1 << 34] is None


def test_what_cannot_be_shown_says_what_to_give(
    artifact: Path, plugin_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DYNAMICCL_ARTIFACT", raising=False)
    table = ("dynamiccl-deploy", "table", *SHAPE)
    assert "give an ARTIFACT directory, or --plugin" in refused(shell(*table), 2)
    assert "name it, as ARTIFACT" in refused(shell(*table, "--plugin", plugin_path), 2)
    csv = ("--plugin", plugin_path, "--format", "nccl-csv")
    assert "take --format json or table" in refused(shell(*table, *csv), 2)
    uneven = ("dynamiccl-deploy", "table", artifact, "--ranks", 7, "--nodes", 2)
    assert "7 ranks do not divide into 2 nodes" in refused(shell(*uneven), 2)


def test_artifacts_table_for_people(artifact: Path, shell: Shell) -> None:
    done = shell("dynamiccl-deploy", "table", artifact, *SHAPE, "--format", "table")
    assert "box, 8 ranks on 1 nodes" in done.out
    assert "Ring/LL" in done.out
    assert "NCCL's own" in done.out


def test_made_up_costs_are_of_what_nccl_has() -> None:
    costs = made_up_costs(Collective.AllReduce, 1)
    assert nccl_choice(costs) == (Algorithm.Tree, Protocol.LL)
    assert costs[Algorithm.NVLSTree].max() == -1  # needs more nodes
    assert made_up_costs(Collective.AllReduce, 2)[Algorithm.NVLSTree, Protocol.Simple] > 0
    assert (made_up_costs(Collective.Broadcast, 2) > 0).sum() == 3


def test_our_plugin_has_all_versions(plugin_path: Path) -> None:
    assert TunerPlugin(plugin_path).versions == (4, 5, 6)
    with pytest.raises(PluginError, match=TUNER_NAME):
        TunerPlugin(plugin_path.with_name(f"gone-{TUNER_NAME}"))
