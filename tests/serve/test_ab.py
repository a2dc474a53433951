"""`dynamiccl-deploy ab`: real launches in turns, what is concluded, and the roll-back."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.serve.ab import Launch, conclude, environment_of, is_worse, step_of, tables_in
from dynamiccl.serve.artifact import PluginIndex
from dynamiccl.serve.install import install
from tests.cli.conftest import Done, Shell

#: Prints steps; the arguments are the time with our tuner and without, and what it does with it.
JOB = """
import os, random, signal, sys, time
ours = "dynamiccl" in os.environ.get("NCCL_TUNER_PLUGIN", "")
step_s, what = float(sys.argv[1 if ours else 2]), sys.argv[3]
if ours and what == "crash":
    sys.exit(9)
if ours and what == "hang":
    time.sleep(600)
# As NCCL says it, once a rank, of three communicators.
if ours and os.environ["NCCL_DEBUG"] == "INFO" and "INIT" in os.environ["NCCL_DEBUG_SUBSYS"]:
    acts = "the artifact's table, from call 0: it acts in %d of 405 size bins"
    tables = [acts % 37, acts % 37, "NCCL's own choice stands: a rank left"]
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
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(sorted(n for n in os.environ if n.startswith("DYNAMICCL")), flush=True)
if what in {"endless", "stubborn"} or (ours and what == "late"):
    time.sleep(600)
