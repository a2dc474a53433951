"""`dynamiccl-run --ab`: real launches in turns, what is concluded, and the roll-back."""

import importlib.machinery
import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.doctor import Machine
from dynamiccl.serve.install import install
from dynamiccl.serve.plugin_index import PluginIndex
from dynamiccl.serve.this_machine import ask_probe

#: Prints steps; the arguments are the time with our tuner and without, and what it does with it.
JOB = """
import os, random, sys, time
ours = "dynamiccl" in os.environ.get("NCCL_TUNER_PLUGIN", "")
step_s, what = float(sys.argv[1 if ours else 2]), sys.argv[3]
if ours and what == "crash":
    sys.exit(9)
if what == "fail":
    sys.exit(8)
if ours and what == "hang":
    time.sleep(600)
# As NCCL says it, once a rank, of three communicators.
if ours and os.environ["NCCL_DEBUG"] == "INFO" and "INIT" in os.environ["NCCL_DEBUG_SUBSYS"]:
    acts = "the artifact's table, from call 0: it acts in %d of 405 size bins"
    tables = [acts % 37, acts % 37, "NCCL's own choice stands: a rank left"]
    if what == "nowhere":
        tables = [acts % 0, "NCCL's own choice stands: a rank left", acts % 0]
    for comm, told in enumerate(tables if what != "mute" else ()):
        for rank in range(4 if comm < 2 else 8):
            head = "n1:%d:%d [%d] NCCL INFO DYNAMICCL: " % (9, 9 + rank, rank)
            print("%s%d ranks on 1 nodes: %s" % (head, 4 if comm < 2 else 8, told), flush=True)
for step in range(12):
    taken = step_s * random.lognormvariate(0, 0.01) * (5 if step < 5 else 1)
    if what == "quiet":
        time.sleep(step_s / 100)
    else:
        print("iteration", step, "step time: %.5f s" % taken, flush=True)
print(sorted(n for n in os.environ if n.startswith("DYNAMICCL")), flush=True)
if what == "endless":
    time.sleep(600)
"""


@pytest.fixture(name="home")
def home_fixture(artifact: Path, plugin_path: Path, tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    index, machine = PluginIndex.read(artifact), ask_probe(Machine(), plugin_path)["machine"]
    index.bound(index.system_names[0], f"{machine};nccl=22809").write(artifact)
    return install(artifact, tmp_path / "home", plugin_path).directory


def command(home: Path, options: tuple[str, ...], job: tuple[str, ...]) -> list[str]:
    run = [str(home / "bin" / "dynamiccl-run"), "--ab", *options, "--"]
    return [*run, sys.executable, str(home.parent / "job.py"), *job]


def tried(
    home: Path, *job: str, options: tuple[str, ...] = ()
) -> tuple["subprocess.CompletedProcess[str]", dict[str, Any]]:
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("DYNAMICCL", "NCCL"))}
    out = home.parent / "out"
    done = subprocess.run(
        command(home, ("--out", str(out), "--seed", "1", *options), job),
        env=clean,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    path = out / "ab.json"
    return done, json.loads(path.read_text()) if path.exists() else {}


def test_a_faster_job_is_told_and_the_artifact_stays(home: Path) -> None:
    done, found = tried(home, "0.09", "0.10", "")
    assert done.returncode == 0, done.stderr
    assert found["verdict"] == "faster"
    assert "step time with DynamICCL -" in done.stderr
    assert not (home / "artifact" / "kill").exists()
    arms = [launch["arm"] for launch in found["launches"]]
    assert sorted(arms) == ["with"] * 5 + ["without"] * 5
    assert all(set(pair) == {"with", "without"} for pair in zip(arms[::2], arms[1::2], strict=True))
    assert all(len(launch["steps_s"]) == 7 for launch in found["launches"])  # 12 but for 5
    for launch in found["launches"]:
        told = Path(launch["output"]).read_text().splitlines()[-1]
        assert ("DYNAMICCL_ARTIFACT" in told) == (launch["arm"] == "with")
        assert (told == "['DYNAMICCL_DISABLE']") == (launch["arm"] == "without")
        acted = 2 if launch["arm"] == "with" else 0
        assert launch["tables"]["acted_in"] == acted
    assert (
        "tables acted in 10 of 15 communicators (5 launches), not in others: a rank left"
        in done.stderr
    )


def test_the_same_line_twice_keeps_both_outcomes_and_a_named_one_stays(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "mine.txt").touch()
    for name in ("ab-2", "ab-3"):
        line = command(home, ("--pairs", "1"), ("0.1", "0.1", ""))
        done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120)
        assert f"all of it: {name}/ab.json" in done.stderr
    assert [path.name for path in (tmp_path / "ab").iterdir()] == ["mine.txt"]
    line = command(home, ("--pairs", "1", "--out", "ab-2"), ("0.1", "0.1", ""))
    again = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
    assert again.returncode == 2
    assert "--out ab-2 holds the outcome of another run" in again.stderr


