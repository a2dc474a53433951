"""The judge: frozen draws, and entries of every kind that are asked about them."""

import csv
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.datasets.store import read
from dynamiccl.errors import CorruptFile, MissingPath, NotEnoughData, UnknownName
from dynamiccl.evaluate.policies import Actions, Oracle
from dynamiccl.evaluate.worlds.answers import read_answers, write_answers
from dynamiccl.evaluate.worlds.draws import Draw
from dynamiccl.evaluate.worlds.frozen import DRAWS, VERSION, drifted, known
from dynamiccl.evaluate.worlds.kinds import WORLDS
from dynamiccl.evaluate.worlds.nvidia_csv import table_actions
from dynamiccl.nccl import Collective
from dynamiccl.serve.nccl_csv import nccl_csv
from dynamiccl.serve.table import DecisionTable
from tests.cli.conftest import Shell, refused
from tests.once import once

PAGE = Path(__file__).parents[2] / "docs" / "evaluate.md"
#: The page's example, run by this Python.
SCRIPT = (
    PAGE.read_text(encoding="utf-8")
    .partition("```python\n")[2]
    .partition("```")[0]
    .replace("/usr/bin/env python3", sys.executable)
)


@pytest.fixture(name="out")
def out_fixture(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A directory with two draws of one world."""

    def make(folder: Path) -> None:
        for number in range(2):
            Draw.open("gb10", number, folder / VERSION)

    made = once(tmp_path_factory, "worlds", make)
    return Path(shutil.copytree(made / VERSION, tmp_path / "judged" / VERSION)).parent


@pytest.fixture(name="draw")
def draw_fixture(out: Path) -> Draw:
    return Draw.open("gb10", 0, out / VERSION)


def script(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def test_no_test_size_is_told_and_costs_are(draw: Draw) -> None:
    train = read(draw.folder / "train")
    assert set(with_split(train)["split"]) == {Split.TRAIN.value, Split.VALIDATION.value}
    assert read(draw.folder / "train", "costs").height > 0
    with (draw.folder / "questions.csv").open(encoding="utf-8") as file:
        questions = list(csv.DictReader(file))
    assert [row["task"] for row in questions] == draw.tasks
    assert len(set(draw.tasks)) == len(draw.tasks) > 0
    assert not [name for name in questions[0] if "time" in name or name.endswith("_us")]
    for row, choices, mask in zip(questions, draw.choices, draw.truth.mask, strict=True):
        assert row["choices"].split() == list(choices)
        assert len(choices) == mask.sum() - 1


def test_draw_is_made_once_and_what_a_killed_command_left_is_no_draw(out: Path, draw: Draw) -> None:
    before = {path: path.stat().st_mtime_ns for path in draw.folder.rglob("*")}
    (out / VERSION / "gb10" / ".0.partial").mkdir()
    Draw.open("gb10", 0, out / VERSION)
    assert {path: path.stat().st_mtime_ns for path in draw.folder.rglob("*")} == before


def test_hashes_are_those_of_the_version_and_tell_what_changed(draw: Draw) -> None:
    assert {world: len(draws) for world, draws in known().items()} == dict.fromkeys(WORLDS, DRAWS)
    assert drifted(draw) == []

    def with_truth(factor: float) -> Draw:
        times = draw.truth.times_us.copy()
        times[3, 1] *= factor
        return replace(draw, truth=replace(draw.truth, times_us=times))

    assert drifted(with_truth(1.0 + 1e-13)) == []
    [line] = drifted(with_truth(1.001))
    assert "gb10-0: the true times are not those of worlds-1" in line
    closed = drifted(with_truth(np.nan))
    assert [line.partition(" are ")[0] for line in closed] == [
        "gb10-0: the test questions",
        "gb10-0: the true times",
    ]
    validation = replace(draw.validation, times_us=2.0 * draw.validation.times_us)
    [line] = drifted(replace(draw, validation=validation))
    assert "the times to learn from" in line


def test_command_says_that_a_draw_is_another(shell: Shell, out: Path) -> None:
    place = out / VERSION / "gb10"
    shutil.rmtree(place / "1")
    shutil.copytree(place / "0", place / "1")
    command = ("dynamiccl-evaluate", "benchmark", "nccl-default", "--worlds", "gb10", "--draws", 2)
    done = shell(*command, "--out", out)
    assert done.code == 0
    [line] = done.err.splitlines()
    assert f"no longer those of {VERSION}" in line
    assert "gb10-1: the true times" in line
    assert "(and 1 more)" in line
    found = json.loads((out / "benchmark.json").read_text(encoding="utf-8"))
    assert (found["is_frozen"], len(found["drift"])) == (False, 2)


def test_script_is_asked_and_judged(shell: Shell, out: Path, tmp_path: Path) -> None:
    entry = script(tmp_path / "nearest.py", SCRIPT)
    command = ("dynamiccl-evaluate", "benchmark", entry, "--worlds", "gb10", "--draws", 2)
    found = shell(*command, "--out", out, "--json").json
    assert (found["version"], found["is_frozen"], found["errors"]) == (VERSION, True, [])
    policies = found["worlds"]["gb10"]
    assert list(policies) == ["nearest.py", "nccl-default", "k-nearest", "interpolated"]
    ours = policies["nearest.py"]
    assert ours["draws"] == 2
    assert 0.0 < ours["mean_regret"] < policies["nccl-default"]["mean_regret"]
    assert ours["mean_regret_lo"] < ours["mean_regret"] < ours["mean_regret_hi"]
    assert found["paired"]["gb10"]["nccl-default"]["regret"] == pytest.approx(
        ours["mean_regret"] - policies["nccl-default"]["mean_regret"]
    )
    # Another time nobody is asked: a script that fails is not started.
    script(entry, "#!/bin/sh\nexit 1\n")
    again = shell(*command, "--out", out, "--resume", "--json").json
    assert again == found
    shown = shell(*command, "--out", out, "--resume")
    assert "nearest.py" in shown.out
    assert (out / "benchmark.json").is_file()


def test_one_failed_draw_costs_no_other(shell: Shell, out: Path, tmp_path: Path) -> None:
    body = SCRIPT.replace("rows =", "assert '/gb10/0/' in train, 'one draw only'\nrows =")
    entry = script(tmp_path / "half.py", body)
    command = ("dynamiccl-evaluate", "benchmark", entry, "--worlds", "gb10", "--draws", 2)
    done = shell(*command, "--out", out)
    assert "half.py" in done.out
    message = refused(replace(done, out=""), 2)
    assert "1 of 2 draws" in message
    assert "gb10-1: " in message
    assert "ended with code 1" in message
    assert "one draw only" in message


@pytest.mark.parametrize(
    ("text", "limit_s", "said"),
    [
        ("#!/bin/sh\nsleep 60 & sleep 60\n", 0.5, "had not answered gb10-0 after 0.5 s"),
        ("#!/bin/sh\nexit 7\n", 60, "ended with code 7 on gb10-0 (it printed nothing)"),
        ("print('no first line')\n", 60, "does not start"),
        ("#!/bin/sh\ntrue\n", 60, "no answers at"),
        ("#!/bin/sh\nhead -1 $2 > $3\n", 60, "has no column algorithm, protocol, channels"),
    ],
)
def test_script_without_answers(
    shell: Shell, out: Path, tmp_path: Path, text: str, limit_s: float, said: str
) -> None:
    entry = script(tmp_path / "bad", text)
    command = ("dynamiccl-evaluate", "benchmark", entry, "--worlds", "gb10", "--draws", 1)
    assert said in refused(shell(*command, "--out", out, "--limit-s", limit_s), 2)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (
            lambda rows: rows[:-1],
            NotEnoughData,
            r"answers 49 of 50 tasks; ReduceScatter/4x1/\d+ has no row",
        ),
        (lambda rows: [*rows, rows[0]], NotEnoughData, "AllGather/4x1/2048 is answered twice"),
        (
            lambda rows: ["AllGather/4x1/7,Ring,LL,1", *rows[1:]],
            UnknownName,
            "unknown task 'AllGather/4x1/7'",
        ),
        (
            lambda rows: ["AllGather/4x1/2048,Tree,LL,1", *rows[1:]],
            UnknownName,
            r"unknown choice of task AllGather/4x1/2048 'Tree/LL/1' in .*row 2; choose from Ring",
        ),
        (
            lambda rows: ["AllGather/4x1/2048,Ring,LL,many", *rows[1:]],
            UnknownName,
            "'Ring/LL/many'",
        ),
    ],
)
def test_answers_are_read_back_or_refused(
    draw: Draw, tmp_path: Path, change: object, error: type[Exception], said: str
) -> None:
    assert callable(change)
    path = tmp_path / "answers.csv"
    write_answers(path, draw, Oracle().choose(draw.truth))
    assert np.array_equal(read_answers(path, draw), Oracle().choose(draw.truth))
    head, *rows = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([head, *change(rows)]), encoding="utf-8")
    with pytest.raises(error, match=said):
        read_answers(path, draw)


def sizes_of(draw: Draw, collective: str) -> list[int]:
    return draw.truth.tasks.filter(collective=collective)["size_bytes"].to_list()


def chosen(draw: Draw, actions: Actions, collective: str) -> list[str]:
    mine = (draw.truth.tasks["collective"] == collective).to_numpy()
    return [draw.catalogue.configs[action].key for action in actions[mine]]


def test_table_that_the_product_writes_is_judged_as_it_acts(draw: Draw, tmp_path: Path) -> None:
    best = Oracle().choose(draw.truth)
    place = draw.truth.tasks.select("collective", "bin").rows()
    config_at = {
        task: draw.catalogue.configs[action] for task, action in zip(place, best, strict=True)
    }
    collectives = [each.wire for each in Collective if each.tunable]
    table = DecisionTable.from_configs(
        [[config_at.get((name, index)) for index in range(130)] for name in collectives],
        num_nodes=4,
        num_ranks=4,
    )
    path = tmp_path / "table.csv"
    path.write_text(nccl_csv(table).text, encoding="utf-8")
    assert np.array_equal(table_actions(path, draw), best)


def test_first_matching_row_decides_and_without_one_nccl(draw: Draw, tmp_path: Path) -> None:
    sizes = sizes_of(draw, "AllReduce")
    path = tmp_path / "table.csv"
    path.write_text(
        "# a table\n"
        "allreduce,0,999999999999,ring,ll,2,8,8\n"
        "allreduce,0,999999999999,ring,ll,2,-1,-1,4,-1\n"
        "allreduce,0,999999999999,nvls_tree,simple,64,-1,-1,-1,-1\n"
        f"allgather,0,{sizes[1]},ring,ll,2,4,4\n"
        f"allgather,0,{sizes[3]}, ring, simple, 4, -1, -1, -1, 0\n",
        encoding="utf-8",
    )
    actions = table_actions(path, draw)
    # Other shapes, other counts of operations, and what is not to be had leave it to NCCL.
    assert set(chosen(draw, actions, "AllReduce")) == {"ABSTAIN"}
    gather = chosen(draw, actions, "AllGather")
    assert gather[:2] == ["Ring/LL/2ch"] * 2
    assert gather[2:4] == ["Ring/Simple/4ch"] * 2
    assert set(gather[4:]) == {"ABSTAIN"}


@pytest.mark.parametrize(
    ("row", "error", "said"),
    [
        ("allreduce,0,9999,ring,ll,3,-1,-1", UnknownName, "'Ring/LL/3'.*line 1; choose from Ring"),
        ("allreduce,0,9999,ring,ll,0,-1,-1", UnknownName, "'Ring/LL'.*choose from Ring/LL/1"),
        ("allreduce,0,9999,rung,ll,1,-1,-1", UnknownName, "unknown algorithm 'rung'.*line 1"),
        ("allreduce,0,1K,ring,ll,1,-1,-1", CorruptFile, "'1K'"),
        ("allreduce,0,9999,ring,ll", CorruptFile, "has 5 fields"),
    ],
)
def test_row_that_cannot_be_judged(
    draw: Draw, tmp_path: Path, row: str, error: type[Exception], said: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(row + "\n", encoding="utf-8")
    with pytest.raises(error, match=said):
        table_actions(path, draw)
    with pytest.raises(MissingPath):
        table_actions(tmp_path / "no.csv", draw)


def test_table_of_each_draw_by_its_place(shell: Shell, out: Path, tmp_path: Path) -> None:
    for number in range(2):
        row = "# nothing\n" if number else "allgather,0,9999999999,ring,simple,1,-1,-1\n"
        (tmp_path / f"gb10-{number}.csv").write_text(row, encoding="utf-8")
    command = ("dynamiccl-evaluate", "benchmark", tmp_path / "{world}-{draw}.csv")
    found = shell(*command, "--worlds", "gb10", "--draws", 2, "--out", out, "--json").json
    assert found["entry"] == "{world}-{draw}"
    answers = sorted((out / "answers" / "world-draw").iterdir())
    lines = [path.read_text(encoding="utf-8") for path in answers]
    assert ["Ring,Simple,1" in text for text in lines] == [True, False]


def test_recipe_and_its_policy_answer_alike(shell: Shell, out: Path) -> None:
    command = ("--worlds", "gb10", "--draws", 1, "--out", out, "--json")
    trained = shell("dynamiccl-evaluate", "benchmark", "gaussian-process", *command).json
    figures = trained["worlds"]["gb10"]["gaussian-process"]
    # As `python benchmarks/learning.py worlds` has it of this draw.
    assert figures["mean_regret"] == pytest.approx(0.00068788, rel=1e-3)
    near = trained["worlds"]["gb10"]["k-nearest"]
    assert near["mean_regret"] == pytest.approx(0.00029395, rel=1e-3)
    [policy] = (out / "answers" / "gaussian-process").glob("mlruns/*/artifacts/policy")
    alone = shell("dynamiccl-evaluate", "benchmark", policy, *command).json
    assert alone["worlds"]["gb10"]["policy"] == figures


def test_what_is_no_entry(shell: Shell, out: Path, tmp_path: Path) -> None:
    command = ("dynamiccl-evaluate", "benchmark")
    asked = ("--worlds", "gb10", "--draws", 1, "--out", out)
    message = refused(shell(*command, "gausian-process", *asked), 2)
    assert "did you mean 'gaussian-process'?" in message
    assert "TABLE.csv" in message
    plain = tmp_path / "plain.sh"
    plain.write_text("#!/bin/sh\n", encoding="utf-8")
    if os.access(plain, os.X_OK):
        pytest.skip("everything is executable here")
    assert f"chmod +x {plain}" in refused(shell(*command, plain, *asked), 2)
    unknown = shell(*command, "k-nearest", "--worlds", "b200", "--out", out)
    assert "unknown world 'b200'" in refused(unknown, 2)
    many = shell(*command, "k-nearest", "--draws", DRAWS + 1, "--out", out)
    assert f"take 1 to {DRAWS}" in refused(many, 2)