"""


#: Runs an A/B of JOB with these words; what was said, and its record.
Ab = Callable[..., tuple[Done, dict[str, Any]]]


def line(home: Path, *options: object) -> list[str]:
    job = (sys.executable, home.parent / "job.py")
    return ["dynamiccl-deploy", "ab", *map(str, ("--home", home, *options, "--", *job))]


@pytest.fixture(name="ab")
def ab_fixture(home: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Ab:
    (home.parent / "job.py").write_text(JOB)
    for name in [n for n in os.environ if n.startswith(("DYNAMICCL", "NCCL"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DYNAMICCL_TEST_ROOT", str(home.parent / "machine"))

    def run(*job: str, options: tuple[object, ...] = ()) -> tuple[Done, dict[str, Any]]:
        path = home.parent / "out" / "ab.json"
        done = shell(*line(home, "--out", path.parent, *options), *job)
        return done, json.loads(path.read_text()) if path.exists() else {}

    return run


def test_a_faster_job_keeps_artifact(home: Path, plugin_path: Path, shell: Shell, ab: Ab) -> None:
    done, found = ab("0.09", "0.10", "")
    assert done.code == 0, done.err
    assert found["verdict"] == "faster"
    assert done.out.startswith("faster: step time -")
    assert json.loads((home / "artifact" / "ab.json").read_text()) == found
    assert not (home / "artifact" / "kill").exists()
    assert len(found["launches"]) == 10
    for each in found["launches"]:
        told = Path(each["output"]).read_text().splitlines()[-1]
        assert ("DYNAMICCL_ARTIFACT" in told) == (each["arm"] == "with")
        assert (told == "['DYNAMICCL_DISABLE']") == (each["arm"] == "without")
        assert each["acted_in"] == (2 if each["arm"] == "with" else 0)
        # Of 12 steps the first 5 take five times as long.
        assert each["step_s"] == pytest.approx(0.095, rel=0.15)
    tables = "tables acted in 10 of 15 communicators (5 launches), not in others: a rank left"
    assert found["said"][1:] == [tables]
    install(home.parent / "artifact", home, plugin_path)  # the same one again
    checked = shell("dynamiccl-deploy", "doctor", home / "artifact").out
    assert f"ok    A/B: faster: {found['said'][0]}; " in checked


def test_neither_arm_has_the_warmer_machine(ab: Ab, home: Path) -> None:
    """The first pair's order is drawn, the next one's is the other; a launch before is in none."""
    firsts = set()
    for seed in range(4):
        random.seed(seed)
        out = home / str(seed)
        options = ("--pairs", 2, "--out", out, *(("--seconds", 60) if seed else ()))
        done, _ = ab("0.1", "0.1", "", options=options)
        arms = [each["arm"] for each in json.loads((out / "ab.json").read_text())["launches"]]
        assert arms[:2] == arms[:1:-1]
        assert {*arms[:2]} == {"with", "without"}
        firsts.add(arms[0])
        assert (out / "00-without.log").exists() == (seed == 0) == ("launch 0 of 4" in done.err)
    assert firsts == {"with", "without"}


def test_the_same_line_twice_keeps_both(home: Path, ab: Ab, shell: Shell, tmp_path: Path) -> None:
    for count in (1, 2):
        time.sleep(1.0)  # a folder's name has the second
        done = shell(*line(home, "--pairs", 1), "0.1", "0.1", "quiet")
        outs = sorted(path.name for path in tmp_path.glob("ab-*"))
        assert (done.code, len(outs)) == (0, count)
        assert f"all of it: {outs[-1]}/ab.json" in done.out
        assert "s in all; no step time was found, see --step-time" in done.err
        assert ": time of whole launches " in done.out
    again, _ = ab("0.1", "0.1", "", options=("--out", outs[0]))
    assert again.code == 2
    assert f"--out {outs[0]} holds the outcome of another run" in again.err
    assert not (home / "artifact" / "ab.json").exists()  # one pair shows nothing


def test_a_slower_job_stops_early_and_switches_the_artifact_off(home: Path, ab: Ab) -> None:
    kill = (home / "artifact").resolve() / "kill"
    done, found = ab("0.12", "0.10", "", options=("--pairs", "10"))
    assert (done.code, found["verdict"], kill.exists()) == (1, "worse", True)
    assert 6 <= len(found["launches"]) < 20
    assert f"on again: rm {kill}" in done.out
    assert json.loads((home / "artifact" / "ab.json").read_text()) == found
    again, _ = ab("0.12", "0.10", "", options=("--out", str(home / "two")))
    assert again.code == 2
    assert "is switched off" in again.err


@pytest.mark.parametrize(
    ("what", "options", "said"),
    [
        ("crash", (), "exit code 9"),
        # By the time of the launch without us.
        ("hang", (), "fewer than 8 step times were found in its "),
        # Without us it ends by itself, long before the seconds; steps came before.
        ("late", ("--seconds", "4"), "it said nothing in the last "),
    ],
)
def test_a_job_that_fails_with_us_alone_is_rolled_back_at_once(
    what: str,
    options: tuple[str, ...],
    said: str,
    home: Path,
    ab: Ab,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dynamiccl.serve.ab._LEAST_LIMIT_S", 2.0)
    done, found = ab("0.1", "0.1", what, options=options)
    assert (done.code, found["verdict"]) == (1, "fails")
    assert found["said"][0].startswith(f"with DynamICCL and not without, {said}")
    assert len(found["launches"]) == 2
    assert (home / "artifact" / "kill").exists()


def test_a_job_that_fails_without_us_is_launched_once(home: Path, ab: Ab) -> None:
    done, found = ab("0.1", "no number", "")
    assert (done.code, found["verdict"]) == (4, "fails without us")
    assert found["said"][0].startswith("not our doing, exit code 1; see")
    assert found["launches"] == []
    assert not (home / "artifact" / "kill").exists()


WITHOUT = Launch("without", "log", None, 100.0, False, 0.0, 10, 0.1, 0, 3, None)
WITH = replace(WITHOUT, arm="with", acted_in=3)
ENDLESS = {"wall_s": 600.0, "was_cut": True, "num_steps": 60}
RARELY = {"wall_s": 1200.0, "was_cut": True, "num_steps": 25}


def cut(wall_s: float, lines: int, silent_s: float) -> dict[str, Any]:
    """A launch that was ended, with a line for each step."""
    steps = {"num_steps": lines - 5, "step_s": wall_s / lines}
    return {"wall_s": wall_s, "was_cut": True, "silent_s": silent_s, **steps}


def test_what_is_concluded() -> None:
    table: tuple[tuple[dict[str, Any], dict[str, Any], int, str, str], ...] = (
        ({}, {}, 1, "unknown", "one pair; an interval needs two"),
        ({}, {}, 4, "not worse", "step time +0.0% with DynamICCL (95% interval: +0.0% to +0.0%, 4"),
        ({"step_s": 0.09}, {}, 3, "faster", "step time -9.9%"),
        ({"step_s": 0.11}, {}, 2, "not told apart", "step time +9.4%"),
        ({"step_s": 0.11}, {}, 3, "worse", "step time +10.1%"),
        ({}, {"problem": "exit code 8"}, 1, "fails without us", "not our doing, exit code 8; see"),
        ({"problem": "exit code 9"}, {}, 1, "fails", "with DynamICCL and not without, exit code 9"),
        ({"acted_in": 0, "reason": "a rank left"}, {}, 2, "not tested", "0 of 6 communicators"),
        ({"acted_in": 0, "communicators": 0}, {}, 2, "not tested", "whether a table acted is not"),
        ({}, {"acted_in": 1}, 2, "not tested", "the command loads it by itself"),
        # Without us it ended by itself before its time was up; one that is silent since hangs.
        ({"wall_s": 600.0, "was_cut": True, "silent_s": 0.1}, {}, 2, "not worse", "step time"),
        ({"wall_s": 600.0, "was_cut": True, "silent_s": 400.0}, {}, 1, "fails", "in the last 400"),
        # Neither ends: it hangs that says nothing for much longer than without us between lines.
        (ENDLESS | {"silent_s": 59.0}, ENDLESS, 2, "not worse", "step time"),
        (ENDLESS | {"silent_s": 61.0}, ENDLESS, 1, "fails", "in the last 61 of its 600 s"),
        (cut(1200, 24, 700), cut(1200, 24, 50), 3, "fails", "in the last 700 of its 1200 s"),
        (cut(1200, 24, 300), cut(1200, 24, 50), 3, "not worse", "step time"),
        # Four of its steps, as long as a checkpoint.
        (cut(180, 12, 65), cut(180, 12, 5), 3, "not worse", "step time"),
        # Lines come rarer than steps: it is the lines that are awaited.
        (RARELY | {"silent_s": 190.0}, RARELY, 2, "not worse", "step time"),
        (RARELY | {"silent_s": 250.0}, RARELY, 2, "fails", "in the last 250 of its 1200 s"),
    )
    for ours, theirs, pairs, verdict, said in table:
        scatter = [1.0 + (0.001 * number if "step_s" in ours else 0.0) for number in range(pairs)]
        if verdict == "not told apart":
            scatter = [0.9, 1.1]
        step_s = ours.get("step_s", 0.1)
        found = conclude(
            [
                (replace(WITH, **ours | {"step_s": step_s * factor}), replace(WITHOUT, **theirs))
                for factor in scatter
            ],
        )
        assert (found[0], said in found[1][0]) == (verdict, True), found


def test_another_mode_proves_no_table(home: Path, ab: Ab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMICCL_MODE", "observe")
    done, _ = ab("0.05", "0.1", "", options=("--pairs", 2))
    assert done.code == 0, done.err
    assert not (home / "artifact" / "ab.json").exists()


def test_a_table_that_acts_at_no_size_has_not_acted() -> None:
    told = "8 ranks on 1 nodes: the artifact's table, from call 0: it acts in 0 of 405 size bins"
    why = "the table for 8 ranks on 1 nodes acts at no size"
    assert tables_in([f"n1:9:9 [0] NCCL INFO DYNAMICCL: {told}"]) == (0, 1, why)


def test_an_unknown_machine_is_named(home: Path, artifact: Path, plugin_path: Path, ab: Ab) -> None:
    """By dynamiccl-run itself, whatever NCCL's log has: nothing of it is bound here."""
    replace(PluginIndex.read(artifact), systems={}).write(artifact)
    install(artifact, home, plugin_path)
    done, found = ab("0.1", "0.1", "mute")
    assert (done.code, found["verdict"]) == (3, "not tested")
    why = "(1 launches): NCCL's own choice stands: the artifact does not know"
    assert why in done.out