def test_equal_jobs_cannot_be_told_apart(home: Path) -> None:
    done, found = tried(home, "0.1", "0.1", "", options=("--pairs", "4"))
    assert done.returncode == 0
    assert found["verdict"] != "worse"
    assert len(found["log_ratios"]) == 4


def test_a_slower_job_stops_early_and_switches_the_artifact_off(home: Path) -> None:
    done, found = tried(home, "0.12", "0.10", "", options=("--pairs", "10"))
    assert done.returncode == 1
    assert found["verdict"] == "worse"
    assert 3 <= len(found["log_ratios"]) < 10
    kill = home / "artifact" / "kill"
    assert kill.exists()
    assert f"on again: rm {kill}" in done.stderr
    again, _ = tried(home, "0.12", "0.10", "", options=("--out", str(home.parent / "two")))
    assert again.returncode == 2
    assert "is switched off" in again.stderr


def test_keep_leaves_the_artifact_on(home: Path) -> None:
    done, found = tried(home, "0.12", "0.10", "", options=("--keep",))
    assert (done.returncode, found["verdict"], found["switched_off"]) == (1, "worse", None)
    assert not (home / "artifact" / "kill").exists()


@pytest.mark.parametrize(("what", "options"), [("crash", ()), ("hang", ("--seconds", "2"))])
def test_a_job_that_fails_with_us_alone_is_rolled_back_at_once(
    what: str, options: tuple[str, ...], home: Path
) -> None:
    done, found = tried(home, "0.1", "0.1", what, options=options)
    assert (done.returncode, found["verdict"]) == (1, "fails")
    assert len(found["launches"]) == 2
    assert (home / "artifact" / "kill").exists()


def test_a_job_that_fails_without_us_is_no_fault_of_ours(home: Path) -> None:
    done, _ = tried(home, "0.1", "0.1", "fail")
    assert done.returncode == 4
    assert "fails without DynamICCL, too" in done.stderr
    assert not (home / "artifact" / "kill").exists()


def test_without_step_times_whole_launches_count(home: Path) -> None:
    done, found = tried(home, "0.1", "0.1", "quiet", options=("--pairs", "2"))
    assert done.returncode == 0
    assert "whole launches: no step time was found" in done.stderr
    assert {launch["by"] for launch in found["launches"]} == {"wall"}


def test_launches_end_after_the_seconds(home: Path) -> None:
    done, found = tried(home, "0.1", "0.1", "endless", options=("--pairs", "1", "--seconds", "1"))
    assert done.returncode == 0, done.stderr
    assert all(launch["ended_by_us"] for launch in found["launches"])
    assert all(len(launch["steps_s"]) == 7 for launch in found["launches"])


def test_where_no_table_acts_it_stops_and_says_so(home: Path) -> None:
    done, found = tried(home, "0.1", "0.1", "nowhere")
    assert (done.returncode, found["verdict"]) == (3, "not tested")
    assert len(found["launches"]) <= 2
    why = (
        "no table acted in any of 3 communicators: the table for 8 ranks on 1 nodes acts at no size"
    )
    assert why in done.stderr
    assert "cannot be told apart" not in done.stderr


def test_a_log_that_says_nothing_of_tables_is_no_equal_job(home: Path) -> None:
    done, found = tried(home, "0.1", "0.1", "mute", options=("--pairs", "2"))
    assert (done.returncode, found["verdict"]) == (3, "not tested")
    assert len(found["launches"]) == 4
    assert "whether a table acted is not known" in done.stderr