def test_both_arms_have_what_shows_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with_us = {"DYNAMICCL_MODE", "DYNAMICCL_ARTIFACT"}
    for given, debug, subsystems in (
        ({}, "INFO", "INIT"),
        ({"NCCL_DEBUG": "WARN", "NCCL_DEBUG_SUBSYS": "NET"}, "INFO", "INIT"),
        ({"NCCL_DEBUG": "info", "NCCL_DEBUG_SUBSYS": "NET"}, "info", "NET,INIT"),
        ({"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_FILE": "/tmp/%h"}, "TRACE", None),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^INIT"}, "INFO", "^INIT"),
    ):
        monkeypatch.setattr(os, "environ", given | {"DYNAMICCL_MODE": "adaptive"})
        for arm, ours in (("with", with_us), ("without", {"DYNAMICCL_DISABLE"})):
            found = environment_of(arm, Path("artifact"))
            assert (found["NCCL_DEBUG"], found.get("NCCL_DEBUG_SUBSYS")) == (debug, subsystems)
            assert found.keys() - {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "PYTHONUNBUFFERED"} == ours


@pytest.mark.parametrize("what", ["endless", "stubborn"])
def test_ctrl_c_ends_the_job_and_keeps_what_there_is(what: str, home: Path) -> None:
    """A second one ends a job that does not end when it is told to."""
    log = home.parent / "out"
    (home.parent / "job.py").write_text(JOB)
    options = (*line(home, "--out", log)[1:], "0.1", "0.1", what)
    words = [sys.executable, "-m", "dynamiccl.serve.cli", *options]
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("DYNAMICCL", "NCCL"))}
    deadline = time.monotonic() + 60
    with subprocess.Popen(words, env=clean, stderr=subprocess.PIPE, text=True) as running:
        while not any("['" in p.read_text() for p in log.glob("*.log")):
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        if what == "stubborn":
            with pytest.raises(subprocess.TimeoutExpired):
                running.wait(2.0)
            running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=8)
    assert running.returncode == 130
    assert "no pair was finished" in said
    assert json.loads((log / "ab.json").read_text())["verdict"] == "unknown"
    left = ["pgrep", "-f", str(home.parent / "job.py")]
    assert subprocess.run(left, capture_output=True, check=False).stdout == b""


def test_wrong_usage_names_the_value(ab: Ab) -> None:
    for options, said in (
        (("--pairs", "0"), "not '0'; see"),
        (("--step-time", "x"), "--step-time 'x' has no group"),
        (("--step-time", "("), "is no regular expression"),
        (("--seconds", "0"), "not '0'; see"),
        (("--home", "/nowhere"), "no dynamiccl-run in /nowhere/bin; give --home DIR, where"),
        (("--", "train.py"), "no program 'train.py'; give the job's command after --"),
    ):
        done, _ = ab("0.1", "0.1", "", options=options)
        assert (done.code, said in done.err) == (2, True), done


def stopped(true: float, sigma: float, pairs: int, seed: int) -> bool:
    draws = random.Random(seed)
    ratios: list[float] = []
    for _ in range(pairs):
        ratios.append(true + draws.gauss(0.0, sigma))
        if is_worse(ratios):
            return True
    return False


def test_the_rule_rarely_rolls_back_what_is_as_fast_and_finds_what_is_slower() -> None:
    for sigma in (0.01, 0.03, 0.1):
        for true in (0.0, math.log(1.02)):  # the second is all that is borne
            alarms = sum(stopped(true, sigma, 10, seed) for seed in range(400))
            assert alarms <= 18  # 2.1 % in 2,000 draws, however large the noise
    assert sum(stopped(math.log(1.1), 0.03, 10, seed) for seed in range(200)) > 190


def test_step_times_of_common_trainers_are_found() -> None:
    for line, seconds in (
        ("elapsed time per iteration (ms): 123.4 | learning rate", 0.1234),
        ("step 7 step_time=0.250s loss 3.1", 0.25),
        ("{'step time': 250 ms}", 0.25),
        ("12%|#   | 3/25 [00:01<00:09, 2.50s/it]", 2.5),
        ("loss 3.1", None),
    ):
        assert step_of(line) == (None if seconds is None else pytest.approx(seconds))