def test_a_machine_that_the_artifact_does_not_know_is_named(
    artifact: Path, plugin_path: Path, tmp_path: Path
) -> None:
    """By dynamiccl-run itself, whatever NCCL's log has: nothing of it is bound here."""
    (tmp_path / "job.py").write_text(JOB)
    (artifact / "plugin.index").write_bytes(
        replace(PluginIndex.read(artifact), systems={}).to_bytes()
    )
    home = install(artifact, tmp_path / "home", plugin_path).directory
    done, found = tried(home, "0.1", "0.1", "mute")
    assert (done.returncode, found["verdict"]) == (3, "not tested")
    assert (
        "no table acted: NCCL's own choice stands: the artifact does not know this" in done.stderr
    )


@pytest.mark.parametrize(
    ("given", "debug", "subsystems"),
    [
        ({}, "INFO", "INIT"),
        ({"NCCL_DEBUG": "WARN", "NCCL_DEBUG_SUBSYS": "NET"}, "INFO", "INIT"),
        ({"NCCL_DEBUG": "info", "NCCL_DEBUG_SUBSYS": "NET"}, "info", "NET,INIT"),
        ({"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_FILE": "/tmp/%h"}, "TRACE", None),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^INIT"}, "INFO", "^INIT"),
    ],
)
def test_both_arms_have_what_shows_the_lines(
    given: dict[str, str], debug: str, subsystems: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DYNAMICCL_MODE", "adaptive")
    for arm in ("with", "without"):
        found = the_program().environment_of(arm)
        assert (found["NCCL_DEBUG"], found.get("NCCL_DEBUG_SUBSYS")) == (debug, subsystems)
        assert "NCCL_DEBUG_FILE" not in found
        assert ("DYNAMICCL_MODE" in found, "DYNAMICCL_DISABLE" in found) == (
            arm == "with",
            arm == "without",
        )


def test_ctrl_c_ends_the_job_and_keeps_what_there_is(home: Path) -> None:
    words = command(home, ("--out", str(home.parent / "out")), ("0.1", "0.1", "endless"))
    running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    log = home.parent / "out"
    deadline = time.monotonic() + 60
    while not any("step 11" in p.read_text() or "[" in p.read_text() for p in log.glob("*.log")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "no pair was finished" in said
    assert json.loads((log / "ab.json").read_text())["verdict"] == "unknown"
    left = subprocess.run(
        ["pgrep", "-f", str(home.parent / "job.py")], capture_output=True, text=True, check=False
    )
    assert left.stdout == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--pairs", "0"), "--pairs 0 is too little"),
        (("--step-time", "x"), "--step-time 'x' has no group"),
        (("--step-time", "("), "is no regular expression"),
        (("--seconds", "0"), "--seconds 0.0 is no time"),
    ],
)
def test_wrong_usage_names_the_value(options: tuple[str, ...], said: str, home: Path) -> None:
    done, _ = tried(home, "0.1", "0.1", "", options=options)
    assert done.returncode == 2
    assert said in done.stderr


def the_program() -> Any:
    path = Path(__file__).parents[2] / "serve" / "launch" / "dynamiccl-ab"
    loader = importlib.machinery.SourceFileLoader("dynamiccl_ab", str(path))
    spec = importlib.util.spec_from_loader("dynamiccl_ab", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def stopped(program: Any, true: float, sigma: float, pairs: int, seed: int) -> bool:
    draws = random.Random(seed)
    ratios: list[float] = []
    for _ in range(pairs):
        ratios.append(true + draws.gauss(0.0, sigma))
        if program.is_worse(ratios, 0.02):
            return True
    return False


def test_the_rule_rarely_rolls_back_what_is_as_fast_and_finds_what_is_slower() -> None:
    program = the_program()
    for sigma in (0.01, 0.03, 0.1):
        for true in (0.0, math.log(1.02)):  # the second is all that is borne
            alarms = sum(stopped(program, true, sigma, 10, seed) for seed in range(1000))
            assert alarms <= 35  # 2.1 % in 2,000 draws, however large the noise
    assert sum(stopped(program, math.log(1.1), 0.03, 10, seed) for seed in range(200)) > 190


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("elapsed time per iteration (ms): 123.4 | learning rate", 0.1234),
        ("step 7 step_time=0.250s loss 3.1", 0.25),
        ("{'step time': 250 ms}", 0.25),
        ("12%|#   | 3/25 [00:01<00:09, 2.50s/it]", 2.5),
        ("loss 3.1", None),
    ],
)
def test_step_times_of_common_trainers_are_found(line: str, seconds: float | None) -> None:
    asked = the_program().options(["--", "true"])
    found = the_program().step_of(line, asked)
    assert found == (None if seconds is None else pytest.approx(seconds))
